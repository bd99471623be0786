"""The debug mode of the exchange, MPICOMP_CHECK=1: a step that checks that mass is conserved over all ranks.

Of the compressed vector c, the residual e afterwards and the received sum s: the sum
over the ranks of (c - e) is s; for a method that keeps nothing c - e is the sent minus
the rejected entries. All values are finite, and compressors change no input.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.agreement.all_or_none import gather_objects, outcome_of
from collectives.training.reduction import Reduction
from collectives.training.statistics import Statistics
from collectives.training.step import OPERATION, Finished, Started, Step
from mpicomp.arrays import Array, to_numpy
from mpicomp.bases import coefficients_of
from mpicomp.bucket import Bucket, Compressed, Mean
from mpicomp.checking import check_conserved, mass, total_mass
from mpicomp.coded import CodedSum
from mpicomp.errors import CheckError, prefix
from mpicomp.vector import SparseVector


class CheckedStep(Step):
    """A step that is checked; errors name its number and the rank."""

    def __init__(self, *exchange: Any, nonfinite_error: Any, **settings: Any) -> None:
        super().__init__(
            *exchange, nonfinite_error=nonfinite_error or ValueError, **settings
        )
        # by bucket: the vector to compress, and what is known before it is overwritten
        self._expected: dict[Bucket, Array] = {}
        self._known: dict[Bucket, dict[str, Any]] = {}

    def _prepare(
        self, bucket: Bucket, reduction: Reduction
    ) -> tuple[Compressed, dict[str, Array]]:
        gradient = bucket.gradient(self.arrays)
        coefficients = coefficients_of(gradient, bucket.basis)
        expected = bucket.feedback.correct(*coefficients).copy()
        self._expected[bucket] = expected
        compressed, buffers = super()._prepare(bucket, reduction)
        _check_input(bucket, expected, compressed.corrected)
        return compressed, buffers

    def _finished(self, started: Started, outcome: Any, form: str) -> Finished:
        bucket = started.bucket
        compressed = started.compressed
        dtype = compressed.corrected.dtype
        received = started.reduction.received(outcome, bucket.length, dtype)
        sent = compressed.sent
        if not isinstance(sent, SparseVector):
            sent = self._expected[bucket]
        left = mass(sent)
        if received.rejected is not None:
            back = mass(received.rejected)
            left = [left[0] - back[0], left[1] - back[1], left[2] + back[2]]
        self._known[bucket] = {
            "left": left,
            "sum": mass(_decoded(received.value)),
            "written": bucket.feedback.written,
        }
        return super()._finished(started, outcome, form)

    def end(self, error: BaseException) -> None:
        """Prefix the text of an error with the step and the rank."""
        named = "MPICOMP_CHECK: "
        if isinstance(error, Exception) and not str(error).startswith(named):
            prefix(error, f"{named}step {self._number}, rank {self._comm.rank}, ")
        super().end(error)

    def close(self) -> Statistics:
        """Return the statistics; raise CheckError on all ranks unless the mass that left them is the mass received."""
        accounts = outcome_of(lambda: [*map(self._account, self.finished)])
        _balance(gather_objects(accounts, self._comm, OPERATION), self._number)
        return super().close()

    def _account(self, ended: Finished) -> dict[str, Any]:
        """Return what a step that was committed did to the mass of a bucket; see `_balance`.

        Of a residual, by how much it differs from what was expected.
        """
        bucket = ended.started.bucket
        known = self._known[bucket]
        mean = _decoded(ended.mean)
        left = known["left"]
        residual = bucket.feedback.residual
        if known["written"]:
            residual = np.concatenate(known["written"])
        values = mean.values if isinstance(mean, SparseVector) else mean
        fault = None
        for what, array in (("the result", values), ("the residual", residual)):
            if fault is None and array is not None and not np.isfinite(array).all():
                fault = f"{what} is not finite after the step"
        if residual is not None:
            before = to_numpy(self._expected[bucket]).astype(np.float64)
            kept = to_numpy(residual)
            left = mass(before - kept)
            # by which what is kept is rounded
            left[2] = max(left[2], float(np.abs(before[before != kept]).sum()))
        return {
            "vector": ", ".join(bucket.names[:3]),
            "left": left,
            "sum": known["sum"],
            "dtype": str(mean.dtype),
            "fault": fault,
        }


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


def _decoded(mean: Mean) -> SparseVector | Array:
    return mean.to_array() if isinstance(mean, CodedSum) else mean


def _balance(everyone: Sequence[Sequence[dict[str, Any]]], step: int) -> None:
    """Raise CheckError unless the mass that left the ranks is the mass received.

    everyone: the accounts (`_account`) of each rank, in rank order.
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
        check_conserved(
            left,
            first["sum"],
            first["dtype"],
            len(everyone),
            f"{where}in {first['vector']}: ",
        )
