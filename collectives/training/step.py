"""A step of the exchange: all of it on all ranks, or none of it.

`run` is the only place that has an order. All that can fail on one rank is done before
the ranks agree, and changes no state that outlives the step, except that of
compressors, which is restored; what follows writes to allocated memory, and swaps. A
rank with an error contributes it in place of a vector. NumPy's floating-point errors
are off, as ranks may have different settings; overflow is checked instead.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

from collectives.agreement.all_or_none import all_or_none, outcome_of
from collectives.compressed import own_share
from collectives.runtime import staging
from collectives.runtime.engine import Request
from collectives.runtime.link import traffic
from collectives.training.ledger import Audit
from collectives.training.reduction import SIGN, Reduction, dense_reduction
from collectives.training.statistics import Statistics
from mpicomp.arrays import Array, check_apart, kernels_for
from mpicomp.bucket import Bucket, Compressed, Mean, write_mean
from mpicomp.compressors.base import Snapshot, restore
from mpicomp.errors import StepSkippedError
from mpicomp.feedback.base import check_range
from mpicomp.vector import SparseVector, whole

OPERATION = "GradientExchange"  # what the ranks' agreements are called in errors


class Started(NamedTuple):
    """A bucket whose sum was started.

    compressed: what this rank sends; None if it failed, and contributed its error.
    buffers: for the mean, by tensor name. audit: of the debug mode. outcome: a Request;
    or what a collective that blocks returned, or its error.
    """

    bucket: Bucket
    reduction: Reduction
    compressed: Any
    buffers: dict[str, Array]
    audit: Audit | None
    outcome: Any

    @property
    def written(self) -> list[Array]:
        """The caller's arrays that the step writes to once it is kept."""
        return [*self.bucket.feedback.written, *self.buffers.values()]


class Finished(NamedTuple):
    """A bucket that only has to be committed.

    entries, rejected: their numbers. results: new ones, by tensor name. writes: the
    caller's buffers, and what to write to them.
    """

    started: Started
    mean: Mean
    entries: int
    rejected: int
    results: dict[str, Any]
    writes: list[tuple[Array, Mean]]


