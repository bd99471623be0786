"""The death of a rank, as MPI reports it where it survives one (ULFM); elsewhere the launcher ends the job.

The rank that gets the report revokes the communicator inside MPI, so that ranks that wait for others get an error too.
"""

import os
import time
from typing import TYPE_CHECKING, Any

from collectives.faults.state import Faults
from mpicomp.errors import CollectiveError

if TYPE_CHECKING:
    from mpi4py import MPI

ASKED = "OMPI_MCA_mpi_ft_enable"  # what `mpirun --with-ft ulfm` sets
GRACE = 1.0  # seconds in which MPI may find out who died; all ranks get an error at once


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
    return got in classes or (
        got == MPI.ERR_INTERN and comm is not None and (comm.Is_revoked() or bool(known_dead(comm)))
    )


def on_death(faults: Faults, doing: str, *comms: "MPI.Intracomm") -> CollectiveError:
    """Return what is raised where MPI reports a death; the first report of one revokes the communicators.

    faults: the state of these communicators. doing: what was interrupted, the beginning of the text.
    """
    if not faults.finished:
        faults.die(doing)
        revoke(faults, *comms)
        faults.identify(_awaited_dead(comms[-1]))
    return faults.error()


def revoke(faults: Faults, *comms: "MPI.Intracomm") -> None:
    """Call MPI's Revoke where the state of the communicators asks for it, so that every rank gets an error."""
    for comm in comms:
        if faults.revoked and not comm.Is_revoked():
            comm.Revoke()


def _awaited_dead(comm: Any) -> list[int]:
    """Return the ranks that died, as soon as MPI knows of one here."""
    from mpi4py import MPI

    end = time.monotonic() + GRACE
    while not (ranks := known_dead(comm)) and time.monotonic() < end:
        MPI.COMM_SELF.Iprobe()  # MPI learns of it in its own calls
        time.sleep(1e-3)
    return ranks


def known_dead(comm: Any) -> list[int]:
    """Return the ranks of which MPI knows here that they died."""
    group, failed = comm.Get_group(), comm.Get_failed()
    try:
        return sorted(failed.Translate_ranks(None, group)) if failed.size else []
    finally:
        group.Free()
        failed.Free()
