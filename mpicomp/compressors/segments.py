"""Segments: the compressor of a vector whose segments are selected from separately; or outside of a range."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

from mpicomp.arrays import Array, kernels_for, read_only
from mpicomp.compressors.base import Compressor, Summands, Wrapper, check_selected, write_sum
from mpicomp.compressors.dense import Dense
from mpicomp.vector import SparseVector, concatenate, places_of, split

Run = tuple[Compressor, int, int]  # a compressor, and the first and the end of its segments


class Segments(Compressor):
    """Compress each segment of a vector by a compressor of its own; consecutive equal ones by one object.

    names: of the segments, in errors; None names none. bounds: the first position of each segment, and the length.
    compressors: one for each segment. Those with equal settings that stand one after the other and select in several
    segments at once (`Compressor.selects_segments`) are replaced by the first of them: a segment then costs no call.

    >>> two = Segments(["a", "b"], [0, 2, 4], [TopK(k=1), TopK(k=1)])
    >>> two.compress(gradient).indices.tolist(), two.compressors["a"] is two.compressors["b"]
    ([1, 3], True)
    """

    def __init__(self, names: Sequence[str | None], bounds: Sequence[int], compressors: Sequence[Compressor]) -> None:
        self.names, self.bounds = list(names), list(bounds)
        self._runs: list[Run] = []
        for place, compressor in enumerate(compressors):
            if self._runs and compressor.selects_segments and repr(self._runs[-1][0]) == repr(compressor):
                self._runs[-1] = *self._runs[-1][:2], place + 1
            else:
                self._runs.append((compressor, place, place + 1))
        every = [compressor for compressor, _, _ in self._runs]
        self.needs_gradient = any(each.needs_gradient for each in every)
        self.observes = any(each.observes for each in every)
        self.communicates = any(each.communicates for each in every)

    @property
    def compressors(self) -> dict[str | None, Compressor]:
        """The compressor of each segment, by name."""
        return {name: compressor for compressor, first, end in self._runs for name in self.names[first:end]}

    @property
    def whole(self) -> list[tuple[int, int]]:
        """Ranges of the vector of which every rank sends all values."""
        runs = ((compressor.chain()[-1], first, end) for compressor, first, end in self._runs)
        return [(self.bounds[first], self.bounds[end]) for inner, first, end in runs if isinstance(inner, Dense)]

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the entries selected in all segments; see `Compressor.compress`. Errors name the segment."""
        return self._by_run(lambda run, span: self._selected(run, corrected[span], None, gradient))

    def compress_scaled_sum(
        self, residual: Array, scale: float, gradient: Array | list[Array], out: Array
    ) -> SparseVector:
        """Write scale * residual + gradient to `out` and compress it, in one pass where there is a kernel for that.

        gradient: a vector, or its parts. See `Compressor.compress_sum`.
        """
        parts = gradient if isinstance(gradient, list) else [gradient]
        if not isinstance(gradient, list) and len(self.names) > 1:
            parts = [gradient[first:end] for first, end in pairwise(self.bounds)]
        if len(parts) != len(self.names):  # the arrays of a list
            write_sum((residual, scale, parts), out)
            return self.compress(read_only(out))

        def select(run: Run, span: slice) -> SparseVector:
            return self._selected(run, out[span], (residual[span], scale, parts[run[1] : run[2]]), None)

        return self._by_run(select)

    def _by_run(self, select: Callable[[Run, slice], SparseVector]) -> SparseVector:
        """Return the entries of all runs as one vector.

        After an error only compressors that communicate are called, which the other ranks call in any case.
        """
        parts, failed = [], None
        for run in self._runs:
            if failed is None or run[0].communicates:
                try:
                    parts.append(select(run, slice(self.bounds[run[1]], self.bounds[run[2]])))
                except Exception as error:
                    failed = failed or error
        try:
            if failed is not None:
                raise failed
            return concatenate(parts)
        finally:
            del failed  # it, its traceback and this frame would hold each other

    def _selected(self, run: Run, vector: Array, summands: Summands | None, gradient: Array | None) -> SparseVector:
        """Return the entries of a run's part of the vector, which is written first if there are summands."""
        compressor, first, end = run
        with self._named(first, end, vector):
            if len(self.names) == 1 and summands is not None and summands[1] == 1:
                sent = compressor.compress_sum(summands[0], summands[2][0], vector)
            elif compressor.selects_segments and gradient is None:
                bounds = [bound - self.bounds[first] for bound in self.bounds[first : end + 1]]
                sent = compressor.compress_segments(vector, bounds, summands=summands)
            else:
                if summands is not None:
                    write_sum(summands, vector)
                added = None if gradient is None else gradient[self.bounds[first] : self.bounds[end]]
                sent = compressor.compress(read_only(vector), gradient=added)
            check_selected(sent, vector, compressor)
        return sent

    def observe(self, aggregate: SparseVector, votes: Array | None = None) -> None:
        """See `Compressor.observe`; passes each compressor its part."""
        edges = [0, *(self.bounds[end] for _, _, end in self._runs)]
        shares = split(aggregate if votes is None else aggregate.with_values(votes), edges)
        for (compressor, _, _), part, share in zip(self._runs, split(aggregate, edges), shares, strict=True):
            if compressor.observes:
                compressor.observe(part, None if votes is None else share.values)

    def snapshot(self) -> list[tuple[Compressor, dict[str, Any]]]:
        """See `Compressor.snapshot`; of a compressor that several vectors share, as the first one found it."""
        return [each for compressor, _, _ in reversed(self._runs) for each in compressor.snapshot()]

    def reset(self) -> None:
        """See `Compressor.reset`."""
        for compressor, _, _ in self._runs:
            compressor.reset()

    @contextmanager
    def _named(self, first: int, end: int, vector: Array) -> Iterator[None]:
        """Name the segment in the text of an error: the only one, or the one with a value that is not finite."""
        try:
            yield
        except Exception as error:
            name = self.names[first] if end - first == 1 else None
            if isinstance(error, ValueError) and end - first > 1:
                self.raise_not_finite(first, end, vector)
            if name is not None and error.args and isinstance(error.args[0], str):
                error.args = (f"in {name}: {error.args[0]}", *error.args[1:])
            raise

    def raise_not_finite(self, first: int, end: int, vector: Array) -> None:
        """Raise ValueError that names the first value that is not finite, by segment and its index there."""
        start = self.bounds[first]
        for name, (low, high) in zip(self.names[first:end], pairwise(self.bounds[first : end + 1]), strict=True):
            try:
                kernels_for(vector).raise_not_finite(vector[low - start : high - start])
            except ValueError as error:
                raise ValueError(str(error) if name is None else f"in {name}: {error}") from None


class Outside(Wrapper):
    """Compress a vector outside of the range from `first` to `end`, of which all values are selected.

    >>> Outside(Segments([None], [0, 4], [TopK(k=1)]), 0, 2).compress(gradient).values.tolist()
    [0.5, -3.0, 2.0]
    """

    def __init__(self, compressor: Segments, first: int, end: int) -> None:
        super().__init__(compressor)
        self.first, self.end, self._segments = first, end, compressor

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the selected entries; see `Compressor.compress`. The other compressor finds zeros in the range."""
        own, outside = corrected[self.first : self.end], corrected.copy()
        outside[self.first : self.end] = 0
        selected = self._segments.compress(read_only(outside), gradient=gradient)
        try:
            kernels_for(own).raise_not_finite(own)
        except ValueError:
            self._segments.raise_not_finite(0, len(self._segments.names), corrected)
            raise
        low, high = places_of(selected, [self.first, self.end])
        consecutive = kernels_for(own).consecutive(self.first, self.end, selected.indices.dtype)
        indices = np.concatenate([selected.indices[:low], consecutive, selected.indices[high:]])
        values = np.concatenate([selected.values[:low], own, selected.values[high:]])
        return SparseVector.trusted(indices, values, selected.length)
