"""A step of the exchange: all of it on all ranks, or none of it.

`run` is the only place that has an order. All that can fail on one rank is done before
the ranks agree, and changes no state that outlives the step, except that of
compressors, which is restored; what follows writes to allocated memory, and swaps. A
rank with an error contributes it in place of a vector. The exchange turns NumPy's
floating-point errors off, as ranks may have different settings; overflow is checked
instead.
"""

from collections.abc import Sequence
from functools import partial, reduce
from time import perf_counter
from traceback import clear_frames
from typing import Any, NamedTuple

from collectives.calls.all_or_none import (
    all_or_none,
    catch_up,
    contributed,
    miss,
    outcome_of,
)
from collectives.calls.positions import Position
from collectives.exchange.layout import Layout
from collectives.exchange.reduction import (
    OPERATION,
    SIGN,
    Reduction,
    dense_reduction,
)
from collectives.exchange.statistics import Statistics
from collectives.faults.errors import NotFiniteError, StepSkippedError
from collectives.runtime import staging
from collectives.runtime.engine import Request
from collectives.runtime.link import link_if_any
from mpicomp.arrays import Array, ByName, Write
from mpicomp.arrays.memory import check_apart
from mpicomp.bucket import Bucket
from mpicomp.compressors.base import Snapshot, restore
from mpicomp.correction import Correction
from mpicomp.errors import kept
from mpicomp.means import Mean, Written
from mpicomp.vector import SparseVector, entries, split, widened


class Contribution(NamedTuple):
    """What a rank contributes to the sum of a bucket.

    correction: of the gradient. sent: the selected entries, or all values. share: see
    `Bucket.payload`. buffers: for the mean, by tensor name.
    """

    correction: Correction
    sent: Any
    share: tuple[int, int]
    buffers: ByName


class Started(NamedTuple):
    """A bucket whose sum was started.

    contribution: None if this rank failed, and contributed its error. outcome: a Request;
    or what a collective that blocks returned, or its error.
    """

    bucket: Bucket
    reduction: Reduction
    contribution: Contribution | None
    outcome: Any

    @property
    def written(self) -> list[Array]:
        """The caller's arrays that the step writes to once it is kept."""
        if self.contribution is None:
            return []
        written = [*self.contribution.buffers.values()]
        if self.bucket.in_place:
            written += self.contribution.correction.parts
        return written


