"""The debug mode of the exchange, MPICOMP_CHECK=1: a step that checks that mass is conserved over all ranks.

Of the compressed vector c, the residual e afterwards and the received sum s: the sum
over the ranks of (c - e) is s; for a method that keeps nothing c - e is the sent minus
the rejected entries. All values are finite, and compressors change no input.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.calls.all_or_none import gather_objects, outcome_of
from collectives.calls.checking import mass
from collectives.calls.debug import audit
from collectives.exchange.reduction import OPERATION, Reduction
from collectives.exchange.statistics import Statistics
from collectives.exchange.step import Started, Step
from collectives.faults.errors import CheckError
from mpicomp.arrays import Array, to_numpy
from mpicomp.bucket import Bucket
from mpicomp.coded import CodedSum
from mpicomp.errors import prefix
from mpicomp.vector import SparseVector


class CheckedStep(Step):
    """A step that is checked; errors name its number and the rank."""

    def __init__(self, *exchange: Any) -> None:
        super().__init__(*exchange)
        # by bucket: the vector to compress, the masses, and the caller's residual arrays
        self._expected: dict[Bucket, Array] = {}
        self._accounts: dict[Bucket, dict[str, Any]] = {}
        self._homes: dict[Bucket, Sequence[Array]] = {}

    def _prepare(self, bucket: Bucket, reduction: Reduction) -> Started:
        if not self._skips:
            bucket.check_finite(self.arrays, ValueError)
        vectors, _ = bucket.vectors(self.arrays, {})
        expected = bucket.correct(vectors, self.arrays).add().copy()
        self._expected[bucket] = expected
        prepared = super()._prepare(bucket, reduction)
        if not reduction.declared.takes_arrays:
            _check_input(bucket, expected, prepared.correction.out)
        return prepared

    def _finished(self, started: Started, outcome: Any, form: str) -> None:
        bucket = started.bucket
        dtype = started.correction.out.dtype
        received = started.reduction.received(outcome, bucket.length, dtype)
        sent = started.sent
        if not isinstance(sent, SparseVector):
            sent = self._expected[bucket]
        left = mass(sent)
        if received.rejected is not None:
            back = mass(received.rejected)
            left = [left[0] - back[0], left[1] - back[1], left[2] + back[2]]
        value = received.value
        if isinstance(value, CodedSum):
            value = value.to_array()
        self._accounts[bucket] = {
            "contributed": left,
            "same": mass(value),
            "own": [0.0, 0.0, 0.0],
            "bits": None,
            "fault": None,
        }
        if bucket.in_place:
            self._homes[bucket] = started.correction.parts
        super()._finished(started, outcome, form)

    def end(self, error: BaseException) -> None:
        """Prefix the text of an error with the step and the rank."""
        named = "MPICOMP_CHECK: "
        if isinstance(error, Exception) and not str(error).startswith(named):
            prefix(error, f"{named}step {self._number}, rank {self._comm.rank}, ")
        super().end(error)

    def close(self) -> Statistics:
        """Return the statistics; raise CheckError on all ranks unless the mass that left them is the mass received."""
        mine = outcome_of(lambda: [*map(self._account, self._accounts)])
        everyone = gather_objects(mine, self._comm, OPERATION)
        for bucket, accounts in zip(
            self._accounts, zip(*everyone, strict=True), strict=True
        ):
            names = ", ".join(bucket.names[:3])
            where = f"MPICOMP_CHECK: step {self._number}, in {names}: "
            audit(accounts, str(self._expected[bucket].dtype), where)
        return super().close()

    def _account(self, bucket: Bucket) -> dict[str, Any]:
        """Return what a step that was committed did to the mass of a bucket; see `audit`.

        Of a residual, by how much it differs from what was expected.
        """
        account = self._accounts[bucket]
        residual = bucket.feedback.residual
        if bucket in self._homes:
            residual = np.concatenate(self._homes[bucket])
        if residual is not None:
            before = to_numpy(self._expected[bucket]).astype(np.float64)
            kept = to_numpy(residual)
            left = mass(before - kept)
            # by which what is kept is rounded
            left[2] = max(left[2], float(np.abs(before[before != kept]).sum()))
            account["contributed"] = left
            if not np.isfinite(kept).all():
                account["fault"] = "the residual is not finite after the step"
        return account


def _check_input(bucket: Bucket, expected: Array, corrected: Array) -> None:
    """Raise CheckError if a compressor changed its input."""
    different = np.flatnonzero(expected != corrected)
    if not different.size:
        return
    first = int(different[0])
    segment = int(np.searchsorted(bucket.edges, first, side="right")) - 1
    where = "" if len(bucket.names) == 1 else f"in {bucket.names[segment]}: "
    compressor = bucket.selection.settings[segment]
    raise CheckError(
        f"{where}{compressor} changed {different.size} values of its input "
        f"array, the first at {first - bucket.edges[segment]}: expected it to change a copy"
    )