class Step:
    """One step: the gradients and output buffers by name, and what became of the buckets.

    refused: the error for gradients that are not finite, which are then looked for
    before residuals are added; None for what compressors raise. checked: the debug
    mode.
    """

    def __init__(
        self,
        comm: Any,
        arrays: Mapping[str, Any],
        outs: Mapping[str, Any],
        *,
        reduction: Reduction,
        refused: type[ValueError] | None,
        checked: bool,
    ) -> None:
        self.arrays, self.outs = dict(arrays), dict(outs)
        self.started: list[Started] = []
        self.finished: list[Finished] = []  # none in a step that failed or was skipped
        self.results: dict[str, Any] = {}  # of `run`, by name
        # the compressors' attributes before the step
        self.snapshots: list[Snapshot] = []
        self._comm, self._reduction, self._refused, self._checked = (
            comm,
            reduction,
            refused,
            checked,
        )
        self._of_arrays = dense_reduction(reduction.average)  # of small tensors
        self._sent_before = traffic(comm).nbytes
        self._compressing = self._communicating = self._restoring = 0.0  # seconds

    def run(
        self,
        buckets: Sequence[Bucket],
        form: str,
        place: str,
        error: Exception | None = None,
    ) -> None:
        """Keep the step on all ranks; or raise on all, or skip it on all.

        form: of the results, "dense", "sparse" or "vectors". place: of this rank, which
        must be that of all. error: of this rank, which raises it.
        """
        try:
            # an error of any rank raises on all
            with all_or_none(self._comm, OPERATION, place):
                # residuals added, entries selected, sums started
                self.start(buckets, is_complete=True, error=error)
                sums = self._sums(error)
                check_apart([array for each in self.started for array in each.written])
                # beside the state before the step
                finished = [self._finish(each, total, form) for each, total in sums]
            self.finished = finished
        finally:
            if not self.finished:
                self.undo()
        # cannot fail
        self.results = self._commit() if finished else self._skip(buckets, form)

    def start(
        self,
        buckets: Sequence[Bucket],
        *,
        is_complete: bool = False,
        error: Exception | None = None,
    ) -> None:
        """Start the full buckets in order; all of them if all gradients have been added."""
        for bucket in buckets[len(self.started) :]:
            if not (
                is_complete
                or all([name in self.arrays for name in bucket.names_of_tensors])
            ):
                break
            self.started.append(self._start(bucket, error))

    def advance(self) -> None:
        """Advance the buckets in flight, without waiting."""
        for each in self.started:
            if isinstance(each.outcome, Request) and not each.outcome.test():
                break  # what is in flight advances together

    def _start(self, bucket: Bucket, error: Exception | None) -> Started:
        """Compress this rank's gradients, and start the sum; an error of this rank is contributed."""
        began, reduction = (
            perf_counter(),
            self._of_arrays if bucket.dense else self._reduction,
        )
        prepared: Any = error or outcome_of(self._prepare, bucket, reduction)
        if isinstance(prepared, Exception):
            prepared = (prepared, {}), None, {}, None
        (contribution, options), compressed, buffers, audit = prepared
        ready = perf_counter()
        outcome = outcome_of(
            partial(reduction.call, contribution, self._comm, **options)
        )
        self._compressing += ready - began
        self._communicating += perf_counter() - ready
        return Started(bucket, reduction, compressed, buffers, audit, outcome)

    def _prepare(
        self, bucket: Bucket, reduction: Reduction
    ) -> tuple[Any, Compressed, dict[str, Array], Audit | None]:
        """Return the arguments of the sum, and what `Started` holds: all that can fail on one rank before the sum."""
        self.snapshots += bucket.compressor.snapshot()
        audit, buffers = (
            Audit(bucket) if self._checked else None,
            bucket.outputs(self.outs),
        )
        gradient = bucket.gradient(self.arrays)
        if self._refused is not None:
            bucket.check_finite(self.arrays, self._refused)
        if audit is not None:
            audit.expect(gradient)
        try:
            if reduction.takes_arrays:
                compressed = bucket.correct(gradient)
            else:
                own = (
                    own_share(bucket.length, self._comm.rank, self._comm.size)
                    if reduction.owns
                    else (0, 0)
                )
                compressed = bucket.compress(gradient, own)
        except ValueError:
            if bucket.basis is not None:  # to name the gradient, and not a coefficient
                bucket.check_finite(self.arrays, ValueError)
            raise
        if audit is not None:
            audit.check_input(compressed.corrected)
        return reduction.arguments(compressed), compressed, buffers, audit

    def _sums(self, error: Exception | None) -> list[tuple[Started, Any]]:
        """Wait for all sums and return them, none if the step is skipped; raise the first error that is no skip."""
        began = perf_counter()
        outcomes = [each.outcome for each in self.started]
        outcomes = [
            outcome_of(each.wait) if isinstance(each, Request) else each
            for each in outcomes
        ]
        self._communicating += perf_counter() - began
        errors = [each for each in (error, *outcomes) if isinstance(each, Exception)]
        for each in errors:
            if not isinstance(each, StepSkippedError):
                raise each
        return [] if errors else [*zip(self.started, outcomes, strict=True)]

    def _finish(self, started: Started, outcome: Any, form: str) -> Finished:
        """Prepare the mean, the next residual, and the results."""
        began, bucket, reduction = perf_counter(), started.bucket, started.reduction
        compressed, audit = started.compressed, started.audit
        received = reduction.received(outcome, bucket.length)
        if audit is not None:
            audit.receive(compressed.sent, received.total, received.rejected)
        dtype, ranks = compressed.corrected.dtype, self._comm.size
        mean = reduction.mean(received, dtype, ranks, bucket.compressor.whole)
        if isinstance(mean, SparseVector):
            bucket.compressor.observe(
                mean, None if received.votes is None else received.votes / ranks
            )
        if compressed.sent is None:
            bucket.feedback.settle_all(compressed.corrected, received.rejected)
        else:
            bucket.feedback.settle(
                compressed.corrected, compressed.sent, received.rejected
            )
        results, writes = _results(started, mean, form)
        self._restoring += perf_counter() - began
        return Finished(
            started, mean, received.entries, received.rejected_entries, results, writes
        )

    def _commit(self) -> dict[str, Any]:
        """Commit all buckets, and return the results by name, complete on any stream of a device."""
        began = perf_counter()
        results = {name: out for name, out in self.outs.items() if out is not None}
        for each in self.finished:
            each.started.bucket.feedback.commit()
            for buffer, part in each.writes:
                write_mean(buffer, part)
            results |= each.results
            if each.started.audit is not None:
                each.started.audit.close(each.mean)
        staging.complete(each.started.bucket.tensors[0].xp for each in self.finished)
        self._restoring += perf_counter() - began
        return results

    def _skip(self, buckets: Sequence[Bucket], form: str) -> dict[str, Any]:
        """Return the results of a step that all ranks skip, by name: zeros, or vectors without entries."""
        results = {}
        for tensor in [tensor for bucket in buckets for tensor in bucket.tensors]:
            out = self.outs.get(tensor.name)
            if out is not None:
                tensor.writable(out, tensor.name).fill(0)
                results[tensor.name] = out
            elif form == "sparse":
                results[tensor.name] = SparseVector.empty(
                    tensor.size, tensor.dtype, beside=tensor.xp.empty(0)
                )
            else:
                results[tensor.name] = tensor.wrapped(tensor.new())
        staging.complete(bucket.tensors[0].xp for bucket in buckets)
        return results

    def undo(self) -> None:
        """Restore the compressors, and drop what was prepared and what holds errors."""
        restore(self.snapshots)
        for each in self.started:
            each.bucket.feedback.discard()
        self.started = []

    def statistics(self, residual_norm: float | None) -> Statistics:
        """Return the statistics of a step that was kept."""
        sent = [each.started.compressed.sizes for each in self.finished]
        return Statistics(
            length=sum([each.started.bucket.length for each in self.finished]),
            sent=sum([entries for entries, _ in sent]),
            received=sum([each.entries for each in self.finished]),
            rejected=sum([each.rejected for each in self.finished]),
            nbytes=sum([nbytes for _, nbytes in sent]),
            compress_seconds=self._compressing,
            communicate_seconds=self._communicating,
            restore_seconds=self._restoring,
            wire_nbytes=traffic(self._comm).nbytes - self._sent_before,
            residual_norm=residual_norm,
        )


