"""The debug mode of the exchange, MPICOMP_CHECK=1: checks that each step conserves mass over all ranks.

Of the compressed vector c, the residual e afterwards and the received sum s: the sum
over the ranks of (c - e) is s; for a method that keeps nothing c - e is the sent minus
the rejected entries. All values are finite.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mpicomp.arrays import Array, to_numpy
from mpicomp.bucket import Bucket
from mpicomp.checking import is_same_mass, mass, scaled_mass, tolerance, total_mass
from mpicomp.errors import CheckError
from mpicomp.feedback.base import Gradient
from mpicomp.vector import SparseVector, split, whole


class Audit:
    """What a bucket's step does to the mass of each of its segments; also checks that compressors change no input."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._expected: Array = np.empty(0)  # the vector to compress
        self._left: list[list[float]] = []  # sent less rejected, a segment
        self._sums: list[list[float]] = []
        # the gradients' arrays, where they hold the residual
        self._homes: list[Array] = []
        # one a segment, after `close`: see `balance`
        self.entries: list[dict[str, Any]] = []

    def expect(self, gradient: Gradient) -> None:
        """Store a copy of the vector to compress."""
        self._expected = self._bucket.feedback.correct(
            gradient, self._bucket.edges
        ).copy()

    def check_input(self, corrected: Array) -> None:
        """Raise CheckError if a compressor changed its input."""
        different = np.flatnonzero(self._expected != corrected)
        if different.size:
            bounds, names = self._bucket.edges, self._bucket.names
            place = int(np.searchsorted(bounds, different[0], side="right")) - 1
            where = "" if len(names) == 1 else f"in {names[place]}: "
            raise CheckError(
                f"{where}{self._bucket.compressor_of(names[place])!r} changed {different.size} values of its input "
                f"array, the first at {int(different[0]) - bounds[place]}: expected it to change a copy"
            )

    def receive(self, sent: SparseVector | None, total: Any, rejected: Any) -> None:
        """Weigh what was sent, None for all values, the sum, and what was rejected, before they are overwritten."""
        edges = self._bucket.edges
        sent, total = whole(self._expected) if sent is None else sent, _sparse(total)
        self._sums, self._homes = (
            [mass(part) for part in split(total, edges)],
            self._bucket.feedback.written,
        )
        self._left = [mass(part) for part in split(sent, edges)]
        if rejected is not None:
            back = [
                scaled_mass(mass(part), -1.0)
                for part in split(_sparse(rejected), edges)
            ]
            self._left = [
                total_mass(pair) for pair in zip(self._left, back, strict=True)
            ]

    def close(self, mean: SparseVector | Array) -> None:
        """Account for a step that was committed."""
        bucket, feedback = self._bucket, self._bucket.feedback
        residual = np.concatenate(self._homes) if self._homes else feedback.residual
        fault, values = None, mean.values if isinstance(mean, SparseVector) else mean
        for what, array in (("the result", values), ("the residual", residual)):
            if fault is None and array is not None and not np.isfinite(array).all():
                fault = f"{what} is not finite after the step"
        for place, (first, end) in enumerate(pairwise(bucket.edges)):
            left = self._left[place]
            if residual is not None:
                before, kept = (
                    to_numpy(self._expected[first:end]).astype(np.float64),
                    to_numpy(residual[first:end]),
                )
                left = mass(before - kept)
                # by which what is kept is rounded
                left[2] = max(left[2], float(np.abs(before[before != kept]).sum()))
            entry = {
                "vector": bucket.names[place],
                "left": left,
                "sum": self._sums[place],
            }
            self.entries.append(entry | {"dtype": str(mean.dtype), "fault": fault})


def _sparse(vector: SparseVector | Array) -> SparseVector:
    return vector if isinstance(vector, SparseVector) else whole(vector)


def balance(everyone: Sequence[Sequence[dict[str, Any]]], step: int) -> None:
    """Raise CheckError unless the mass that left the ranks is the mass received.

    everyone: the accounts (`Audit.entries`) of each rank, in rank order.
    """
    where = f"MPICOMP_CHECK: step {step}, "
    for of_one in zip(*everyone, strict=True):
        first = of_one[0]
        for rank, account in enumerate(of_one):
            if account["fault"]:
                raise CheckError(
                    f"{where}rank {rank}, in {account['vector']}: {account['fault']}"
                )
        left, total = total_mass(account["left"] for account in of_one), first["sum"]
        if not is_same_mass(
            left, total, tolerance(np.dtype(first["dtype"]), len(everyone))
        ):
            raise CheckError(
                f"{where}in {first['vector']}: mass is not conserved: {left[0]!r} left the ranks (weighted by "
                f"position {left[1]!r}), and {total[0]!r} ({total[1]!r}) were received"
            )


def name_step(error: Exception, step: int, rank: int) -> None:
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
