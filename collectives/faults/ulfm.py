"""The death of a rank, as reported by MPI with ULFM; without it the launcher ends the job.

The rank that receives the report revokes the communicator inside MPI, so that ranks
that wait for others get an error too. docs/reliability.md has what the failure detector
needs, and why.
"""

import os
import time
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from collectives.faults.errors import CollectiveError
from collectives.faults.state import Faults
from mpicomp.errors import warn

if TYPE_CHECKING:
    from mpi4py import MPI

# Prefix of the variables in which mpirun states every setting, also one from a file.
ENVIRONMENT = "OMPI_MCA_"
ENABLE = "mpi_ft_enable"  # set by `mpirun --with-ft ulfm`
DETECTOR = "mpi_ft_detector"
THREAD = "mpi_ft_detector_thread"
TIMEOUT = "mpi_ft_detector_timeout"
SETTINGS = {DETECTOR: "true", "mpi_ft_detector_period": "20", TIMEOUT: "300"}  # seconds
# Seconds of the detector's timeout, at least: with fewer it may take a busy rank for
# dead.
LEAST = 60.0
FLAGS = " ".join(
    ["--with-ft ulfm", *(f"--mca {name} {value}" for name, value in SETTINGS.items())]
)
# Seconds in which MPI may find out which rank died. All ranks get an error at once.
GRACE = 1.0


@cache  # every step asks
def survives() -> bool:
    """Return whether this job survives a death: Open MPI 5 under `mpirun --with-ft ulfm`; MPICH's functions hang."""
    if not is_on(ENABLE, os.environ):
        return False
    from mpi4py import MPI

    return MPI.Get_library_version().startswith("Open MPI")


def is_on(name: str, environment: Mapping[str, str]) -> bool:
    """Return whether a boolean setting of Open MPI is on in the environment set by mpirun."""
    return environment.get(ENVIRONMENT + name, "0").lower() not in (
        "",
        "0",
        "false",
        "no",
    )


def detector_warning(environment: Mapping[str, str]) -> str | None:
    """Return the warning for the failure detector of a job over several hosts, with the remedy; None without one."""
    if not is_on(DETECTOR, environment):
        wrong = "is off, so recovery across hosts may hang"
    elif is_on(THREAD, environment):
        wrong = f"has a thread ({THREAD}), with which ranks may disagree on which step was kept"
    elif (timeout := _detector_timeout(environment)) < LEAST:
        wrong = f"takes a rank for dead after {timeout:g} s outside of MPI (evaluation, a checkpoint)"
    else:
        return None
    return f"the failure detector of Open MPI {wrong}: start with mpirun {FLAGS}"


def _detector_timeout(environment: Mapping[str, str]) -> float:
    try:
        return float(environment.get(ENVIRONMENT + TIMEOUT, "10"))
    except ValueError:
        return 0.0


def warn_of_detector(nodes: "tuple[int, ...]", rank: int) -> None:
    """Warn on rank 0, once, if ULFM is on, and its failure detector is not set for several nodes.

    nodes: for each rank, the first rank that shares its memory.
    """
    if (
        rank == 0
        and len(set(nodes)) > 1
        and survives()
        and (wrong := detector_warning(os.environ))
    ):
        warn_once(wrong)


@cache
def warn_once(text: str) -> None:
    """Warn once in this process."""
    warn(text, depth=3)


def is_failure(error: BaseException, comm: "MPI.Intracomm | None" = None) -> bool:
    """Return whether this error of MPI means that a rank died, or that another rank has detected a death.

    comm: of the nonblocking MPI collective that raised it, if any: these raise an
    internal error in both cases.
    """
    from mpi4py import MPI

    if not (isinstance(error, MPI.Exception) and survives()):
        return False
    got = error.Get_error_class()
    failed = MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED
    return got in failed or (
        got == MPI.ERR_INTERN
        and comm is not None
        and (comm.Is_revoked() or bool(known_dead(comm)))
    )


def on_death(faults: Faults, doing: str) -> CollectiveError:
    """Return the error after MPI reports a death; the first report revokes the communicator.

    doing: the interrupted operation, the beginning of the text.
    """
    if not faults.finished:
        faults.die(doing)
        revoke(faults.comm)
        faults.identify(_awaited_dead(faults.comm))
    return faults.error()


def revoke(comm: "MPI.Intracomm") -> None:
    """Call MPI's Revoke, unless a rank has called it, so that every rank gets an error."""
    if not comm.Is_revoked():
        comm.Revoke()


def _awaited_dead(comm: Any) -> list[int]:
    """Return the dead ranks, as soon as MPI reports one here."""
    from mpi4py import MPI

    end = time.monotonic() + GRACE
    while not (ranks := known_dead(comm)) and time.monotonic() < end:
        # MPI learns of a death only in its own calls.
        MPI.COMM_SELF.Iprobe()
        time.sleep(1e-3)
    return ranks


def known_dead(comm: Any) -> list[int]:
    """Return the ranks that MPI reports here as dead."""
    return ranks_of(comm.Get_failed(), comm)


def ranks_of(group: "MPI.Group", comm: Any) -> list[int]:
    """Return the ranks of a communicator that are in a group of MPI's, and free the group."""
    everyone = comm.Get_group()
    try:
        return sorted(group.Translate_ranks(None, everyone)) if group.size else []
    finally:
        everyone.Free()
        group.Free()
