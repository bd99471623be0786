"""Segments: the compressor of a vector whose segments are selected from separately; or outside of a range."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mpicomp.arrays import Array, kernels_for, read_only
from mpicomp.compressors.base import Compressor, Snapshot, Summands, Wrapper, check_selected, write_sum
from mpicomp.compressors.dense import Dense
from mpicomp.vector import SparseVector, concatenate, places_of, split

Run = tuple[Compressor, int, int]  # a compressor, and the first and the end of its segments


class Segments(Compressor):
    """Compress each segment of a vector by a compressor of its own; consecutive equal ones by one object.

    names: of the segments, in errors; None names none. bounds: the first position of each segment, and the length.
    compressors: one for each segment. Those with equal settings that follow each other and implement
    `compress_segments` are replaced by the first of them: a segment then costs no call.

    >>> two = Segments(["a", "b"], [0, 2, 4], [TopK(k=1), TopK(k=1)])
    >>> two.compress(gradient).indices.tolist(), two.compressors["a"] is two.compressors["b"]
    ([1, 3], True)
    """

    def __init__(self, names: Sequence[str | None], bounds: Sequence[int], compressors: Sequence[Compressor]) -> None:
        self.names, self.bounds = list(names), list(bounds)
        self._runs: list[Run] = []
        for place, compressor in enumerate(compressors):
            if self._runs and _selects_segments(compressor) and repr(self._runs[-1][0]) == repr(compressor):
                self._runs[-1] = *self._runs[-1][:2], place + 1
            else:
                self._runs.append((compressor, place, place + 1))

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
        """Return the entries selected in all segments; see `Compressor.compress`."""
        return self.compress_segments(corrected, self.bounds, gradient=gradient)

    def compress_segments(
        self,
        corrected: Array,
        bounds: Sequence[int],
        *,
        summands: Summands | None = None,
        gradient: Array | None = None,
    ) -> SparseVector:
        """Return the entries selected in all segments, as one vector; errors name the segment.

        bounds: those of the object. gradient: as in `compress`, in place of summands.
        """
        vector, selected = corrected, []
        for compressor, first, end in self._runs:
            span = slice(self.bounds[first], self.bounds[end])
            part, own = vector[span], None
            if summands is not None:
                own = summands[0][span], summands[1], summands[2][first:end]
            try:
                if end - first == 1 and own is None:
                    sent = compressor.compress(read_only(part), gradient=None if gradient is None else gradient[span])
                else:
                    bounds = [bound - span.start for bound in self.bounds[first : end + 1]]
                    sent = compressor.compress_segments(part, bounds, summands=own)
                check_selected(sent, part, compressor)
                selected.append(sent)
            except Exception as error:
                self._name_segment(error, first, end, part)
                raise
        return concatenate(selected) if len(selected) > 1 else selected[0]

    def observe(self, aggregate: SparseVector, votes: Array | None = None) -> None:
        """See `Compressor.observe`; passes each compressor its part."""
        if len(self._runs) == 1:
            self._runs[0][0].observe(aggregate, votes)
            return
        edges = [0, *(self.bounds[end] for _, _, end in self._runs)]
        shares = split(aggregate if votes is None else aggregate.with_values(votes), edges)
        for (compressor, _, _), part, share in zip(self._runs, split(aggregate, edges), shares, strict=True):
            compressor.observe(part, None if votes is None else share.values)

    def snapshot(self) -> list[Snapshot]:
        """See `Compressor.snapshot`; of a compressor that several vectors share, as the first one found it."""
        return [each for compressor, _, _ in reversed(self._runs) for each in compressor.snapshot()]

    def reset(self) -> None:
        """See `Compressor.reset`."""
        for compressor, _, _ in self._runs:
            compressor.reset()

    def _name_segment(self, error: Exception, first: int, end: int, part: Array) -> None:
        """Add the segment to an error's text: the only one, or the one with a value that is not finite."""
        if isinstance(error, ValueError) and end - first > 1:
            try:
                self.raise_not_finite(first, end, part)
            except ValueError as found:
                error.args = found.args
        name = self.names[first] if end - first == 1 else None
        if name is not None and error.args and isinstance(error.args[0], str):
            error.args = (f"in {name}: {error.args[0]}", *error.args[1:])

    def raise_not_finite(self, first: int, end: int, vector: Array) -> None:
        """Raise ValueError that names the first value that is not finite, by segment and its index there."""
        start = self.bounds[first]
        for name, (low, high) in zip(self.names[first:end], pairwise(self.bounds[first : end + 1]), strict=True):
            try:
                kernels_for(vector).raise_not_finite(vector[low - start : high - start])
            except ValueError as error:
                raise ValueError(str(error) if name is None else f"in {name}: {error}") from None


def _selects_segments(compressor: Compressor) -> bool:
    """Return whether one object serves several segments: each of its chain implements `compress_segments`."""
    default = Compressor.compress_segments
    return all(type(each).compress_segments is not default for each in compressor.chain())


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

    def compress_segments(
        self, corrected: Array, bounds: Sequence[int], *, summands: Summands | None = None
    ) -> SparseVector:
        """See `Compressor.compress_segments`; bounds: those of the other compressor."""
        if summands is None:
            return self.compress(read_only(corrected))
        write_sum(summands, corrected)
        return self.compress(read_only(corrected), gradient=np.concatenate(summands[2]))
