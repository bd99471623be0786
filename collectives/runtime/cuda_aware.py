"""Whether to pass device pointers to MPI: only if all ranks ask for it (docs/devices.md, "How messages pass MPI")."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

VARIABLE = "MPICOMP_CUDA_AWARE"
ARRIVED = "a device buffer sent to oneself in a child process arrived"

# Prefixes of variables that make a process a rank of a job, or keep it from
# initialising MPI. The child process is a job of its own.
_OF_THE_JOB = (
    *("OMPI_COMM_", "OMPI_UNIVERSE", "PMI", "PRTE", "HYDI_", "HYDRA_", "SLURM_"),
    "MPI4PY_RC_",
)
_TRIAL = """
import cupy
from mpi4py import MPI
for size in 16, 1 << 20:
    sent = cupy.arange(1, 1 + size)
    received = cupy.zeros(size, sent.dtype)
    cupy.cuda.get_current_stream().synchronize()
    MPI.COMM_SELF.Sendrecv(sent, 0, recvbuf=received, source=0)
    assert (received == sent).all(), "another buffer arrived"
"""


def is_direct(comm: "MPI.Intracomm") -> bool:
    """Return whether all ranks may pass device pointers to MPI; ValueError on all for a bad setting. Collective."""
    try:
        mine: bool | str = verdict(os.environ)[0]
    except ValueError as error:
        mine = f"rank {comm.rank}: {error}"
    everywhere = comm.allgather(mine)
    if wrong := [answer for answer in everywhere if isinstance(answer, str)]:
        raise ValueError(wrong[0])
    return all(everywhere)


def verdict(environment: Mapping[str, str]) -> tuple[bool, str]:
    """Return whether this rank may pass device pointers to MPI, and the reason; ValueError for an invalid setting."""
    setting = environment.get(VARIABLE, "0") or "0"
    reason = f"{VARIABLE} is {setting}"
    if setting not in ("0", "1"):
        raise ValueError(
            f"the environment variable {VARIABLE} is {setting!r}: expected 1 or 0"
        )
    if setting == "0" or query() is not False or has_cuda(alloc_kinds()):
        return setting == "1", reason
    if fault := trial():
        raise ValueError(
            f"the environment variable {reason}, but this MPI says that it is not CUDA-aware, and "
            f"{fault}: unset it, and messages are staged through pinned memory, or use an MPI that was built with CUDA"
        )
    return True, f"{reason}; this MPI says that it is not CUDA-aware, but {ARRIVED}"


def query() -> bool | None:
    """Return the result of MPIX_Query_cuda_support; None if MPI does not have it.

    Some MPIs that are CUDA-aware answer 0: Open MPI issues 11070, 12279 and 13130.
    """
    from mpi4py import MPI

    function = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return None if function is None else bool(function())


def alloc_kinds() -> str:
    """Return the kinds of memory that MPI 4.1 says it takes, such as "system,cuda:device"; empty if it says nothing."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds") or ""


def has_cuda(kinds: str) -> bool:
    """Return whether kinds of memory contain that of CUDA devices."""
    cuda = [kind.split(":") for kind in kinds.split(",") if kind.startswith("cuda")]
    return any(restrictors == [] or "device" in restrictors for _, *restrictors in cuda)


@cache
def trial() -> str:
    """Send device buffers to oneself in a child process, where a crash is an exit status; return what failed, or ""."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OF_THE_JOB)
    }
    command = [sys.executable, "-c", _TRIAL]
    try:
        done = subprocess.run(
            command, env=ours, capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        return (
            "a device buffer sent to oneself in a child process did not arrive in 60 s"
        )
    last = (done.stderr.strip().splitlines() or [""])[-1]
    failed = f"a child process that sends a device buffer to itself ended with exit status {done.returncode}"
    return f"{failed} {last}".strip() if done.returncode else ""
