"""Run the tests and benchmarks of the device path on a GPU, and write what ran: layer 4 of docs/contributing/gpu.md.

    python benchmarks/gpu_evidence.py          # or: make gpu-evidence, which installs what is missing, from an index
    python benchmarks/gpu_evidence.py --mpi DIR          # a CUDA-aware MPI in DIR: messages direct as well
    python benchmarks/gpu_evidence.py --dry-run --folder build/evidence

One run of five minutes on one GPU, the most telling parts first: the tests of the
device path in processes beside each other, alone and on two ranks that share the GPU;
what one rank computes, of `torch.topk` to a model of 160 tensors; the same with nothing
to compute, which is the cost of the host; steps of two ranks, messages staged and,
where the MPI is CUDA-aware, direct; PyTorch's DistributedDataParallel and local steps;
a selection from 1e9 values; counters of a selection, where `ncu` is installed. Needs
mpirun, a CUDA driver and the packages of `NEEDED`, but no network; PyTorch with CUDA
for its rows. It says what is missing before it starts.

Writes docs/gpu_evidence/DATE-COMMIT.json anew after each part, to be committed; a part
for which no time is left is written down as such, and so is a test that fails.
--dry-run runs every part on the stand-in for CuPy, small, and writes to --folder: no
evidence, but what would fail for another reason than the GPU fails there.
"""

import argparse
import csv
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT)]

NEEDED = ["cupy", "numpy", "numba", "mpi4py", "pytest", "pytest_mpi", "hypothesis"]
# pytest's arguments, of processes that run beside each other
KERNELS, MANY = "tests/cuda/test_device_kernels.py", "many_launches"
SERIAL = {
    "arrays": ["tests/mpicomp/test_device.py"],
    "kernels": [KERNELS, "-k", f"not {MANY}"],
    "kernels, many launches": [KERNELS, "-k", MANY],
}
UNDER_MPI = "tests/mpi/test_device_arrays.py", "tests/mpi/test_device_exchange.py"
WAYS = {"staged": "0", "direct": "1"}  # how messages pass MPI, and MPICOMP_CUDA_AWARE
SMALL = {  # pytest's arguments in a dry run
    "arrays": ["-k", "subnormal_numbers"],
    "kernels": ["-k", "signs_of_values and round_robin"],
    "kernels, many launches": ["-k", "every_k and 0"],
    "ranks": ["-k", "test_gtopk and P2"],
}
COUNTERS = (
    "gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum,"
    "dram__throughput.avg.pct_of_peak_sustained_elapsed,launch__registers_per_thread,"
    "smsp__inst_executed.sum"
)


def main() -> int:
    """Run everything; 1 where a test or a benchmark failed, 2 where there is no GPU or a package is missing."""
    options = parsed()
    os.environ.update(environment(options))
    missing = [
        name
        for name in NEEDED
        if name != "cupy" and importlib.util.find_spec(name) is None
    ]
    missing += [] if shutil.which("mpirun") else ["mpirun"]
    if missing:
        return refused(
            f"missing: {', '.join(missing)}; pip install '.[test,gpu]' and an MPI"
        )
    from devices import cupy_for_tests, real_cupy

    if real_cupy() is None and not options.dry_run:
        return refused("no GPU here, or CuPy is missing")
    cupy = cupy_for_tests()
    path = Path(options.folder)
    path.mkdir(parents=True, exist_ok=True)
    found = about(cupy)
    if found["MPI"] is None:
        return refused("no MPI that mpi4py loads; see mpicomp info, or --mpi")
    path /= f"{found['date']}-{found['commit'][:12]}.json"
    with tempfile.TemporaryDirectory() as folder:
        for name, (most, part) in parts(options, Path(folder)).items():
            left = min(most, options.seconds - time.monotonic() + BEGAN)
            began = time.monotonic()
            found[name] = (
                part(left) if left > LEAST else f"no time left of {options.seconds} s"
            )
            found["seconds"][name] = round(time.monotonic() - began, 1)
            path.write_text(json.dumps(found, indent=1) + "\n")
    tests = found["tests"]
    print(f"wrote {path}: {tests}; seconds {found['seconds']}")
    passed = isinstance(tests, dict) and all(
        each["passed"] and not each["failed"] for each in tests.values()
    )
    ended = [part for part in found.values() if str(part).startswith("exit ")]
    return 0 if passed and not ended else 1


