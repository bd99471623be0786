"""The debug mode of the exchange, MPICOMP_CHECK=1: a step that checks that mass is conserved over all ranks.

Of the compressed vector c, the residual e afterwards and the received sum s: the sum
over the ranks of (c - e) is s; for a method that keeps nothing c - e is the sent minus
the rejected entries. All values are finite, and compressors change no input.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from collectives.agreement.all_or_none import gather_objects, outcome_of
from collectives.runtime.collective import Sum
from collectives.training.reduction import Reduction
from collectives.training.step import OPERATION, Started, Step
from mpicomp.arrays import Array, to_numpy
from mpicomp.bucket import Bucket, Compressed, Mean
from mpicomp.checking import is_same_mass, mass, scaled_mass, tolerance, total_mass
from mpicomp.coded import CodedSum
from mpicomp.errors import CheckError
from mpicomp.vector import SparseVector, from_all_values, split


class CheckedStep(Step):
    """A step that is checked; errors name its number and the rank."""

    def __init__(self, *exchange: Any, nonfinite_error: Any, **settings: Any) -> None:
        super().__init__(
            *exchange, nonfinite_error=nonfinite_error or ValueError, **settings
        )
        self._audits: dict[Bucket, Audit] = {}

    def _compressed(
        self, bucket: Bucket, reduction: Reduction, gradient: Sequence[Array]
    ) -> Compressed:
        expected = bucket.feedback.correct(*gradient).copy()
        compressed = super()._compressed(bucket, reduction, gradient)
        self._audits[bucket] = Audit(bucket, expected)
        self._audits[bucket].check_input(compressed.corrected)
        return compressed

    def _received(self, started: Started, outcome: Any) -> Sum:
        received = super()._received(started, outcome)
        sent = started.compressed.sent
        if not isinstance(sent, SparseVector):
            sent = None
        audit = self._audits[started.bucket]
        audit.receive(sent, received.value, received.rejected)
        return received

    def end(self, error: BaseException) -> None:
        """Prefix the text of an error with the step and the rank."""
        if isinstance(error, Exception):
            _name_step(error, self._number, self._comm.rank)
        super().end(error)

    def close(self) -> None:
        """Raise CheckError on all ranks unless the mass that left them is the mass received."""
        accounts = outcome_of(self._accounts)
        _balance(gather_objects(accounts, self._comm, OPERATION), self._number)

    def _accounts(self) -> list[dict[str, Any]]:
        return [
            account
            for finished in self.finished
            for account in self._audits[finished.started.bucket].accounts(finished.mean)
        ]


class Audit:
    """What a bucket's step does to the mass of each of its segments. expected: the vector to compress."""

    def __init__(self, bucket: Bucket, expected: Array) -> None:
        self._bucket = bucket
        self._expected = expected
        self._left: list[list[float]] = []  # sent less rejected, by segment
        self._sums: list[list[float]] = []
        # the gradients' arrays, where they hold the residual
        self._written: list[Array] = []

    def check_input(self, corrected: Array) -> None:
        """Raise CheckError if a compressor changed its input."""
        different = np.flatnonzero(self._expected != corrected)
        if not different.size:
            return
        bucket = self._bucket
        first = int(different[0])
        segment = int(np.searchsorted(bucket.edges, first, side="right")) - 1
        name = bucket.names[segment]
        where = "" if len(bucket.names) == 1 else f"in {name}: "
        compressor = bucket.selection.settings[segment]
        raise CheckError(
            f"{where}{compressor} changed {different.size} values of its input "
            f"array, the first at {first - bucket.edges[segment]}: expected it to change a copy"
        )

    def receive(self, sent: SparseVector | None, total: Any, rejected: Any) -> None:
        """Weigh what was sent, None for all values, the sum, and what was rejected, before they are overwritten."""
        edges = self._bucket.edges
        if sent is None:
            sent = from_all_values(self._expected)
        self._sums = [mass(part) for part in split(_sparse(total), edges)]
        self._written = self._bucket.feedback.written
        self._left = [mass(part) for part in split(sent, edges)]
        if rejected is None:
            return
        for segment, part in enumerate(split(_sparse(rejected), edges)):
            back = scaled_mass(mass(part), -1.0)
            self._left[segment] = total_mass([self._left[segment], back])

    def accounts(self, mean: Mean) -> list[dict[str, Any]]:
        """Return the account of each segment, of a step that was committed; see `_balance`."""
        bucket = self._bucket
        residual = bucket.feedback.residual
        if self._written:
            residual = np.concatenate(self._written)
        values = _sparse(mean).values
        fault = None
        for what, array in (("the result", values), ("the residual", residual)):
            if fault is None and array is not None and not np.isfinite(array).all():
                fault = f"{what} is not finite after the step"
        accounts = []
        for segment, (first, end) in enumerate(pairwise(bucket.edges)):
            left = self._left[segment]
            if residual is not None:
                before = to_numpy(self._expected[first:end]).astype(np.float64)
                kept = to_numpy(residual[first:end])
                left = mass(before - kept)
                # by which what is kept is rounded
                left[2] = max(left[2], float(np.abs(before[before != kept]).sum()))
            accounts.append(
                {
                    "vector": bucket.names[segment],
                    "left": left,
                    "sum": self._sums[segment],
                    "dtype": str(mean.dtype),
                    "fault": fault,
                }
            )
        return accounts


def _sparse(vector: Mean) -> SparseVector:
    if isinstance(vector, CodedSum):
        vector = vector.to_array()
    return vector if isinstance(vector, SparseVector) else from_all_values(vector)


def _balance(everyone: Sequence[Sequence[dict[str, Any]]], step: int) -> None:
    """Raise CheckError unless the mass that left the ranks is the mass received.

    everyone: the accounts (`Audit.accounts`) of each rank, in rank order.
    """
    where = f"MPICOMP_CHECK: step {step}, "
    for of_one in zip(*everyone, strict=True):
        first = of_one[0]
        for rank, account in enumerate(of_one):
            if account["fault"]:
                raise CheckError(
                    f"{where}rank {rank}, in {account['vector']}: {account['fault']}"
                )
        left = total_mass(account["left"] for account in of_one)
        total = first["sum"]
        if not is_same_mass(
            left, total, tolerance(np.dtype(first["dtype"]), len(everyone))
        ):
            raise CheckError(
                f"{where}in {first['vector']}: mass is not conserved: {left[0]!r} left the ranks (weighted by "
                f"position {left[1]!r}), and {total[0]!r} ({total[1]!r}) were received"
            )


def _name_step(error: Exception, step: int, rank: int) -> None:
    """Prefix the text of an error with the rank and the step."""
    if (
        error.args
        and isinstance(error.args[0], str)
        and not error.args[0].startswith("MPICOMP_CHECK: ")
    ):
        error.args = (
            f"MPICOMP_CHECK: step {step}, rank {rank}, {error.args[0]}",
            *error.args[1:],
        )
