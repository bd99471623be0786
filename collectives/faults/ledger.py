"""The debug mode of the exchange, MPICOMP_CHECK=1: checks that each step conserves mass over all ranks.

Let c be the compressed vector (the gradient plus, for example, the decayed residual), e the residual afterwards, and s
the sum over the ranks before division. In every step the sum over the ranks of (c - e) must equal s; for a method that
keeps nothing, c - e is the sent minus the rejected entries. All values must be finite.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.exchange.transfer import Transfer
from mpicomp.checking import dense_mass, is_same_mass, mass, scaled_mass, tolerance, total_mass
from mpicomp.errors import CheckError
from mpicomp.vector import SparseVector

Array = NDArray[Any]


class CheckedTransfer(Transfer):
    """A transfer of the debug mode: checks that compressors do not change their input, and keeps an account."""

    account: dict[str, Any]  # of the step, after `commit`: see `balance`

    def compress(self) -> SparseVector:
        """See `Transfer.compress`; raises CheckError if the compressor changed its input."""
        self._expected = self.pipeline.feedback.correct(self._gradient).copy()
        sent = super().compress()
        different = np.flatnonzero(self._expected != self._corrected)
        if different.size:
            raise CheckError(
                f"{self.pipeline.compressor!r} changed {different.size} values of its input array, the first at "
                f"{int(different[0])}: expected it to change a copy"
            )
        return sent

    def commit(self) -> dict[str, Any]:
        """See `Transfer.commit`; sets `account`."""
        means, feedback = super().commit(), self.pipeline.feedback
        residual = np.concatenate(self._homes) if feedback.in_place else feedback.residual
        result = feedback.result(self._mean)
        if residual is not None:
            left = dense_mass(self._expected.astype(np.float64) - residual)
        else:
            left = mass(self._sent)
            if self._rejected is not None:
                left = total_mass([left, scaled_mass(mass(self._rejected), -1.0)])
        fault, values = None, result.values if isinstance(result, SparseVector) else result
        for what, array in (("the result", values), ("the residual", residual)):
            if fault is None and array is not None and not np.isfinite(array).all():
                fault = f"{what} is not finite after the step"
        dtype = str(self._mean.dtype)
        self.account = {"vector": self.pipeline.name, "left": left, "dtype": dtype, "fault": fault}
        return means


def accounts(flights: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the accounts of a step's vectors, each with the mass of the received sum, None without one."""
    parts = [pair for flight in flights for pair in zip(flight.transfers, flight.cut(flight.total), strict=True)]
    return [transfer.account | {"sum": None if total is None else mass(total)} for transfer, total in parts]


def balance(everyone: Sequence[Sequence[dict[str, Any]]], step: int) -> None:
    """Raise CheckError unless the mass that left the ranks is the mass received.

    everyone: the accounts of each rank, in rank order. The account of a vector has its name, the mass that left the
    rank ("left"), that of the received mean, its dtype and entries, and a fault that this rank found ("fault").
    """
    where = f"MPICOMP_CHECK: step {step}, "
    for of_one in zip(*everyone, strict=True):
        first = of_one[0]
        for rank, account in enumerate(of_one):
            if account["fault"]:
                raise CheckError(f"{where}rank {rank}, in {account['vector']}: {account['fault']}")
        sums = [account["sum"] for account in of_one if account["sum"] is not None]  # of a server exchange the root's
        left, total = total_mass(account["left"] for account in of_one), sums[0]
        if not is_same_mass(left, total, tolerance(np.dtype(first["dtype"]), len(everyone))):
            raise CheckError(
                f"{where}in {first['vector']}: mass is not conserved: {left[0]!r} left the ranks (weighted by "
                f"position {left[1]!r}), and {total[0]!r} ({total[1]!r}) were received"
            )


def name_step(error: Exception, step: int, rank: int) -> None:
    """Prefix the text of an error with the rank and the step."""
    if error.args and isinstance(error.args[0], str) and not error.args[0].startswith("MPICOMP_CHECK: "):
        error.args = (f"MPICOMP_CHECK: step {step}, rank {rank}, {error.args[0]}", *error.args[1:])
