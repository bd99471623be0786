"""Continue without the ranks that died, under ULFM (docs/reliability.md).

MPI numbers the agreements on a communicator, including those inside its Shrink: the
n-th agreement of one rank matches the n-th of the others, whatever its purpose. But
ranks learn of a death in different operations: one in a step next agrees on the step,
another one calls `shrink` at once, and out of step by one they would hang in MPI's
Shrink. So each rank contributes bits for its purpose, and MPI returns the bitwise AND:
ranks that called `shrink` repeat the agreement until all have called it, and only then
call MPI's Shrink. The same bits compare their quorums: each rank contributes its quorum
and the complement, of which a bit is left in neither if ranks differ.

Invariant: every living rank gets the same bits from the n-th agreement. So all count
the same number of consecutive agreements in which all called `shrink`; for a rank that
took part for another purpose, or joins later, the count is 0.
"""

from typing import TYPE_CHECKING

import numpy as np

from collectives.faults import ulfm
from collectives.faults.errors import CollectiveError, RankFailedError
from collectives.faults.state import named_ranks
from collectives.runtime.engine import of_process
from collectives.runtime.link import attached, link_if_any
from collectives.runtime.messages import Sending
from mpicomp.settings import to_integer

if TYPE_CHECKING:
    from mpi4py import MPI

# Flags of an agreement. The number to compare, such as the quorum, takes the next
# _WIDTH bits, and its complement as many.
_SOUND = 1
_SHRINK = 2
_WIDTH = 14
_ONES = (1 << _WIDTH) - 1


def shrink(comm: "MPI.Intracomm", *, quorum: int | None = None) -> "MPI.Intracomm":
    """Return a communicator of the living ranks of `comm`, in their order.

    Operations of this library in flight on `comm` end with RankFailedError, and `comm` is
    revoked inside MPI. All ranks of the new communicator were alive when it was created.

    In a network partition each side takes the other one for dead: with the default quorum at
    most one side continues. On one host, where no link can be cut,
    `shrink(comm, quorum=1)` is safe.

    Args:
        comm: an mpi4py intracommunicator; all its living ranks call.
        quorum: the least number of ranks that continue, 1 to `comm.size`, the same on all
            ranks; None is more than half.

    Raises:
        RankFailedError: fewer ranks than `quorum` are left; it names the missing ones. Restart
            the job from a checkpoint.
        CollectiveError: the quorums differ.
        CollectiveTimeoutError: a living rank is absent (`configure`). `comm` does not change,
            and a rank may call again.
        ValueError: `quorum` is out of range.
        RuntimeError: this MPI has no ULFM.
    """
    link = link_if_any(comm)
    remedy = " (ranks), or None"
    needed = comm.size // 2 + 1
    if quorum is not None:
        needed = to_integer("quorum", quorum, 1, comm.size, remedy=remedy)
    if not ulfm.survives():
        raise RuntimeError(
            "this MPI cannot continue after the death of a rank, as it was started: expected Open MPI 5 under "
            "mpirun --with-ft ulfm; elsewhere restart from a checkpoint (examples/save_on_failure.py)"
        )
    if link is not None:
        link.faults.shrink()
        of_process().end_all(link.faults)
        ulfm.revoke(link.comm)
    comm.Revoke()
    if not agreements_on(comm).agree_to_shrink(needed):
        raise CollectiveError(
            f"shrink: quorum must be the same on all ranks, got {needed} on rank {comm.rank} and another on others "
            "(quorum=): no communicator was made, call again with one quorum"
        )
    survivors = _survivors(comm)
    if survivors.size < needed:
        left = ulfm.ranks_of(survivors.Get_group(), comm)
        missing = named_ranks({*range(comm.size)}.difference(left))
        raise RankFailedError(
            f"{survivors.size} of {comm.size} ranks are left, and {missing} died or cannot be reached: expected at "
            f"least {needed} (quorum=). The others may continue without this rank: end the job, and restart it from a "
            "checkpoint"
        )
    return survivors


def _survivors(comm: "MPI.Intracomm") -> "MPI.Intracomm":
    """Return the communicator of the survivors; repeats if one died before all had it."""
    from mpi4py import MPI

    survivors = comm.Shrink()
    assert isinstance(survivors, MPI.Intracomm)
    sound, _ = agreements_on(survivors).agree(True, call="returned from MPI's Shrink")
    return survivors if sound else _survivors(survivors)


def agree(sound: bool, comm: "MPI.Intracomm") -> bool:
    """Return whether all ranks pass True and none has died; the same on all living ranks.

    One agreement of MPI's. A rank in `shrink` counts as False. Without ULFM it returns
    `sound`.

    Args:
        sound: whether this rank can go on.
        comm: an mpi4py intracommunicator; all its living ranks call.

    Raises:
        CollectiveTimeoutError: a living rank is absent.
    """
    return agreements_on(comm).agree(sound)[0] if ulfm.survives() else sound


class Agreements:
    """This rank's part in MPI's agreements on a communicator, cached on it."""

    def __init__(self, comm: "MPI.Intracomm") -> None:
        self._comm = comm
        self._bits = np.empty(1, np.int32)
        # Consecutive agreements in which all ranks had called `shrink`.
        self._shrinking = 0
        # An agreement to shrink that timed out. MPI counts this rank's bits in it, so
        # the next call continues it.
        self._unfinished: Sending | None = None

    def agree(
        self, sound: bool, number: int = 0, call: str = "called agree on a step"
    ) -> tuple[bool, bool]:
        """Return what `agree` does, and whether all numbers are equal modulo 2^14; call: a missing one, in errors."""
        self._shrinking = 0
        mine = _bits_of(number)
        if sound:
            mine |= _SOUND
        with of_process():
            failed = self._finish(self._start(mine), call)
        return bool(self._bits[0] & _SOUND) and not failed, self._are_equal()

    def agree_to_shrink(self, quorum: int) -> bool:
        """Return when all living ranks have called `shrink`: whether with the same quorum, modulo 2^14.

        Needs two agreements: MPI counts the bits of a rank that timed out in the first
        one, but that rank is absent from the second one, so the others detect it. A
        rank that timed out may call again, and continues.
        """
        while self._shrinking < 2:
            with of_process():
                self._unfinished = self._unfinished or self._start(
                    _SHRINK | _bits_of(quorum)
                )
                self._finish(self._unfinished, "called shrink")
            self._unfinished = None
            self._shrinking = self._shrinking + 1 if self._bits[0] & _SHRINK else 0
        self._shrinking = 0
        return self._are_equal()

    def _are_equal(self) -> bool:
        common = int(self._bits[0]) >> 2
        return (common | common >> _WIDTH) & _ONES == _ONES

    def _start(self, bits: int) -> Sending:
        self._bits = np.array([bits], np.int32)
        self._unfinished = None
        return Sending(self._comm.Iagree(self._bits), keeping=self._bits)

    def _finish(self, agreement: Sending, call: str) -> bool:
        """Wait for all living ranks; return whether one has died. MPI returns the common bits in both cases."""
        try:
            of_process().wait_for(agreement, call)
        except Exception as error:
            if not ulfm.is_failure(error):
                raise
            return True
        return False


def _bits_of(number: int) -> int:
    """Return a rank's bits for a number to compare; see the module."""
    low = number & _ONES
    return (low | (_ONES - low) << _WIDTH) << 2


def agreements_on(comm: "MPI.Intracomm") -> Agreements:
    """Return this rank's part in the agreements on a communicator."""
    return attached(comm, "agreements", lambda: Agreements(comm))
