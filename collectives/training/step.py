"""A step of the exchange: all of it on all ranks, or none of it.

`run` is the only place that has an order. All that can fail on one rank is done before
the ranks agree, and changes no state that outlives the step, except that of
compressors, which is restored; what follows writes to allocated memory, and swaps. A
rank with an error contributes it in place of a vector. NumPy's floating-point errors
are off, as ranks may have different settings; overflow is checked instead.
"""

from collections.abc import Sequence
from functools import reduce
from time import perf_counter
from traceback import clear_frames
from typing import Any, NamedTuple

from collectives.agreement.all_or_none import (
    all_or_none,
    catch_up,
    contributed,
    miss,
    outcome_of,
)
from collectives.runtime import staging
from collectives.runtime.engine import Request
from collectives.runtime.link import link_if_any
from collectives.training.reduction import (
    SIGN,
    Reduction,
    dense_reduction,
    entries,
)
from collectives.training.statistics import Statistics
from mpicomp.arrays import Array, ByName, check_apart, kernels_for
from mpicomp.bases import Coefficients
from mpicomp.bucket import Bucket, Compressed, Mean, Write
from mpicomp.coded import CodedSum
from mpicomp.compressors.base import Snapshot, restore
from mpicomp.errors import NotFiniteError, StepSkippedError
from mpicomp.vector import SparseVector, from_all_values, split

OPERATION = "GradientExchange"  # what the ranks' agreements are called in errors


class Started(NamedTuple):
    """A bucket whose sum was started.

    compressed: what this rank sends; None if it failed, and contributed its error.
    buffers: for the mean, by tensor name. outcome: a Request; or what a collective that
    blocks returned, or its error.
    """

    bucket: Bucket
    reduction: Reduction
    compressed: Any
    buffers: dict[str, Array]
    outcome: Any

    @property
    def written(self) -> list[Array]:
        """The caller's arrays that the step writes to once it is kept."""
        return [*self.bucket.feedback.written, *self.buffers.values()]


class Finished(NamedTuple):
    """A bucket that only has to be committed.

    statistics: of the bucket, its entries and bytes. results: new ones, by tensor name.
    writes: write the mean to arrays.
    """

    started: Started
    mean: Mean
    statistics: Statistics
    results: dict[str, Any]
    writes: list[Write]


