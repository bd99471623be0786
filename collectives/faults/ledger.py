"""The debug mode of the exchange, MPICOMP_CHECK=1: checks that each step conserves mass over all ranks.

Let c be the compressed vector (the gradient plus, for example, the decayed residual), e the residual afterwards, and s
the sum over the ranks before division. In every step the sum over the ranks of (c - e) must equal s; for a method that
keeps nothing, c - e is the sent minus the rejected entries. All values must be finite.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mpicomp.arrays import Array
from mpicomp.bucket import Bucket
from mpicomp.checking import dense_mass, is_same_mass, mass, scaled_mass, tolerance, total_mass
from mpicomp.errors import CheckError
from mpicomp.vector import SparseVector, split, whole


class Account:
    """What a bucket's step did to the mass of each of its segments; also checks that compressors change no input."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.entries: list[dict[str, Any]] = []  # one a segment, after `close`: see `balance`

    def expect(self, gradient: Any) -> None:
        """Store a copy of the vector to compress."""
        self.expected = self._bucket.feedback.correct(gradient).copy()

    def check_input(self, corrected: Array) -> None:
        """Raise CheckError if a compressor changed its input."""
        different = np.flatnonzero(self.expected != corrected)
        if different.size:
            bounds, names = self._bucket.edges, self._bucket.names
            place = int(np.searchsorted(bounds, different[0], side="right")) - 1
            compressor = [*self._bucket.compressor.compressors.values()][place]
            where = "" if len(names) == 1 else f"in {names[place]}: "
            raise CheckError(
                f"{where}{compressor!r} changed {different.size} values of its input array, the first at "
                f"{int(different[0]) - bounds[place]}: expected it to change a copy"
            )

    def close(
        self,
        homes: Sequence[Array],
        sent: SparseVector,
        rejected: SparseVector | None,
        mean: SparseVector | Array,
        total: SparseVector | Array | None,
    ) -> None:
        """Account for a step that was committed."""
        bucket, feedback = self._bucket, self._bucket.feedback
        residual = np.concatenate(homes) if feedback.in_place else feedback.residual
        fault, values = None, mean.values if isinstance(mean, SparseVector) else mean
        for what, array in (("the result", values), ("the residual", residual)):
            if fault is None and array is not None and not np.isfinite(array).all():
                fault = f"{what} is not finite after the step"
        nothing = [None] * len(bucket.names)
        back = nothing if rejected is None else split(rejected, bucket.edges)
        total = total if total is None or isinstance(total, SparseVector) else whole(total)
        sums = nothing if total is None else split(total, bucket.edges)
        spans, parts = pairwise(bucket.edges), split(sent, bucket.edges)
        for name, (first, end), mine, returned, received in zip(bucket.names, spans, parts, back, sums, strict=True):
            if residual is not None:
                left = dense_mass(self.expected[first:end].astype(np.float64) - residual[first:end])
            else:
                left = mass(mine)
                if returned is not None:
                    left = total_mass([left, scaled_mass(mass(returned), -1.0)])
            entry = {"vector": name, "left": left, "dtype": str(mean.dtype), "fault": fault}
            self.entries.append(entry | {"sum": None if received is None else mass(received)})


def accounts(flights: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the accounts of a step's segments, each with the mass of the received sum, None without one."""
    return [entry for flight in flights for entry in flight.account.entries]


def balance(everyone: Sequence[Sequence[dict[str, Any]]], step: int) -> None:
    """Raise CheckError unless the mass that left the ranks is the mass received.

    everyone: the accounts of each rank, in rank order. The account of a segment has its name, the mass that left the
    rank ("left"), that of the received mean, its dtype and entries, and a fault that this rank found ("fault").
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
                f"position {left[1]!r}), and {total[0]!r} ({total[1]!r}) were received"
            )


def name_step(error: Exception, step: int, rank: int) -> None:
    """Prefix the text of an error with the rank and the step."""
    if error.args and isinstance(error.args[0], str) and not error.args[0].startswith("MPICOMP_CHECK: "):
        error.args = (f"MPICOMP_CHECK: step {step}, rank {rank}, {error.args[0]}", *error.args[1:])
