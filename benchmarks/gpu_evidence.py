"""Run the tests and benchmarks of the device path on a GPU, and write down what ran where: layer 4 of docs/devices.md.

    python benchmarks/gpu_evidence.py          # or: make gpu-evidence, which installs what is missing, from an index

One run of ten minutes on one GPU: the tests of the device path, alone and on two ranks
that share the GPU; the kernels against `torch.topk`, `cupy.argpartition` and one read;
a step in place over a dense allreduce and gTop-k, messages staged and, where the MPI is
CUDA-aware, direct; Top-k of 1e9 values. Needs mpirun, a CUDA driver and the packages of
`NEEDED`, but no network; PyTorch with CUDA for its rows. It says what is missing before
it starts.

Writes docs/gpu_evidence/DATE-COMMIT.json anew after each part, to be committed; a part
for which no time is left is written down as such, and so is a test that fails.
--dry-run runs every part on the stand-in for CuPy, small, and writes to --folder: no
evidence, but what would fail for another reason than the GPU fails there.
"""

import argparse
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
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

NEEDED = ["cupy", "numpy", "numba", "mpi4py", "pytest", "pytest_mpi", "hypothesis"]
SERIAL = "tests/test_device.py", "tests/cuda/test_device_kernels.py"
UNDER_MPI = "tests/mpi/test_device.py", "tests/mpi/test_device_exchange.py"
WAYS = {"staged": "0", "direct": "1"}  # how messages pass MPI, and MPICOMP_CUDA_AWARE


def main() -> int:
    """Run everything; 1 where a test failed, 2 where there is no GPU or a package is missing."""
    options = parsed()
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
    os.environ["PYTHONPATH"] = os.pathsep.join(paths(options))
    cupy, found = cupy_for_tests(), {}
    path = Path(options.folder)
    path.mkdir(parents=True, exist_ok=True)
    found = about(cupy)
    path /= f"{found['date']}-{found['commit'][:12]}.json"
    with tempfile.TemporaryDirectory() as folder:
        for name, part in parts(options, Path(folder)).items():
            left = options.seconds - time.monotonic() + BEGAN
            found[name] = (
                part(left) if left > LEAST else f"no time left of {options.seconds} s"
            )
            path.write_text(json.dumps(found, indent=1) + "\n")
    tests = [each for name, each in found.items() if name.startswith("tests")]
    print(f"wrote {path}: {tests}")
    return (
        0
        if all(
            isinstance(each, dict) and each["passed"] and not each["failed"]
            for each in tests
        )
        else 1
    )


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
        nargs="+",
        default=["25e6", "1e9"],
        help="of the kernels' benchmark (25e6 1e9)",
    )
    add(
        "--seconds",
        type=float,
        default=600.0,
        help="for all parts together (%(default)s)",
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
        options.lengths = ["30000"]
    return options


def refused(why: str) -> int:
    """Say why nothing is measured."""
    sys.stderr.write(f"gpu_evidence: {why}; nothing was written\n")
    return 2


def paths(options: argparse.Namespace) -> list[str]:
    """Return the folders that the parts import from; in a dry run the stand-in for CuPy is in the first one."""
    stand_in = [str(ROOT / "tests" / "fake_cupy")] if options.dry_run else []
    inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return [*stand_in, str(ROOT), str(ROOT / "tests"), *inherited]


def parts(
    options: argparse.Namespace, folder: Path
) -> dict[str, Callable[[float], Any]]:
    """Return the parts by name, the most telling ones first; each takes the seconds that are left."""
    few = ["-k", "top_k_of_few or test_two_way"] if options.dry_run else []
    under_mpi = ["-k", "test_gtopk and P2"] if options.dry_run else []
    pytest = [sys.executable, "-m", "pytest", "-q", *SERIAL, *few]
    launched = [
        "bash",
        "tests/launch.sh",
        str(options.ranks),
        *UNDER_MPI,
        "-q",
        *under_mpi,
    ]
    found: dict[str, Callable[[float], Any]] = {
        "tests, serial": lambda left: tested(pytest, folder / "serial.xml", left),
        f"tests, {options.ranks} ranks": lambda left: tested(
            launched, folder / "mpi.xml", left
        ),
    }
    mpicomp, ranks = (
        [sys.executable, "-m", "mpicomp_bench"],
        ["mpirun", "-n", str(options.ranks)],
    )
    kernels = [sys.executable, "benchmarks/kernels.py", "--device", "gpu"]
    small, repeats = options.lengths[0], ["--repeats", "1" if options.dry_run else "9"]

    def add(name: str, command: Sequence[str], **environment: str) -> None:
        found[name] = lambda left: measured(
            command, folder / f"{len(name)}-{time.time_ns()}.json", left, environment
        )

    add(f"kernels {small}", [*kernels, "--length", small, *repeats])
    for way, setting in WAYS.items():
        step = [
            *ranks,
            sys.executable,
            "-m",
            "mpi4py",
            "benchmarks/gpu_step.py",
            "--length",
            small,
            *repeats,
        ]
        add(f"step {way}", step, MPICOMP_CUDA_AWARE=setting)
    for length in options.lengths[1:]:
        add(f"kernels {length}", [*kernels, "--length", length, *repeats])
    bench = [
        "bench",
        "gtopk",
        "--device",
        "gpu",
        "--lengths",
        small,
        "--densities",
        "0.001",
        "--from-gradient",
        *repeats,
    ]
    for way, setting in WAYS.items():
        add(f"gtopk {way}", [*ranks, *mpicomp, *bench], MPICOMP_CUDA_AWARE=setting)
    return found


def about(cupy: Any) -> dict[str, Any]:
    """Return what the figures depend on."""
    from devices import kernel_hash
    from mpi4py import MPI

    from collectives.runtime import cuda_aware

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
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
        "MPI": MPI.Get_library_version().strip("\0 \n").partition(",")[0],
        "CUDA-aware": cuda_aware.verdict(os.environ),
    }


def tested(command: Sequence[str], report: Path, left: float) -> dict[str, Any]:
    """Run tests, and return how many passed, failed and were skipped; how it ended where there is no report."""
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
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    skipped = int(suite.get("skipped", 0))
    return {
        "passed": int(suite.get("tests", 0)) - failed - skipped,
        "failed": failed,
        "skipped": skipped,
    }


def measured(
    command: Sequence[str], report: Path, left: float, environment: dict[str, str]
) -> Any:
    """Run a benchmark, and return what it wrote, or how it ended."""
    ended = ran([*command, "--json", str(report)], left, environment)
    return json.loads(report.read_text()) if report.exists() else f"exit {ended}"


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
