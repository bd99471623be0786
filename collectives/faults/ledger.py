"""The ledger of the debug mode, MPICOMP_CHECK=1: what a step of the exchange moved, compared over all ranks.

With c what was compressed (the gradient and what a feedback adds to it, such as the decayed residual), e the residual
afterwards, and s the sum over the ranks, before it is divided, every step has to have sum over ranks of (c - e) = s;
where a method keeps nothing, what was sent less what was rejected stands for c - e. All of it has to be finite.
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
    """A transfer of the debug mode: compares what a compressor was given, and keeps an account of the step."""

    account: dict[str, Any]  # of the step, after `commit`: see `balance`

    def compress(self) -> SparseVector:
        """See `Transfer.compress`; CheckError where the compressor changed what it was given."""
        self._expected = self.pipeline.feedback.correct(self._gradient).copy()
        sent = super().compress()
        different = np.flatnonzero(self._expected != self._corrected)
        if different.size:
            raise CheckError(
                f"{self.pipeline.compressor!r} changed {different.size} values of the array that it was given to "
                f"compress, the first at {int(different[0])}: expected it to copy what it changes"
            )
        return sent

    def commit(self) -> dict[str, Any]:
        """See `Transfer.commit`; afterwards `account` is that of the step."""
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
        dtype = str(self._received.dtype)
        self.account = {"vector": self.pipeline.name, "left": left, "dtype": dtype, "fault": fault}
        return means


def accounts(flights: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the accounts of a step's vectors, with what arrived: the mass of the sum."""
    parts = [pair for flight in flights for pair in zip(flight.transfers, flight.cut(flight.total), strict=True)]
    return [transfer.account | {"sum": mass(total)} for transfer, total in parts]


def balance(everyone: Sequence[Sequence[dict[str, Any]]], step: int) -> None:
    """Raise CheckError where what left the ranks is not what arrived.

    everyone: the accounts of each rank, in rank order. Of one vector: its name, the mass that left the rank for good
    ("left"), that of the mean that it received, its dtype and entries, and what this rank found by itself ("fault").
    """
    where = f"MPICOMP_CHECK: step {step}, "
    for of_one in zip(*everyone, strict=True):
        first = of_one[0]
        for rank, account in enumerate(of_one):
            if account["fault"]:
                raise CheckError(f"{where}rank {rank}, in {account['vector']}: {account['fault']}")
        left, total = total_mass(account["left"] for account in of_one), first["sum"]
        if not is_same_mass(left, total, tolerance(np.dtype(first["dtype"]), len(everyone))):
            raise CheckError(
                f"{where}in {first['vector']}: mass is not conserved: {left[0]!r} left the ranks (weighted by "
                f"position {left[1]!r}), and {total[0]!r} ({total[1]!r}) arrived"
            )


def name_step(error: Exception, step: int, rank: int) -> None:
    """Put the rank and the step in front of what an error says."""
    if error.args and isinstance(error.args[0], str) and not error.args[0].startswith("MPICOMP_CHECK: "):
        error.args = (f"MPICOMP_CHECK: step {step}, rank {rank}, {error.args[0]}", *error.args[1:])