class Step:
    """One step: the gradients and output buffers by name, and what became of the buckets.

    number: of the steps that were kept before. exchange: its number on the
    communicator. nonfinite_error: the error for gradients that
    are not finite, which are then looked for before residuals are added; None for what
    compressors raise.
    """

    def __init__(
        self,
        comm: Any,
        number: int,
        exchange: int,
        *,
        reduction: Reduction,
        nonfinite_error: type[ValueError] | None,
    ) -> None:
        self.arrays: dict[str, Any] = {}
        self.started: list[Started] = []
        self.finished: list[Finished] = []  # none in a step that failed or was skipped
        self.results: dict[str, Any] = {}  # of `run`, by name
        # the compressors' attributes before the step
        self.snapshots: list[Snapshot] = []
        self._outs: dict[str, Any] = {}
        self._comm = comm
        self._number = number
        self._exchange = exchange
        self._reduction = reduction
        self._nonfinite_error = nonfinite_error
        # ranks may be in different calls of the user's own function
        self._is_apart = reduction.is_own
        self._link = link_if_any(comm)
        self._sent_before = self._link.traffic.nbytes if self._link else 0
        # seconds
        self._compressing = 0.0
        self._communicating = 0.0
        self._restoring = 0.0

    def add(self, arrays: ByName, outs: ByName) -> None:
        """Add gradients, and output buffers, by name."""
        self.arrays |= arrays
        self._outs |= {name: out for name, out in outs.items() if out is not None}

    def run(
        self,
        buckets: Sequence[Bucket],
        form: str,
        state: Sequence[str],
        error: Exception | None = None,
    ) -> None:
        """Keep the step on all ranks; or raise on all, or skip it on all.

        form: of the results, "dense", "sparse" or "vectors". state: texts that are
        compared between ranks, as the number of the step is. error: of this rank, which
        raises it.
        """
        finished: list[Finished] = []

        def position() -> str:
            here = f"step {self._number} of exchange {self._exchange}"
            return ", ".join([here, *state] if finished else [here, *state, "skipped"])

        try:
            with all_or_none(self._comm, OPERATION, position):
                try:
                    self.start(buckets, is_complete=True, error=error)
                    finished = self._finish(error, form)
                    results = self._results(buckets, finished, form)
                    zeroed = [] if finished else self._zeroed(buckets)
                except Exception:
                    raise
                except BaseException as interrupt:
                    why = contributed(interrupt)
                    self.start(buckets, is_complete=True, error=why)
                    if self._is_apart:
                        miss(why, len(self.started) + 1, self._comm, OPERATION)
                    raise
            self.finished = finished
        finally:
            if not self.finished:
                self.undo()
        self.results = results
        self._commit(buckets, finished, zeroed)

    def start(
        self,
        buckets: Sequence[Bucket],
        *,
        is_complete: bool = False,
        error: Exception | None = None,
    ) -> None:
        """Start the full buckets in order; all of them if all gradients have been added."""
        for bucket in buckets[len(self.started) :]:
            names = bucket.names_of_tensors
            if not (is_complete or all([name in self.arrays for name in names])):
                break
            self.started.append(self._start(bucket, error))

    def start_failed(self, bucket: Bucket, error: Exception) -> None:
        """Count a bucket as started whose sum failed, as another call of this rank was taken for it."""
        self.started.append(Started(bucket, self._reduction, None, {}, error))

    def advance(self) -> None:
        """Advance the buckets in flight, without waiting."""
        for started in self.started:
            if isinstance(started.outcome, Request) and not started.outcome.test():
                break  # what is in flight advances together

    def _start(self, bucket: Bucket, error: Exception | None) -> Started:
        """Compress this rank's gradients, and start the sum; an error of this rank is contributed."""
        began = perf_counter()
        reduction = self._reduction
        if bucket.dense:
            reduction = dense_reduction(reduction.average)
        compressed = None
        buffers: dict[str, Array] = {}
        prepared: Any = error or outcome_of(self._prepare, bucket, reduction)
        contribution = prepared
        if not isinstance(prepared, Exception):
            compressed, buffers = prepared
            contribution = compressed.sent
        ready = perf_counter()
        try:
            outcome = outcome_of(reduction.start, contribution, self._comm)
        except BaseException as interrupt:  # the other ranks have what was sent
            self.start_failed(bucket, contributed(interrupt))
            raise
        self._compressing += ready - began
        self._communicating += perf_counter() - ready
        return Started(bucket, reduction, compressed, buffers, outcome)

    def _prepare(
        self, bucket: Bucket, reduction: Reduction
    ) -> tuple[Compressed, dict[str, Array]]:
        """Return what is sent, and the output buffers: all that can fail before the sum."""
        self.snapshots += bucket.selection.snapshot()
        buffers = bucket.outputs(self._outs)
        gradient = bucket.gradient(self.arrays)
        if self._nonfinite_error is not None:
            bucket.check_finite(self.arrays, self._nonfinite_error)
        declared = reduction.declared
        try:
            if declared.takes_uncoded:
                compressed = bucket.code(gradient, self.arrays)
            elif declared.takes_arrays:
                compressed = bucket.correct(gradient)
            else:
                comm = self._comm
                own = declared.own_share(bucket.length, comm.rank, comm.size)
                compressed = bucket.compress(gradient, own)
        except ValueError:
            # to name the gradient, and not a coefficient
            if bucket.basis is not None:
                bucket.check_finite(self.arrays, ValueError)
            raise
        return compressed, buffers

    def _finish(self, error: Exception | None, form: str) -> list[Finished]:
        """Wait for all sums, and prepare what is committed; raise the first error that is no skip.

        Returns nothing if steps are skipped, and one was on a rank, or a mean is out of
        range, which it is on all ranks alike.
        """
        began = perf_counter()
        outcomes = []
        for started in self.started:
            outcome = started.outcome
            if isinstance(outcome, Request):
                outcome = outcome_of(outcome.wait)
            outcomes.append(outcome)
        arrived = perf_counter()
        self._communicating += arrived - began
        errors = [
            outcome for outcome in (error, *outcomes) if isinstance(outcome, Exception)
        ]
        # an error of the user's own parts is no skip unless the exchange skips
        skips = self._nonfinite_error is NotFiniteError
        skipped: Any = StepSkippedError if skips else ()
        faults = [one for one in errors if not isinstance(one, skipped)]
        if self._is_apart:
            catch_up(faults, len(outcomes) + 1, self._comm, OPERATION)
            self._is_apart = False
        for fault in faults:
            raise fault
        check_apart([array for started in self.started for array in started.written])
        if errors:
            return []
        sums = zip(self.started, outcomes, strict=True)
        try:
            return [self._finished(started, total, form) for started, total in sums]
        except NotFiniteError:
            if not skips:
                raise
            return []
        finally:
            self._restoring += perf_counter() - arrived

    def _finished(self, started: Started, outcome: Any, form: str) -> Finished:
        """Prepare the mean, the results, and the next residual of a bucket."""
        bucket = started.bucket
        feedback = bucket.feedback
        compressed = started.compressed
        dtype = compressed.corrected.dtype
        received = started.reduction.received(outcome, bucket.length, dtype)
        try:
            mean = started.reduction.mean(
                received, dtype, self._comm.size, bucket.selection.dense_ranges
            )
            results, writes = _results_of(started, mean, form)
        except OverflowError as error:
            if self._nonfinite_error is not NotFiniteError:
                raise
            raise NotFiniteError(str(error)) from None
        if isinstance(mean, SparseVector):
            bucket.selection.observe(mean)
        if isinstance(compressed.sent, SparseVector):
            feedback.prepare_residual(
                compressed.corrected, compressed.sent, received.rejected
            )
        else:
            feedback.prepare_rejected(compressed.corrected, received.rejected)
        sent, nbytes = compressed.sizes
        rejected = entries(received.rejected)
        statistics = Statistics(
            bucket.length, sent, entries(received.value), rejected, nbytes
        )
        return Finished(started, mean, statistics, results, writes)

    def _results(
        self, buckets: Sequence[Bucket], finished: Sequence[Finished], form: str
    ) -> dict[str, Any]:
        """Return the results by name; of a step that is skipped, zeros or vectors without entries."""
        results = dict(self._outs)
        for ended in finished:
            results |= ended.results
        if finished or form == "vectors":
            return results
        for tensor in [tensor for bucket in buckets for tensor in bucket.tensors]:
            if tensor.name in results:
                continue
            if form == "sparse":
                on_device = tensor.xp.empty(0)
                vector = SparseVector.empty(tensor.size, tensor.dtype, like=on_device)
                results[tensor.name] = vector
            else:
                results[tensor.name] = tensor.wrapped(tensor.new())
        return results

    def _zeroed(self, buckets: Sequence[Bucket]) -> list[Array]:
        """Return the output buffers as vectors, which a step that is skipped fills with zeros."""
        outputs = [bucket.outputs(self._outs) for bucket in buckets]
        return [vector for vectors in outputs for vector in vectors.values()]

    def _commit(
        self,
        buckets: Sequence[Bucket],
        finished: Sequence[Finished],
        zeroed: Sequence[Array],
    ) -> None:
        """Commit all buckets and write to output buffers, complete on any stream of a device; cannot fail."""
        began = perf_counter()
        for ended in finished:
            ended.started.bucket.feedback.commit()
            for write in ended.writes:
                write()
        for vector in zeroed:
            vector.fill(0)
        staging.complete([bucket.tensors[0].xp for bucket in buckets])
        self._restoring += perf_counter() - began

    def undo(self) -> None:
        """Restore the compressors, and drop what was prepared and what holds errors."""
        restore(self.snapshots)
        for started in self.started:
            started.bucket.feedback.discard()
        self.started = []

    def end(self, error: BaseException) -> None:
        """End the step by an error: undo it unless it was kept; error, frames and arrays no longer hold each other."""
        if not self.finished:
            self.undo()
        clear_frames(error.__traceback__)

    def close(self) -> Statistics:
        """Return the statistics of a step that was kept and counted; a subclass may raise here, on all ranks."""
        link = self._link or link_if_any(self._comm)
        total = reduce(Statistics.plus, [ended.statistics for ended in self.finished])
        return Statistics(
            *total[:5],
            self._compressing,
            self._communicating,
            self._restoring,
            wire_nbytes=link.traffic.nbytes - self._sent_before if link else 0,
            steps=1,
        )


