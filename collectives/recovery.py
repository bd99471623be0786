"""When ranks die or fall silent: go on without the dead, or save what there is before the job ends.

To go on takes an MPI that survives the death of a rank (ULFM): Open MPI 5, under `mpirun --with-ft ulfm`. Operations
then raise `RankFailedError` on all ranks that live, `shrink` returns a communicator of these, and with it
`GradientExchange.continue_on` goes on with the residuals that they hold:

    exchange = GradientExchange(comm, ...)
    try:
        mean = exchange(gradient)
    except RankFailedError:
        comm = collectives.shrink(comm)
        exchange.continue_on(comm)

Across hosts the launcher needs `--mca mpi_ft_detector true` as well, and MPI_Finalize may then hang: the survivors
leave by os._exit. Elsewhere the launcher ends the whole job: `saving` lets each rank write what it has first.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives import deadline, failure
from collectives.progress import end_all
from collectives.rounds import rounds_of
from collectives.transport import endpoint_if_any
from mpicomp.errors import CollectiveTimeoutError, RankFailedError

if TYPE_CHECKING:
    from mpi4py import MPI


def shrink(comm: "MPI.Intracomm") -> "MPI.Intracomm":
    """Return a communicator of the ranks of `comm` that live, in their order; all of these call it.

    What was in flight on `comm` by this library ends with RankFailedError, and `comm` is revoked inside MPI. All ranks
    of what is returned were there, and alive, when it was made.

    Raises CollectiveTimeoutError when a rank that lives does not come (`configure`): `comm` stays as it is, and who
    calls again waits again. RuntimeError where MPI does not survive the death of a rank.
    """
    from mpi4py import MPI

    if not failure.survives():
        library = MPI.Get_library_version().partition(",")[0]
        raise RuntimeError(
            f"{library} does not go on without a rank that died, as it was started: expected Open MPI 5 under "
            "mpirun --with-ft ulfm; elsewhere start again from a checkpoint (collectives.saving writes one)"
        )
    endpoint = endpoint_if_any(comm)
    if endpoint is not None:
        if endpoint.revoked is None:
            endpoint.revoked, endpoint.revoked_as = "it was shrunk: use what shrink returned", RankFailedError
        end_all(endpoint)
        endpoint.comm.Revoke()
    comm.Revoke()
    rounds_of(comm).meet("a rank that lives did not come to shrink: end the job, or call again to go on waiting")
    return _tried(comm)


def _tried(comm: "MPI.Intracomm") -> "MPI.Intracomm":
    """Return the communicator of those that live; once more where one died before all had it."""
    from mpi4py import MPI

    survivors = comm.Shrink()
    assert isinstance(survivors, MPI.Intracomm)
    sound = rounds_of(survivors).agree(True, "a rank that lives did not come out of MPI's Shrink: end the job")
    return survivors if sound else _tried(survivors)


def agree(sound: bool, comm: "MPI.Intracomm") -> bool:
    """Return whether all ranks say `sound` and none has died, alike on all ranks that live; for `GradientExchange`.

    One agreement of MPI's, which a death does not disturb; a rank that is in `shrink` says no. Where MPI does not
    survive a death there is nothing to agree on: `sound` comes back. Raises CollectiveTimeoutError when a rank that
    lives does not come (`configure`).
    """
    if not failure.survives():
        return sound
    return rounds_of(comm).agree(sound, "a rank that lives did not come to agree on whether a step is kept")


class TerminatedError(SystemExit):
    """Say that the process got SIGTERM, by which a launcher ends a job; the exit status is 143."""


@contextmanager
def saving(save: Callable[[BaseException], Any], comm: "MPI.Intracomm", *, grace: float = 5.0) -> Iterator[None]:
    """Call `save` when the ranks can no longer go on together, and let the others do so before the error goes on.

    with saving(save, comm): around the training loop. save(error) is called, once, when `CollectiveTimeoutError` or
    `RankFailedError` leaves the block, or on SIGTERM in the main thread; every exchange is then as after its last whole
    step. `python -m mpi4py` ends the whole job when one rank leaves with an error: so a rank first waits until the
    others that gave up have saved, at most `grace` seconds, on SIGTERM not at all. A launcher that ends a job for the
    death of a rank gives the others little time: Open MPI 5 a fifth of a second, and only those that poll (`configure`)
    hear it.
    """
    try:
        with _terminable():
            yield
    except (CollectiveTimeoutError, RankFailedError) as error:
        save(error)
        _let_the_others_save(comm, grace)
        raise
    except TerminatedError as error:
        save(error)
        raise


def _let_the_others_save(comm: "MPI.Intracomm", grace: float) -> None:
    endpoint, end = endpoint_if_any(comm), time.monotonic() + grace
    if failure.survives():
        request = comm.Iagree(np.zeros(1, np.int32))  # no: nobody keeps a step, or shrinks, with a rank that leaves
        while not _ended(request) and time.monotonic() < end:
            time.sleep(1e-3)
    elif endpoint is not None:
        deadline.meet_those_that_gave_up(endpoint, end)


def _ended(request: "MPI.Request") -> bool:
    try:
        return request.Test()
    except Exception as error:
        if not failure.is_failure(error):
            raise
        return True


@contextmanager
def _terminable() -> Iterator[None]:
    """Raise TerminatedError on SIGTERM, where nobody else listens for it."""
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise TerminatedError(128 + number)