def _results(
    started: Started, mean: Mean, form: str
) -> tuple[dict[str, Any], list[tuple[Array, Mean]]]:
    """Return new results by tensor name, and what to write to the caller's buffers."""
    bucket, is_sign = started.bucket, started.reduction.average == SIGN
    if form == "dense":
        if bucket.basis is not None:
            mean = bucket.values(mean)
            check_range(mean, "mean out of the basis")
        return bucket.dense_results(signs(mean) if is_sign else mean, started.buffers)
    if form == "sparse" and (bucket.basis is not None or started.reduction.writes):
        what = (
            f"in the basis {bucket.basis!r} a mean"
            if bucket.basis
            else "the mean of dense arrays"
        )
        raise ValueError(
            f"got sparse=True, and {what} has all values: expected sparse=False"
        )
    if started.buffers:
        raise ValueError(
            "got out= and sparse=True: a sparse mean is returned, and not written to an array"
        )
    if form == "vectors":
        return {}, []
    vector = mean if isinstance(mean, SparseVector) else whole(mean)
    parts = bucket.parts(signs(vector) if is_sign else vector)
    return dict(zip(bucket.names_of_tensors, parts, strict=True)), []


def signs(mean: Mean) -> Mean:
    """Return the signs of a mean, 1, -1 or 0; of an array in its place."""
    if isinstance(mean, SparseVector):
        mean = mean.with_values(mean.values.copy())
        signs(mean.values)
        return mean
    kernels_for(mean).signs(mean)
    return mean
