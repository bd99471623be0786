"""Whether MPI accepts pointers to CUDA device memory; if in doubt no, as a wrong answer is a segmentation fault.

MPICOMP_CUDA_AWARE=1 selects direct messages, 0 messages staged through pinned memory. Without it messages are direct
only if MPI's query returns true (in some builds it does on machines without a driver), CuPy finds a device, and a child
process sends a message from the device to itself; a crash ends only the child. All ranks stage messages if one of them
has to.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

VARIABLE = "MPICOMP_CUDA_AWARE"
_BAD, _STAGED, _DIRECT = -1, 0, 1
_PATIENCE = 60.0  # seconds for the child, which starts MPI and CUDA

_TRIAL = """
import cupy, sys
from mpi4py import MPI
sent, received = cupy.arange(4096), cupy.zeros(4096, int)
cupy.cuda.get_current_stream().synchronize()
MPI.COMM_SELF.Sendrecv(sent, 0, 0, received, 0, 0)
sys.exit(0 if bool((sent == received).all()) else 1)
"""


def is_direct(comm: "MPI.Intracomm") -> bool:
    """Return whether all ranks may pass device pointers to MPI. Collective, blocks.

    Raises ValueError on all ranks if one of them has an invalid setting.
    """
    from mpi4py import MPI

    wrong = f"another rank has a bad {VARIABLE}: see its error; set the same value on all ranks"
    try:
        state = _DIRECT if verdict(os.environ)[0] else _STAGED
    except ValueError as error:
        state, wrong = _BAD, str(error)
    least = np.array([state], np.int32)
    comm.Allreduce(MPI.IN_PLACE, least, MPI.MIN)
    if least[0] == _BAD:
        raise ValueError(wrong)
    return bool(least[0] == _DIRECT)


def verdict(environment: Mapping[str, str]) -> tuple[bool, str]:
    """Return whether this rank may pass device pointers to MPI, and the reason; ValueError for an invalid setting."""
    setting, is_aware = environment.get(VARIABLE, ""), query()
    if setting not in ("", "0", "1"):
        raise ValueError(f"the environment variable {VARIABLE} is {setting!r}: expected 1, 0, or nothing to find out")
    if setting == "1" and is_aware is False:
        raise ValueError(
            f"the environment variable {VARIABLE} is 1, but this MPI ({_library()}) says that it is not CUDA-aware: "
            "unset it, and messages are staged through pinned memory, or use an MPI that was built with CUDA"
        )
    if setting:
        return setting == "1", f"{VARIABLE} is {setting}"
    if not is_aware:
        return False, "MPI does not say that it is CUDA-aware" if is_aware is None else "MPI is not CUDA-aware"
    if not _device_seen():
        return False, "CuPy sees no device"
    if not tried():
        return False, "MPI says that it is CUDA-aware, but a child process could not send from the device"
    return True, "MPI is CUDA-aware, and a child process sent from the device"


def query() -> bool | None:
    """Return the result of MPIX_Query_cuda_support; None if MPI does not have it."""
    from mpi4py import MPI

    function = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return None if function is None else bool(function())


def tried() -> bool:
    """Send a message from the device to the same process, in a child process; return whether it arrived."""
    launcher = ("OMPI_", "PMI", "PRTE_", "SLURM_", "HYDRA_", "MPI_")
    alone = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    try:
        done = subprocess.run([sys.executable, "-c", _TRIAL], env=alone, capture_output=True, timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _device_seen() -> bool:
    try:
        import cupy

        return bool(cupy.cuda.is_available())
    except ImportError:
        return False


def _library() -> str:
    from mpi4py import MPI

    return MPI.Get_library_version().strip("\0 \n").splitlines()[0].partition(",")[0]