class Step:
    """One step: the gradients and output buffers by name, and what became of the buckets.

    layout: the settings of the exchange.
    """

    def __init__(self, comm: Any, layout: Layout) -> None:
        self.arrays: dict[str, Any] = {}
        self.started: list[Started] = []
        self.means: list[Mean] = []  # of the buckets
        self.results: dict[str, Any] = {}  # by name
        self._statistics: list[Statistics] = []  # of the buckets, without times
        self.is_kept = False
        self.why_skipped = ""  # the first error, which names the ranks
        # The compressors' attributes before the step.
        self.snapshots: list[Snapshot] = []
        self._outs: dict[str, Any] = {}
        # Writes to the residuals and to the caller's arrays, which are made once the
        # step is kept.
        self._writes: list[Write] = []
        self._comm = comm
        self._reduction = layout.reduction
        # Whether a step is skipped if a gradient or a mean is not finite. Gradients are
        # checked before they are compressed.
        self._skips = layout.nonfinite == "skip"
        # Whether ranks may be in different calls, as inside the user's own function.
        self._is_apart = layout.reduction.is_own
        self._link = link_if_any(comm)
        # The link knows rank and size without MPI, which may end within the step.
        place = self._link or comm
        self._rank = place.rank
        self._size = place.size
        self._sent_before = self._link.traffic.nbytes if self._link else 0
        # Seconds of the parts of the step.
        self._compressing = 0.0
        self._communicating = 0.0
        self._restoring = 0.0

    def add(self, arrays: ByName, outs: ByName) -> None:
        """Add gradients, and output buffers, by name."""
        self.arrays |= arrays
        self._outs |= outs

    def run(
        self,
        buckets: Sequence[Bucket],
        kind: str,
        here: Position,
        error: Exception | None = None,
    ) -> None:
        """Keep the step on all ranks; or raise on all, or skip it on all.

        kind: of the results, "dense", "sparse" or "vectors". here: compared between
        ranks, such as the number of the step. error: of this rank, which raises it.
        """
        is_kept = False

        def position() -> Position:
            return here if is_kept else here._replace(state=f"{here.state}, skipped")

        try:
            with all_or_none(self._comm, OPERATION, position):
                try:
                    self.start(buckets, is_complete=True, error=error)
                    is_kept = self._finish(error, kind)
                    if not is_kept:
                        self._skip(buckets, kind)
                except Exception:
                    raise
                except BaseException as interrupt:
                    why = contributed(interrupt)
                    self.start(buckets, is_complete=True, error=why)
                    if self._is_apart:
                        miss(why, len(self.started) + 1, self._comm, OPERATION)
                    raise
            self.is_kept = is_kept
        finally:
            if not self.is_kept:
                self.undo()
        self._commit(buckets)

    def start(
        self,
        buckets: Sequence[Bucket],
        *,
        is_complete: bool = False,
        waits: bool = False,
        error: Exception | None = None,
    ) -> None:
        """Compress the full buckets in order, and start their sums; of all if all gradients have been added.

        is_complete, waits: the caller waits for all of them after the last one. error: of
        this rank, which it contributes to the sums.
        """
        for bucket in buckets[len(self.started) :]:
            if not (is_complete or self.arrays.keys() >= {*bucket.names_of_tensors}):
                break
            began = perf_counter()
            reduction = self._reduction
            if bucket.dense:
                reduction = dense_reduction(reduction.average)
            contribution = None
            sent: Any = error
            if error is None:
                try:
                    contribution = self._prepare(bucket, reduction)
                    sent = contribution.sent
                except Exception as raised:
                    sent = kept(raised)
            ready = perf_counter()
            outcome: Any = None
            try:
                # A sum of float16 is computed in float32, so that only the mean has to
                # be in range.
                outcome = reduction.call(widened(sent), self._comm)
            except Exception as raised:
                outcome = kept(raised)
            except BaseException as interrupt:
                # The other ranks have what was sent, so the bucket counts as started.
                outcome = contributed(interrupt)
                raise
            finally:
                self.started.append(Started(bucket, reduction, contribution, outcome))
            waits_at_once = (is_complete or waits) and bucket is buckets[-1]
            if isinstance(outcome, Request) and not waits_at_once:
                outcome.in_background()
            self._compressing += ready - began
            self._communicating += perf_counter() - ready

    def start_failed(self, bucket: Bucket, error: Exception) -> None:
        """Count a bucket as started, whose sum failed because other ranks took another call of this rank for it."""
        self.started.append(Started(bucket, self._reduction, None, error))

    def advance(self) -> None:
        """Advance the buckets in flight, without waiting."""
        for started in self.started:
            if isinstance(started.outcome, Request) and not started.outcome.test():
                break  # what is in flight advances together

    def _prepare(self, bucket: Bucket, reduction: Reduction) -> Contribution:
        """Return what this rank contributes: all that can fail before the sum."""
        declared = reduction.declared
        self.snapshots += bucket.selection.snapshot()
        vectors, buffers = bucket.vectors(self.arrays, self._outs)
        if self._skips:
            bucket.check_finite(self.arrays, NotFiniteError)
        correction = bucket.correct(vectors, self.arrays, declared.takes)
        share = 0, 0
        if declared.own_share is not None:
            share = declared.own_share(bucket.length, self._rank, self._size)
        try:
            sent = bucket.payload(correction, declared.takes, share)
            if reduction.is_own:
                sent.forget()  # The user's function may change it.
        except ValueError:
            bucket.check_corrected(self.arrays, correction.add())
            raise
        return Contribution(correction, sent, share, buffers)

    def _finish(self, error: Exception | None, kind: str) -> bool:
        """Wait for all sums, and prepare what is committed; raise the first error that is no skip.

        Returns False if steps are skipped, and one was on a rank, or a mean is out of
        range, which it is on all ranks alike.
        """
        began = perf_counter()
        # The results are in the order of the gradients; means replace those without an
        # output buffer.
        self.results = self.arrays | self._outs
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
        # A StepSkippedError of the user's own parts is an error unless the exchange
        # skips steps.
        skipped: Any = StepSkippedError if self._skips else ()
        faults = [one for one in errors if not isinstance(one, skipped)]
        if self._is_apart:
            catch_up(faults, len(outcomes) + 1, self._comm, OPERATION)
            self._is_apart = False
        for fault in faults:
            raise fault
        check_apart([array for one in self.started for array in one.written])
        if errors:
            self.why_skipped = str(errors[0])
            return False
        try:
            for started, outcome in zip(self.started, outcomes, strict=True):
                self._prepare_results(started, outcome, kind)
        except NotFiniteError as out_of_range:
            if not self._skips:
                raise
            self.why_skipped = str(out_of_range)
            return False
        finally:
            self._restoring += perf_counter() - arrived
        return True

    def _prepare_results(self, started: Started, outcome: Any, kind: str) -> None:
        """Prepare the mean, the results, and the next residual of a bucket."""
        bucket = started.bucket
        feedback = bucket.feedback
        reduction = started.reduction
        contribution = started.contribution
        assert contribution is not None, "a bucket without one has an error"
        correction = contribution.correction
        dtype = correction.out.dtype
        sent = contribution.sent
        received = reduction.received(outcome, bucket.length, dtype)
        results: dict[str, Any] = {}  # none for "vectors"
        try:
            mean = reduction.mean(
                received, dtype, self._size, bucket.selection.dense_ranges
            )
            if kind == "dense":
                results, write = bucket.dense_results(
                    mean, contribution.buffers, is_sign=reduction.average == SIGN
                )
                self._writes.append(write)
            elif kind == "sparse":
                results = _sparse_results(started, mean, contribution.buffers)
        except OverflowError as error:
            if not self._skips:
                raise
            raise NotFiniteError(str(error)) from None
        self.means.append(mean)
        self.results |= results
        if reduction.declared.takes_arrays:
            keep = feedback.prepare_rejected(correction, received.rejected)
            sent = correction.out
        else:
            bucket.selection.observe(mean.entries())
            keep = feedback.prepare_residual(correction, sent, received.rejected)
        self._writes.append(keep)
        first, end = contribution.share
        size = entries(sent)
        others = size - (end - first)
        statistics = Statistics(
            bucket.length,
            others,
            received.value.count,
            entries(received.rejected),
            sent.nbytes * others // max(size, 1),
        )
        self._statistics.append(statistics)

    def _skip(self, buckets: Sequence[Bucket], kind: str) -> None:
        """Prepare the results of a step that is skipped: zeros, or vectors without entries."""
        self.means = []
        self._writes = []
        for bucket in buckets:
            for vector in bucket.outputs(self._outs).values():
                self._writes.append(partial(vector.fill, 0))
            for tensor in bucket.tensors:
                if tensor.name in self._outs or kind == "vectors":
                    continue
                zeros = tensor.new()
                result = tensor.wrap(zeros.reshape(tensor.shape))
                if kind == "sparse":
                    result = SparseVector.empty(tensor.size, tensor.dtype, like=zeros)
                self.results[tensor.name] = result

    def _commit(self, buckets: Sequence[Bucket]) -> None:
        """Commit all buckets and write to output buffers, complete on any stream of a device; cannot fail."""
        began = perf_counter()
        for write in self._writes:
            write()
        staging.complete([bucket.tensors[0].xp for bucket in buckets])
        self._restoring += perf_counter() - began

    def undo(self) -> None:
        """Restore the compressors, and drop what was prepared and what holds errors."""
        restore(self.snapshots)
        for *_, outcome in self.started:
            # After an interrupt other ranks may wait for what is in flight.
            if isinstance(outcome, Request):
                outcome.in_background()
        self.started = []

    def end(self, error: BaseException) -> None:
        """End the step by an error: undo it unless it was kept; error, frames and arrays form no reference cycle."""
        if not self.is_kept:
            self.undo()
        clear_frames(error.__traceback__)

    @property
    def is_on_one_node(self) -> bool:
        """Whether all ranks share memory."""
        return self._link is not None and len(self._link.by_node) == 1

    def close(self) -> Statistics:
        """Return the statistics of a step that was kept and counted."""
        link = self._link = self._link or link_if_any(self._comm)
        total = reduce(Statistics.plus, self._statistics)
        algorithms = dict.fromkeys(
            [
                f"{outcome.operation} ({outcome.algorithm})"
                for *_, outcome in self.started
                if isinstance(outcome, Request)
            ]
        )
        return Statistics(
            *total[:5],
            self._compressing,
            self._communicating,
            self._restoring,
            wire_nbytes=link.traffic.nbytes - self._sent_before if link else 0,
            steps=1,
            algorithms=", ".join(algorithms),
        )


def _sparse_results(started: Started, mean: Written, buffers: ByName) -> dict[str, Any]:
    """Return sparse means by tensor name; raises ValueError for dense ones, and for buffers."""
    bucket = started.bucket
    if bucket.basis is not None or started.reduction.declared.takes is Correction:
        what = "the mean of dense arrays"
        if bucket.basis:
            what = f"in the basis {bucket.basis!r} a mean"
        raise ValueError(
            f"got sparse=True, and {what} has all values: expected sparse=False"
        )
    if buffers:
        raise ValueError(
            "got out= and sparse=True: a sparse mean is returned, and not written to an array"
        )
    if started.reduction.average == SIGN:
        mean = mean.signs()
    parts = split(mean.entries(), bucket.bounds)
    return dict(zip(bucket.names_of_tensors, parts, strict=True))
