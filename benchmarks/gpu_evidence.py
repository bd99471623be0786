"""Run the tests and benchmarks of the device path on a GPU, and write down what ran where: layer 4 of docs/devices.md.

    python benchmarks/gpu_evidence.py          # or: make gpu-evidence

needs CuPy, a GPU, and mpirun; writes docs/gpu_evidence/DATE-COMMIT.json, to be committed. The tests are those of every
other run, by their ids: with a GPU they take CuPy in place of its stand-in. A failed test is written down as well.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from devices import EVIDENCE, kernel_hash, real_cupy  # noqa: E402

SERIAL = "tests/test_device.py", "tests/cuda/test_device_kernels.py"
UNDER_MPI = "tests/mpi/test_device.py", "tests/mpi/test_device_exchange.py"
LIMIT = 1800  # seconds for each part


def main() -> int:
    """Run everything; 1 where a test failed, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="on the one GPU (%(default)s)")
    parser.add_argument("--lengths", nargs="+", default=["25e6", "1e9"], help="of the kernels' benchmark (25e6 1e9)")
    options = parser.parse_args()
    cupy = real_cupy()
    if cupy is None:
        sys.stderr.write("gpu_evidence: no GPU here, or CuPy is missing; nothing was written\n")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        tests = {
            "serial": tested([sys.executable, "-m", "pytest", "-q", *SERIAL], Path(folder, "serial.xml")),
            f"{options.ranks} ranks": tested(
                ["bash", "tests/launch.sh", str(options.ranks), *UNDER_MPI, "-q"], Path(folder, "mpi.xml")
            ),
        }
        found = {**about(cupy), "tests": tests, "benchmarks": benchmarks(options, Path(folder))}
    EVIDENCE.mkdir(exist_ok=True)
    path = EVIDENCE / f"{found['date']}-{found['commit'][:12]}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"wrote {path.relative_to(ROOT)}: {tests}")
    return 1 if any(each["failed"] or not each["passed"] for each in tests.values()) else 0


def about(cupy: Any) -> dict[str, Any]:
    """Return what the figures depend on."""
    from mpi4py import MPI

    from collectives.runtime import cuda_aware

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    dirty = said(["git", "status", "--porcelain", "--untracked-files=no"])
    return {
        "date": str(date.today()),
        "commit": said(["git", "rev-parse", "HEAD"]) + ("+changes" if dirty else ""),
        "kernels": kernel_hash(),
        "device": properties["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "CUDA": cupy.cuda.runtime.runtimeGetVersion(),
        "CuPy": cupy.__version__,
        "python": platform.python_version(),
        "MPI": MPI.Get_library_version().strip("\0 \n").partition(",")[0],
        "CUDA-aware": cuda_aware.verdict(os.environ),
    }


def tested(command: Sequence[str], report: Path) -> dict[str, int]:
    """Run tests, and return how many passed, failed and were skipped; all failed where there is no report."""
    under_mpi = "tests/launch.sh" in command  # there rank 0 alone writes one
    os.environ["MPI_TEST_REPORT"] = str(report)
    ran(command if under_mpi else [*command, f"--junitxml={report}"])
    if not report.exists():
        return {"passed": 0, "failed": 1, "skipped": 0}
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    skipped = int(suite.get("skipped", 0))
    return {"passed": int(suite.get("tests", 0)) - failed - skipped, "failed": failed, "skipped": skipped}


def benchmarks(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the rows of the kernels, and of gTop-k with messages staged and, where MPI takes them, direct."""
    mpicomp = [sys.executable, "-m", "mpicomp_bench"]
    found: dict[str, Any] = {}
    for length in options.lengths:
        bench = ["bench", "kernels", "--device", "gpu", "--length", length]
        found[f"kernels {length}"] = measured([*mpicomp, *bench], folder / f"kernels-{length}.json")
    for setting, way in (("0", "staged"), ("1", "direct")):
        bench = ["bench", "gtopk", "--device", "gpu", "--lengths", "25e6", "--densities", "0.001", "--from-gradient"]
        command = ["mpirun", "-n", str(options.ranks), "-x", f"MPICOMP_CUDA_AWARE={setting}", *mpicomp, *bench]
        found[f"gtopk {way}"] = measured(command, folder / f"gtopk-{way}.json")
    return found


def measured(command: Sequence[str], report: Path) -> Any:
    """Run a benchmark, and return what it wrote, or how it ended."""
    done = ran([*command, "--json", str(report)])
    return json.loads(report.read_text()) if report.exists() else f"exit {done}"


def ran(command: Sequence[str]) -> int | str:
    """Run a command in the repository, and return its exit status."""
    print("==", *command, flush=True)
    try:
        return subprocess.run(command, cwd=ROOT, timeout=LIMIT, check=False).returncode
    except subprocess.TimeoutExpired:
        return f"over {LIMIT} s"


def said(command: Sequence[str]) -> str:
    """Return what a command prints."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
