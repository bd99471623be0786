"""`mpicomp info`: versions, the MPI library, and whether launcher and MPI match."""

import argparse
import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from collectives.calls.first_call import missing_probes
from collectives.faults import ulfm
from collectives.runtime import cuda_aware, progress
from collectives.runtime.launcher import LAUNCHER_SIZES, singleton_warning
from mpicomp.kernels.host.bits import cache_folder

CPUINFO = Path("/proc/cpuinfo")
# Flags in this file of processors that compute in bfloat16: x86 and Arm.
BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}

EXAMPLES = """
mpirun -n 4 mpicomp info
mpicomp info --recovery
"""


def add_to(commands: Any) -> None:
    """Add the command to the command line."""
    about = "print versions, and whether launcher and MPI fit together"
    info = commands.add_parser(
        "info",
        help=about,
        description=f"{about.capitalize()}; exit 1 if not.",
        examples=EXAMPLES,
    )
    info.add_argument("--json", action="store_true", help="print JSON (lines)")
    info.add_argument(
        "--recovery",
        action="store_true",
        help="print mpirun's options for continuing after the death of a rank, only",
    )


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Print the report on rank 0; return 1 on every rank if launcher, MPI and network do not match, else 0."""
    if options.recovery:
        out.write(ulfm.FLAGS + "\n")
        return 0
    versions = {"python": platform.python_version()}
    versions |= {
        name: metadata.version(name) for name in ("mpicomp", "numpy", "numba", "mpi4py")
    }
    if missing := missing_mpi():
        out.write(shown({**versions, "MPI": None}, missing, as_json=options.json))
        return 1
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    hosts = len(set(world.allgather(MPI.Get_processor_name())))
    warning = singleton_warning(world.size, os.environ) or missing_probes(world)
    if world.rank == 0:
        folder = cache_folder()
        found: dict[str, str | None] = {
            **versions,
            "MPI": library_and_version(MPI.Get_library_version()),
            "ranks": f"{world.size} on {hosts} host{'s' if hosts > 1 else ''}",
            "launcher": launcher(world.size, os.environ),
            "progress": progress.described(),
            **device(),
            "bfloat16": bfloat16(CPUINFO),
            "kernels": (
                f"cached in {folder}" if folder else "not cached: set NUMBA_CACHE_DIR"
            ),
            "recovery": recovery(hosts),
        }
        out.write(shown(found, warning, as_json=options.json))
    return 1 if warning else 0


def shown(found: dict[str, str | None], warning: str | None, *, as_json: bool) -> str:
    """Return the report as text."""
    if as_json:
        return json.dumps({**found, "warning": warning}, indent=1) + "\n"
    lines = [f"{name:8} {value or 'none'}\n" for name, value in found.items()]
    return "".join(lines) + (f"warning: {warning}\n" if warning else "")


def missing_mpi() -> str | None:
    """Return why there is no MPI, and the remedy; None where there is one."""
    try:
        from mpi4py import MPI  # noqa: F401
    except (ImportError, RuntimeError) as error:
        why = ": ".join(str(error).splitlines()[:2])
        return (
            f'mpi4py finds no MPI library ({why}): on a cluster load the site\'s, such as by "module load openmpi" or '
            '"module load mpich"; elsewhere pip install "mpicomp[mpi]" (in a checkout: pip install ".[mpi]")'
        )
    return None


def recovery(hosts: int) -> str:
    """Return whether this job continues after the death of a rank, and the missing options of mpirun."""
    if not ulfm.survives():
        return "the job ends when a rank dies; Open MPI 5 continues under mpirun $(mpicomp info --recovery)"
    wrong = ulfm.detector_warning(os.environ)
    if wrong and hosts > 1:
        return f"warning: {wrong}"
    return "the job continues when a rank dies (ULFM)" + (
        ", on one host" if wrong else "; the failure detector is set"
    )


def launcher(size: int, environment: Mapping[str, str]) -> str:
    """Return whether the launcher that started the ranks fits MPI, which sees `size`."""
    if singleton_warning(size, environment):
        return "does not fit this MPI: see the warning"
    said = [name for name in LAUNCHER_SIZES if name in environment]
    if not said:
        return "none; mpirun -n 2 mpicomp info says whether yours fits"
    return f"fits this MPI: {said[0]}={size}, and MPI sees as many ranks"


def bfloat16(cpuinfo: Path) -> str:
    """Return whether this processor computes in bfloat16, as PyTorch's Muon does."""
    known = cpuinfo.read_text().split() if cpuinfo.exists() else []
    flags = sorted(BFLOAT16.intersection(known))
    if flags:
        return f"computed by this processor ({', '.join(flags)})"
    return "emulated on this processor, as torch.optim.Muon needs it: examples/muon.py takes the steps in float32"


def library_and_version(described: str) -> str:
    """Return the name and the version in MPI.Get_library_version(): its first line, up to a comma."""
    return " ".join(described.strip("\0 \n").splitlines()[0].partition(",")[0].split())


def device() -> dict[str, str]:
    """Return the supported devices, whether device messages are staged or direct and why, and what MPI says of CUDA."""
    try:
        import cupy

        seen = (
            "host memory, a CUDA device"
            if cupy.cuda.is_available()
            else "host memory (CuPy sees no device)"
        )
    except ImportError:
        seen = "host memory (CuPy is not installed)"
    try:
        direct, why = cuda_aware.verdict(os.environ)
        used = f"{'direct' if direct else 'staged through pinned memory'}: {why}"
    except ValueError as error:
        used = f"cannot be used: {error}"
    return {"arrays": seen, "device": used, "CUDA": answers()}


def answers() -> str:
    """Return what this MPI says of itself, in both ways, and what follows."""
    supports = cuda_aware.query()
    kinds = cuda_aware.alloc_kinds()
    query_says = "missing" if supports is None else int(supports)
    said = f"MPIX_Query_cuda_support {query_says}, mpi_memory_alloc_kinds {kinds or 'missing'}"
    if supports or cuda_aware.has_cuda(kinds):
        return (
            f"{said}: CUDA-aware, {cuda_aware.VARIABLE}=1 passes device memory to MPI"
        )
    return f"{said}: not known to be CUDA-aware, {cuda_aware.VARIABLE}=1 tries a device buffer first"
