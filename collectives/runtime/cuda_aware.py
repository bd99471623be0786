"""Whether to pass device pointers to MPI: only if all ranks ask for it (docs/devices.md, "How messages pass MPI")."""

import ctypes
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

VARIABLE = "MPICOMP_CUDA_AWARE"


def is_direct(comm: "MPI.Intracomm") -> bool:
    """Return whether all ranks may pass device pointers to MPI; ValueError on all for a bad setting. Collective."""
    try:
        mine: bool | str = verdict(os.environ)[0]
    except ValueError as error:
        mine = f"rank {comm.rank}: {error}"
    everywhere = comm.allgather(mine)
    if wrong := [each for each in everywhere if isinstance(each, str)]:
        raise ValueError(wrong[0])
    return all(everywhere)


def verdict(environment: Mapping[str, str]) -> tuple[bool, str]:
    """Return whether this rank may pass device pointers to MPI, and the reason; ValueError for an invalid setting."""
    setting = environment.get(VARIABLE, "0") or "0"
    if setting not in ("0", "1"):
        raise ValueError(
            f"the environment variable {VARIABLE} is {setting!r}: expected 1 or 0"
        )
    if setting == "1" and query() is False:
        raise ValueError(
            f"the environment variable {VARIABLE} is 1, but this MPI ({_library()}) says that it is not CUDA-aware: "
            "unset it, and messages are staged through pinned memory, or use an MPI that was built with CUDA"
        )
    return setting == "1", f"{VARIABLE} is {setting}"


def query() -> bool | None:
    """Return the result of MPIX_Query_cuda_support; None if MPI does not have it."""
    from mpi4py import MPI

    function = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return None if function is None else bool(function())


def _library() -> str:
    from mpi4py import MPI

    return MPI.Get_library_version().strip("\0 \n").splitlines()[0].partition(",")[0]