def _results_of(
    started: Started, mean: Mean, form: str
) -> tuple[dict[str, Any], list[Write]]:
    """Return new results by tensor name, and functions that write to them and to the caller's buffers."""
    bucket = started.bucket
    is_sign = started.reduction.average == SIGN
    if form == "dense":
        values: Any = mean
        if bucket.basis is not None:
            values = bucket.out_of_basis(mean)
        if is_sign:
            values = signs(values)
        return bucket.dense_results(values, started.buffers)
    if form == "sparse" and (
        bucket.basis is not None or started.reduction.declared.takes_uncoded
    ):
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
    assert not isinstance(mean, CodedSum), "refused above"
    vector = mean if isinstance(mean, SparseVector) else from_all_values(mean)
    parts = split(signs(vector) if is_sign else vector, bucket.bounds)
    return dict(zip(bucket.names_of_tensors, parts, strict=True)), []


def signs(mean: Mean | Coefficients) -> Any:
    """Return the signs of a mean, 1, -1 or 0; of an array in its place."""
    if isinstance(mean, CodedSum | Coefficients):
        mean = mean.to_array()
    if isinstance(mean, SparseVector):
        mean = mean.with_values(mean.values.copy())
        signs(mean.values)
        return mean
    kernels_for(mean).signs(mean)
    return mean
