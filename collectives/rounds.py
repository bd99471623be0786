"""The agreements of MPI (ULFM) on one communicator, in one order on all ranks that live.

MPI numbers the agreements on a communicator, those inside of its Shrink among them: the n-th of one rank meets the n-th
of the others, whatever each of them is for. But ranks hear of a death in different operations. The one that was in a
step of an exchange agrees on it next, and those that were in another operation beside it go straight to `shrink`: there
they meet its agreement, are one ahead from then on, and in the end one rank waits for ever inside of Shrink, and the
others for it. So each says by its bits what it came for, and all get the bits that they have in common: those that came
to shrink come again until all did, and call MPI's Shrink only then.

Invariant: every rank that lives gets the same bits from the n-th agreement. So all of them count alike how often in a
row all came to shrink; a rank that came for anything else, or comes later, knows that the count is 0.
"""

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from collectives.failure import is_failure
from collectives.messages import Sending
from collectives.progress import wait_for
from collectives.transport import attached
from mpicomp.errors import CollectiveTimeoutError

if TYPE_CHECKING:
    from mpi4py import MPI

_SOUND, _SHRINK = 1, 2  # bits


class Rounds:
    """This rank's part in the agreements on a communicator, cached on it."""

    def __init__(self, comm: "MPI.Intracomm") -> None:
        self._comm = comm
        self._met = 0  # rounds in a row in which all came to shrink
        self._unfinished: _Round | None = None  # that this rank gave up on: its bits count there all the same

    def agree(self, sound: bool, late: str) -> bool:
        """Return whether all ranks say `sound` and none has died; CollectiveTimeoutError(late) after the deadline."""
        self._met, self._unfinished = 0, None
        mine = _Round(_SOUND if sound else 0, self._comm)
        mine.finish(late)
        return bool(mine.bits & _SOUND) and not mine.failed

    def meet(self, late: str) -> None:
        """Return when all ranks that live are here; CollectiveTimeoutError(late) after the deadline.

        Two rounds: a rank that gave up in the first, where its bits count, does not come to the second. One that gave
        up may call again, and goes on where it was.
        """
        while self._met < 2:
            self._unfinished = self._unfinished or _Round(_SHRINK, self._comm)
            self._unfinished.finish(late)
            self._met = self._met + 1 if self._unfinished.bits & _SHRINK else 0
            self._unfinished = None
        self._met = 0


class _Round:
    """One agreement. MPI hands out the bits in common also where it says that a rank has died."""

    def __init__(self, bits: int, comm: "MPI.Intracomm") -> None:
        self._bits = np.array([bits], np.int32)
        self._ended = Sending(comm.Iagree(self._bits), keeping=self._bits)
        self.failed = False

    def finish(self, late: str) -> None:
        """Wait until all ranks that live have said theirs."""
        try:
            wait_for(self._ended)
        except CollectiveTimeoutError:
            raise CollectiveTimeoutError(late) from None
        except Exception as error:
            if not is_failure(error):
                raise
            self.failed = True

    @property
    def bits(self) -> int:
        """What all ranks have in common."""
        return int(self._bits[0])


def rounds_of(comm: "MPI.Intracomm") -> Rounds:
    """Return this rank's part in the agreements on a communicator."""
    return attached(comm, _key(), lambda: Rounds(comm))


@cache
def _key() -> int:
    from mpi4py import MPI

    return MPI.Comm.Create_keyval()
