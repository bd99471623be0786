"""What MPI says when a rank has died, where it goes on without (ULFM); elsewhere it ends the job.

The rank that finds out revokes the communicator inside MPI, so that those that wait for other ranks come out as well.
"""

import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

ASKED = "OMPI_MCA_mpi_ft_enable"  # what `mpirun --with-ft ulfm` sets
GRACE = 1.0  # seconds in which MPI may find out who died; the others are told at once that somebody did


def survives() -> bool:
    """Return whether this job goes on when a rank dies: under Open MPI 5 and `mpirun --with-ft ulfm`.

    MPICH has the calls, but hangs in them.
    """
    from mpi4py import MPI

    asked = os.environ.get(ASKED, "0").lower() not in ("", "0", "false")
    return asked and MPI.Get_library_version().startswith("Open MPI") and hasattr(MPI.Comm, "Shrink")


def is_failure(error: BaseException, comm: "MPI.Intracomm | None" = None) -> bool:
    """Return whether MPI says by this error that a rank died, or that another rank has found that out.

    comm: where it was raised by one of MPI's own nonblocking collectives: these raise an internal error for both.
    """
    from mpi4py import MPI

    if not (isinstance(error, MPI.Exception) and survives()):
        return False
    names = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
    classes = {getattr(MPI, name, None) for name in names} - {None}  # mpi4py has them from 4.0.1 on
    got = error.Get_error_class()
    return got in classes or (got == MPI.ERR_INTERN and comm is not None and (comm.Is_revoked() or bool(_known(comm))))


def found(comm: "MPI.Intracomm", doing: str) -> str:
    """Revoke a communicator on which a rank has died, and return what there is to say; `doing` stands in front."""
    if not comm.Is_revoked():
        comm.Revoke()
    ranks = _dead(comm)
    who = "a rank" if not ranks else ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
    return (
        f"{doing}: {who} died. The communicator is revoked for this library: collectives.shrink(comm) returns one of "
        "the ranks that are left"
    )


def _dead(comm: Any) -> list[int]:
    """Return the ranks that died, as soon as MPI knows of one here."""
    from mpi4py import MPI

    end = time.monotonic() + GRACE
    while not (ranks := _known(comm)) and time.monotonic() < end:
        MPI.COMM_SELF.Iprobe()  # MPI learns of it in its own calls
        time.sleep(1e-3)
    return ranks


def _known(comm: Any) -> list[int]:
    """Return the ranks of which MPI knows here that they died."""
    group, failed = comm.Get_group(), comm.Get_failed()
    try:
        return sorted(failed.Translate_ranks(None, group)) if failed.size else []
    finally:
        group.Free()
        failed.Free()
