"""Continue without the ranks that died, where MPI survives their death (ULFM: Open MPI 5, `mpirun --with-ft ulfm`).

Operations then raise `RankFailedError` on all ranks that live, `shrink` returns a communicator of these, and with it
`GradientExchange.continue_on` continues with the residuals that they hold:

    exchange = GradientExchange(comm, ...)
    try:
        mean = exchange(gradient)
    except RankFailedError:
        comm = collectives.shrink(comm)
        exchange.continue_on(comm)

Across hosts the launcher needs `--mca mpi_ft_detector true` as well, and MPI_Finalize may then hang: the survivors
leave by os._exit. Elsewhere the launcher ends the whole job: examples/save_on_failure.py saves first.

MPI numbers the agreements on a communicator, those inside its Shrink included: the n-th of one rank meets the n-th of
the others, whatever each of them is for. But ranks learn of a death in different operations. A rank that was in a step
of an exchange agrees on it next, while ranks that were in another operation call `shrink` at once: if that were MPI's,
they would meet the agreement on the step, be one ahead from then on, and in the end one rank would wait in MPI's Shrink
for ever, and the others for it. So each rank says by its bits what it came for, and all get the bits that they have in
common: ranks that came to shrink come again until all did, and call MPI's Shrink only then.

Invariant: every rank that lives gets the same bits from the n-th agreement. So all of them count alike how often in a
row all came to shrink; a rank that came for anything else, or comes later, knows that the count is 0.
"""

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from collectives.faults import ulfm
from collectives.runtime.engine import end_all, wait_for
from collectives.runtime.link import attached, link_if_any
from collectives.runtime.messages import Sending

if TYPE_CHECKING:
    from mpi4py import MPI

_SOUND, _SHRINK = 1, 2  # bits


def shrink(comm: "MPI.Intracomm") -> "MPI.Intracomm":
    """Return a communicator of the ranks of `comm` that live, in their order; all of these call it.

    Operations of this library in flight on `comm` end with RankFailedError, and `comm` is revoked inside MPI. All ranks
    of the communicator that is returned were there, and alive, when it was made.

    Raises CollectiveTimeoutError when a rank that lives is absent (`configure`): `comm` stays as it is, and a rank that
    calls again waits again. RuntimeError where MPI does not survive the death of a rank.
    """
    from mpi4py import MPI

    if not ulfm.survives():
        library = MPI.Get_library_version().partition(",")[0]
        raise RuntimeError(
            f"{library} cannot continue after the death of a rank, as it was started: expected Open MPI 5 under "
            "mpirun --with-ft ulfm; elsewhere restart from a checkpoint (examples/save_on_failure.py)"
        )
    link = link_if_any(comm)
    if link is not None:
        link.faults.shrink()
        end_all(link)
        ulfm.revoke(link.faults, link.comm)
    comm.Revoke()
    agreements_on(comm).meet()
    return _survivors(comm)


def _survivors(comm: "MPI.Intracomm") -> "MPI.Intracomm":
    """Return the communicator of those that live; once more where one died before all had it."""
    from mpi4py import MPI

    survivors = comm.Shrink()
    assert isinstance(survivors, MPI.Intracomm)
    sound = agreements_on(survivors).agree(True, "returned from MPI's Shrink")
    return survivors if sound else _survivors(survivors)


def agree(sound: bool, comm: "MPI.Intracomm") -> bool:
    """Return whether all ranks say `sound` and none has died, alike on all ranks that live; for `GradientExchange`.

    One agreement of MPI's, which a death does not disturb; a rank that is in `shrink` says no. Where MPI does not
    survive a death there is nothing to agree on: `sound` is returned. Raises CollectiveTimeoutError when a rank that
    lives is absent (`configure`).
    """
    return agreements_on(comm).agree(sound, "called agree on a step") if ulfm.survives() else sound


class Agreements:
    """This rank's part in MPI's agreements on a communicator, cached on it."""

    def __init__(self, comm: "MPI.Intracomm") -> None:
        self._comm, self._bits = comm, np.empty(1, np.int32)
        self._met = 0  # agreements in a row in which all came to shrink
        self._unfinished: Sending | None = None  # one to shrink that timed out: MPI counts this rank's bits there

    def agree(self, sound: bool, call: str) -> bool:
        """Return whether all ranks say `sound` and none has died; `call` names what an absent rank did not do."""
        self._met = 0
        failed = self._finish(self._start(_SOUND if sound else 0), call)
        return bool(self._bits[0] & _SOUND) and not failed

    def meet(self) -> None:
        """Return when all ranks that live are here to shrink.

        Two agreements are made. MPI counts the bits of a rank that timed out in the first one; that rank is absent from
        the second one, so the others detect it. A rank that timed out may call again, and continues where it was.
        """
        while self._met < 2:
            self._unfinished = self._unfinished or self._start(_SHRINK)
            self._finish(self._unfinished, "called shrink")
            self._unfinished = None
            self._met = self._met + 1 if self._bits[0] & _SHRINK else 0
        self._met = 0

    def _start(self, bits: int) -> Sending:
        self._bits, self._unfinished = np.array([bits], np.int32), None
        return Sending(self._comm.Iagree(self._bits), keeping=self._bits)

    def _finish(self, agreement: Sending, call: str) -> bool:
        """Wait for all ranks that live; return whether one has died. MPI returns the common bits in both cases."""
        try:
            wait_for(agreement, call)
        except Exception as error:
            if not ulfm.is_failure(error):
                raise
            return True
        return False


def agreements_on(comm: "MPI.Intracomm") -> Agreements:
    """Return this rank's part in the agreements on a communicator."""
    return attached(comm, _key(), lambda: Agreements(comm))


@cache
def _key() -> int:
    from mpi4py import MPI

    return MPI.Comm.Create_keyval()
