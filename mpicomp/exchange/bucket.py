"""A bucket: the vectors of one or more pipelines, side by side in one message.

A bucket starts, is settled and is committed. A rank whose part is bad starts it with its error: the collective raises
that here and CollectiveError on the others, so nobody waits for ever.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, zip_longest
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import beside, kernels_for, namespace
from mpicomp.compressors.protocol import failed
from mpicomp.exchange.pipeline import Pipeline
from mpicomp.vector import SparseVector, add_up, index_dtype

Array = NDArray[Any]
Collective = Callable[[Any, Any], Any]

_ALONE = "gradient"  # what the one vector of an exchange without names is called


class Bucket:
    """Pipelines whose vectors, of these lengths and of one dtype, travel together.

    collective: takes (vector, comm), or with `dense` (array, comm); returns the sum, or a Request for it.
    """

    def __init__(
        self, pipelines: Sequence[Pipeline], lengths: Sequence[int], collective: Collective, *, dense: bool = False
    ) -> None:
        self.pipelines, self.collective, self.dense = pipelines, collective, dense
        self.vectors = [_ALONE] * len(pipelines)  # what they are called in errors, and in what is saved
        self.bounds = [0, *accumulate(lengths)]
        self.sent = self.received = self.rejected = self.nbytes = 0
        self.compress_seconds = self.communicate_seconds = self.restore_seconds = 0.0
        self._outcome: Any = None

    def start(self, flats: Sequence[Array | Exception], comm: Any) -> None:
        """Compress this rank's gradients (1-d), and put the sum in flight; what is bad is raised in `settle`.

        Raises at once, on all ranks, where the collective blocks, or a compressor talks.
        """
        began, error, told = perf_counter(), None, False
        vectors = []
        for name, pipeline, flat in zip(self.vectors, self.pipelines, flats, strict=True):
            try:
                vectors.append(pipeline.send(flat if error is None else error))
            except Exception as raised:
                if error is None and raised is not flat and name != _ALONE:
                    named(raised, [name])
                error = error or raised
                told = told or pipeline.talks
        self.compress_seconds = perf_counter() - began
        try:
            if error is not None and told:
                raise error
            self._launch(self._together(vectors, flats) if error is None else error, comm)
        finally:  # else an error, its traceback and this frame hold each other, and the gradient with them
            del error, flats, flat, vectors

    def test(self) -> bool:
        """Move on what is in flight, without waiting; return whether it has ended."""
        return bool(self._outcome.test()) if hasattr(self._outcome, "test") else True

    def settle(self, comm: Any, *, average: bool) -> None:
        """Wait for the sum, and hand every pipeline its part of the mean, or of the sum; raises on all ranks alike."""
        began = perf_counter()
        outcome = self._outcome.wait() if hasattr(self._outcome, "wait") else self._outcome
        self._outcome = None
        self.communicate_seconds += perf_counter() - began
        began = perf_counter()
        total, self.received, rejected, votes = self._told(outcome)
        self.rejected = rejected.nnz if rejected is not None else 0
        values = total.values / comm.size if average else total.values
        mean = SparseVector(total.indices, _finite(values, self._dtype), total.length)
        shares = votes / comm.size if votes is not None else None
        if len(self.pipelines) == 1:
            self.pipelines[0].receive(mean, rejected, shares)
        else:
            self._distribute(mean, rejected, shares)
        self.restore_seconds = perf_counter() - began

    def commit(self, outs: Sequence[Array | None] = ()) -> list[Array]:
        """Let every pipeline keep what did not travel, and return what the caller gets of each.

        outs: for each pipeline the vector to write that to, or None for a new one; () for new ones everywhere.
        """
        began = perf_counter()
        results = [pipeline.commit(out) for pipeline, out in zip_longest(self.pipelines, outs)]
        self.restore_seconds += perf_counter() - began
        return results

    def abandon(self, *, wait: bool = True) -> None:
        """Be as before `start`; what is in flight is waited for, as the other ranks do, unless `wait` is false."""
        try:
            if wait and hasattr(self._outcome, "wait"):
                self._outcome.wait()
        except Exception:  # it failed too: the step is already over
            pass
        finally:
            self._outcome = None
            for pipeline in reversed(self.pipelines):  # two may share a compressor: the first one saw it as it was
                pipeline.roll_back()

    def _launch(self, brings: Any, comm: Any) -> None:
        began = perf_counter()
        try:
            if isinstance(brings, Exception):
                self._outcome = failed(self.collective, brings, comm)
            else:
                self._outcome = self.collective(brings, comm)
        finally:
            del brings
        self.communicate_seconds = perf_counter() - began

    def _together(self, vectors: list[Any], flats: Sequence[Any]) -> Any:
        """Return what the collective takes, or why there is none: what a compressor returned may be anything."""
        try:
            for pipeline, vector, flat in zip(self.pipelines, vectors, flats, strict=True):
                _check_sent(pipeline.compressor, vector, flat)
            vector = self._side_by_side(vectors)
            self.sent, self.nbytes, self._dtype = vector.nnz, vector.nbytes, vector.dtype
            return vector.to_dense() if self.dense else vector
        except Exception as error:  # whatever it is: the other ranks have to hear of it
            return error.with_traceback(None)  # its frames would hold the gradient

    def _side_by_side(self, vectors: list[SparseVector]) -> SparseVector:
        if len(vectors) == 1:
            return vectors[0]
        dtype = index_dtype(self.bounds[-1])
        moved = [part.indices.astype(dtype) + dtype.type(at) for part, at in zip(vectors, self.bounds, strict=False)]
        return SparseVector(np.concatenate(moved), np.concatenate([part.values for part in vectors]), self.bounds[-1])

    def _distribute(self, mean: SparseVector, rejected: SparseVector | None, shares: Array | None) -> None:
        for pipeline, (first, end) in zip(self.pipelines, pairwise(self.bounds), strict=True):
            inside = _inside(mean, first, end)
            pipeline.receive(
                _cut(mean, inside, first, end),
                _cut(rejected, _inside(rejected, first, end), first, end) if rejected is not None else None,
                shares[inside] if shares is not None else None,
            )

    def _told(self, outcome: Any) -> tuple[SparseVector, int, SparseVector | None, Array | None]:
        """Return the sum, the entries that came, what was rejected and the votes, from what a collective returned.

        Several parts are added up in rank order. float16 becomes float32 first, so that it is rounded once, and a mean
        may be in range where the sum is not.
        """
        result, more = outcome if isinstance(outcome, tuple) else (outcome, None)
        if self.dense:
            indices = kernels_for(result).consecutive(0, result.size, index_dtype(result.size))
            result = SparseVector(indices, result, result.size)
        parts = result if isinstance(result, list) else [result]
        if not all(isinstance(part, SparseVector) for part in parts):
            raise TypeError(
                f"the collective returned {type(result).__name__}: expected a SparseVector, with what was rejected or "
                "the votes, a list of them, or a Request for one; give a collective such as gtopk_allreduce"
            )
        rejected, votes = (more, None) if isinstance(more, SparseVector) else (None, more)
        if isinstance(result, list) and any(pipeline.observes for pipeline in self.pipelines):
            xp = namespace(parts[0].values)
            votes = add_up([SparseVector(part.indices, xp.ones(part.nnz), part.length) for part in parts]).values
        wide = np.promote_types(parts[0].dtype, np.float32)
        total = add_up(
            [SparseVector(part.indices, part.values.astype(wide, copy=False), part.length) for part in parts]
        )
        return total, sum(part.nnz for part in parts), rejected, votes


def named(error: Exception, vectors: Sequence[str]) -> None:
    """Put the tensors in front of what an error says, unless they stand there."""
    if error.args and isinstance(error.args[0], str) and not error.args[0].startswith("in "):
        error.args = (f"in {', '.join(vectors)}: {error.args[0]}", *error.args[1:])


def _check_sent(compressor: Any, vector: Any, flat: Array) -> None:
    if not isinstance(vector, SparseVector):
        raise TypeError(f"{compressor!r} returned {type(vector).__name__}: expected a SparseVector")
    if (vector.length, vector.dtype, vector.width) != (flat.size, flat.dtype, None):
        raise ValueError(f"{compressor!r} returned {vector!r}: expected {flat.dtype} numbers of length {flat.size}")


def _inside(vector: SparseVector, first: int, end: int) -> slice:
    """Return which entries stand at first, ..., end - 1."""
    bounds = beside(np.array([first, end], vector.indices.dtype), vector.indices)
    low, high = np.searchsorted(vector.indices, bounds).tolist()
    return slice(low, high)


def _cut(vector: SparseVector, inside: slice, first: int, end: int) -> SparseVector:
    """Return the entries `inside` as a vector of the positions first, ..., end - 1."""
    indices = vector.indices[inside] - vector.indices.dtype.type(first)
    return SparseVector(indices, vector.values[inside], end - first)


def _finite(mean: Array, dtype: np.dtype[Any]) -> Array:
    """Return `mean` as `dtype`. All ranks have the same bits of it, so all raise or none, with no message."""
    with np.errstate(over="ignore"):
        result = mean.astype(dtype, copy=False)
    if not np.isfinite(result).all():
        raise OverflowError(
            f"the sum over the ranks leaves the range of {dtype}: scale the gradients down, or use float32"
        )
    return result