BEGAN, LEAST = time.monotonic(), 5.0


def parsed() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="on the one GPU (%(default)s)")
    add(
        "--lengths",
        nargs=3,
        default=["25e6", "268435456", "1e9"],
        help="of a step, of the calls, and of one selection (25e6 268435456 1e9)",
    )
    add(
        "--seconds",
        type=float,
        default=300.0,
        help="for all parts together (%(default)s)",
    )
    add(
        "--mpi",
        metavar="DIR",
        help="an MPI, such as a CUDA-aware one: DIR/bin, DIR/lib",
    )
    add("--folder", help="where the report is written (docs/gpu_evidence)")
    add(
        "--dry-run",
        action="store_true",
        help="small, on the stand-in for CuPy; needs --folder",
    )
    options = parser.parse_args()
    if options.dry_run and not options.folder:
        parser.error("--dry-run needs --folder: what it writes is no evidence")
    options.folder = options.folder or str(ROOT / "docs" / "gpu_evidence")
    if options.dry_run:
        options.lengths = ["20000"] * 3
    return options


def refused(why: str) -> int:
    """Say why nothing is measured."""
    sys.stderr.write(f"gpu_evidence: {why}; nothing was written\n")
    return 2


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables of all parts: where they import from, and the MPI; in a dry run the stand-in for CuPy."""
    stand_in = [str(ROOT / "tests" / "fake_cupy")] if options.dry_run else []
    found = {
        "PYTHONPATH": before("PYTHONPATH", *stand_in, ROOT, ROOT / "tests" / "support")
    }
    if options.dry_run:  # as if MPI saw the memory of the device
        found["MPICOMP_FAKE_VISIBLE"] = "1"
    if options.mpi:
        mpi = Path(options.mpi).resolve()
        found["PATH"] = before("PATH", mpi / "bin")
        found["LD_LIBRARY_PATH"] = before("LD_LIBRARY_PATH", mpi / "lib")
        # some packages have no libmpi.so, or a text in its place
        numbered = sorted((mpi / "lib").glob("libmpi.so.[0-9]*"))
        found["MPI4PY_LIBMPI"] = str([*numbered, mpi / "lib" / "libmpi.so"][0])
    settings = (ROOT / "tests" / "openmpi.env").read_text().splitlines()
    return found | dict(
        line.split("=", 1) for line in settings if line and line[0] != "#"
    )


def before(variable: str, *paths: Path | str) -> str:
    """Return a list of paths with others in front of those that a variable has."""
    inherited = [os.environ[variable]] if os.environ.get(variable) else []
    return os.pathsep.join([*map(str, paths), *inherited])


Part = Callable[[float], Any]


def parts(options: argparse.Namespace, folder: Path) -> dict[str, tuple[float, Part]]:
    """Return the parts by name, the most telling ones first: the most seconds that each may take, and what runs it."""
    python = [sys.executable, "-m", "mpi4py"]
    ranks = ["mpirun", "-n", str(options.ranks), *python]
    repeats = ["--repeats", "1" if options.dry_run else "9"]
    step, most, longest = options.lengths
    calls = [sys.executable, "benchmarks/gpu_calls.py", *repeats, "--length"]
    torch = [*ranks, "benchmarks/gpu_torch.py"]
    if options.dry_run:
        torch += ["--width", "32", "--layers", "3", "--steps", "10"]
    found: dict[str, tuple[float, Part]] = {
        "tests": (120, partial(all_tested, options, folder))
    }

    def add(name: str, most: float, command: Sequence[str], **variables: str) -> None:
        report = folder / f"{len(found)}.json"
        found[name] = most, partial(measured, command, report, variables)

    add(f"calls {most}", 70, [*calls, most])
    add("calls 10000", 30, [*calls, "10000"])
    steps = [*ranks, "benchmarks/gpu_step.py", *repeats, "--length", step]
    add("step staged", 40, steps, MPICOMP_CUDA_AWARE=WAYS["staged"])
    add("PyTorch, staged", 60, torch, MPICOMP_CUDA_AWARE=WAYS["staged"])
    add(f"selection {longest}", 30, [*calls, longest, "--only", "largest"])
    add("step direct", 40, steps, MPICOMP_CUDA_AWARE=WAYS["direct"])
    counted = [*calls, most, "--only", "add_largest"]
    found["counters"] = 40, partial(counters, counted)
    return found


def all_tested(options: argparse.Namespace, folder: Path, left: float) -> Any:
    """Run the tests in processes beside each other, and return the results by name."""
    commands = {
        name: [sys.executable, "-m", "pytest", "-q", *arguments]
        for name, arguments in SERIAL.items()
    }
    launched = ["bash", "tests/launch.sh", str(options.ranks), *UNDER_MPI, "-q"]
    commands["ranks"] = launched
    if options.dry_run:
        commands = {name: each + SMALL[name] for name, each in commands.items()}
    with ThreadPoolExecutor(len(commands)) as pool:
        started = {
            name: pool.submit(tested, command, folder / f"{name}.xml", left)
            for name, command in commands.items()
        }
    return {name: each.result() for name, each in started.items()}


def about(cupy: Any) -> dict[str, Any]:
    """Return what the figures depend on."""
    from devices import kernel_hash

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    # of the MPI that the parts load, perhaps another one than this process
    said_of_mpi = said([sys.executable, "-m", "mpicomp_bench", "info", "--json"])
    of_mpi = {"MPI": None, "CUDA": None} | json.loads(said_of_mpi)
    dirty = said(["git", "status", "--porcelain", "--untracked-files=no"])
    return {
        "date": str(date.today()),
        "commit": (said(["git", "rev-parse", "HEAD"]) or "unknown")
        + ("+changes" if dirty else ""),
        "kernels": kernel_hash(),
        "device": properties["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "CUDA": cupy.cuda.runtime.runtimeGetVersion(),
        "CuPy": cupy.__version__,
        "python": platform.python_version(),
        "MPI": of_mpi["MPI"],
        "CUDA-aware": of_mpi["CUDA"],
        "torch": version("torch"),
        "seconds": {},
    }


def version(name: str) -> str | None:
    """Return the version of a package, None where it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def tested(command: Sequence[str], report: Path, left: float) -> dict[str, Any]:
    """Run tests, and return how many passed, failed and were skipped, and which failed, or how it ended."""
    under_mpi = "tests/launch.sh" in command  # there rank 0 alone writes one
    environment = (
        {"MPI_TEST_REPORT": str(report), "MPI_TEST_TIMEOUT": str(int(left))}
        if under_mpi
        else {}
    )
    ended = ran(
        command if under_mpi else [*command, f"--junitxml={report}"], left, environment
    )
    if not report.exists():
        return {"passed": 0, "failed": 1, "skipped": 0, "ended": ended}
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    failures = [
        case.get("name")
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    skipped = int(suite.get("skipped", 0))
    return {
        "passed": int(suite.get("tests", 0)) - failed - skipped,
        "failed": failed,
        "skipped": skipped,
        "failures": failures,
    }


def measured(
    command: Sequence[str], report: Path, variables: dict[str, str], left: float
) -> Any:
    """Run a benchmark, and return the rows that it wrote, also if it was stopped, or how it ended."""
    ended = ran([*command, "--json", str(report)], left, variables)
    return json.loads(report.read_text()) if report.exists() else f"exit {ended}"


def counters(command: Sequence[str], left: float) -> Any:
    """Return the hardware counters of each kernel of a call, by Nsight Compute; says so where that is missing."""
    if shutil.which("ncu") is None:
        return "left out: no ncu"
    profiled = ["ncu", "--csv", "--metrics", COUNTERS, "--launch-count", "40", *command]
    try:
        done = subprocess.run(
            profiled,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=left,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"over {left:.0f} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    kept = "Kernel Name", "Metric Name", "Metric Unit", "Metric Value"
    rows = [{name: row[name] for name in kept} for row in csv.DictReader(lines)]
    return rows or f"exit {done.returncode}: {(done.stdout + done.stderr)[-300:]}"


def ran(command: Sequence[str], left: float, environment: dict[str, str]) -> int | str:
    """Run a command in the repository, and return its exit status."""
    print("==", *command, flush=True)
    try:
        return subprocess.run(
            command, cwd=ROOT, timeout=left, check=False, env=os.environ | environment
        ).returncode
    except subprocess.TimeoutExpired:
        return f"over {left:.0f} s"


def said(command: Sequence[str]) -> str:
    """Return what a command prints; nothing where it fails, as git does outside of a repository."""
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
