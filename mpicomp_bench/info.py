"""`mpicomp info`: versions, the MPI library, and whether the launcher and MPI fit together."""

import argparse
import json
import os
import platform
from importlib import metadata
from typing import Any, TextIO

from collectives.launcher import singleton_warning
from collectives.runtime import cuda_aware

EXAMPLES = """
mpicomp info
mpirun -n 4 mpicomp info
srun --mpi=pmix -n 4 mpicomp info --json
"""


def add_to(commands: Any) -> None:
    """Add the command to the command line."""
    about = "the versions in this installation, and whether the launcher and MPI fit together"
    info = commands.add_parser("info", help=about, description=f"Print {about}; exit with 1 if not.", examples=EXAMPLES)
    info.add_argument("--json", action="store_true", help="print JSON instead of lines")


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Print the report on rank 0; return 1 on every rank when launcher and MPI do not fit together, else 0."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    hosts = len(set(world.allgather(MPI.Get_processor_name())))
    warning = singleton_warning(world.size, os.environ)
    if world.rank == 0:
        found = {"python": platform.python_version()}
        found |= {name: metadata.version(name) for name in ("mpicomp", "numpy", "numba", "mpi4py")}
        found["MPI"] = library_and_version(MPI.Get_library_version())
        found |= {"ranks": f"{world.size} on {hosts} host{'s' if hosts > 1 else ''}", **device()}
        if options.json:
            out.write(json.dumps({**found, "warning": warning}, indent=1) + "\n")
        else:
            out.writelines(f"{name:8} {value}\n" for name, value in found.items())
            out.write(f"warning: {warning}\n" if warning else "")
    return 1 if warning else 0


def library_and_version(described: str) -> str:
    """Return the name and the version in MPI.Get_library_version(): its first line, up to a comma."""
    return " ".join(described.strip("\0 \n").splitlines()[0].partition(",")[0].split())


def device() -> dict[str, str]:
    """Return where arrays may be, and how those of a device are sent, with the reason."""
    try:
        import cupy

        seen = "main memory, a CUDA device" if cupy.cuda.is_available() else "main memory (CuPy sees no device)"
    except ImportError:
        seen = "main memory (CuPy is not installed)"
    try:
        direct, why = cuda_aware.verdict(os.environ)
    except ValueError as error:
        return {"arrays": seen, "device": f"cannot be used: {error}"}
    return {"arrays": seen, "device": f"{'direct' if direct else 'staged through pinned memory'}: {why}"}
