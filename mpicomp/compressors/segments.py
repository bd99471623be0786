"""Segments: the compressor of a vector whose segments are selected from separately; or outside of a range."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mpicomp.arrays import Array, kernels_for, read_only
from mpicomp.compressors.base import (
    Compressor,
    Snapshot,
    Summands,
    Wrapper,
    check_selected,
    write_sum,
)
from mpicomp.compressors.dense import Dense
from mpicomp.vector import SparseVector, concatenate, places_of, split

# of classes that keep nothing of an aggregate
_FORGETFUL = Compressor.observe, Wrapper.observe
# one for all its segments, or one for each; the first segment, and the end
Run = tuple[list[Compressor], int, int]


class Segments(Compressor):
    """Compress each segment of a vector by a compressor of its own; consecutive equal ones by one object.

    names: of the segments, in errors; None names none. bounds, compressors: one for
    each segment, the length last. Those that are joined and implement
    `compress_segments` are replaced by the first of them, and those that implement
    `compress_each` are called together: a segment then costs no call.

    >>> two = Segments(["a", "b"], [0, 2, 4], [TopK(k=1), TopK(k=1)])
    >>> two.compress(gradient).indices.tolist(), two.compressors["a"] is two.compressors["b"]
    ([1, 3], True)
    """

    def __init__(
        self,
        names: Sequence[str | None],
        bounds: Sequence[int],
        compressors: Sequence[Compressor],
    ) -> None:
        self.names, self.bounds = list(names), list(bounds)
        self._runs: list[Run] = []
        for place, compressor in enumerate(compressors):
            own, first, _ = self._runs[-1] if self._runs else ([], 0, 0)
            is_joined = bool(own) and own[0].is_joined_with(compressor)
            if is_joined and (_keeps_own(compressor) or _selects_segments(compressor)):
                self._runs[-1] = (
                    own + [compressor] * _keeps_own(compressor),
                    first,
                    place + 1,
                )
            else:
                self._runs.append(([compressor], place, place + 1))
        runs = [
            ([first, end] if len(own) == 1 else range(first, end + 1), own)
            for own, first, end in self._runs
        ]
        # each compressor, the first and the end of its segments
        self._owners: list[tuple[Compressor, int, int]] = [
            (each, *span)
            for edges, own in runs
            for each, span in zip(own, pairwise(edges), strict=True)
        ]

    @property
    def compressors(self) -> dict[str | None, Compressor]:
        """The compressor of each segment, by name."""
        return {
            name: compressor
            for compressor, first, end in self._owners
            for name in self.names[first:end]
        }

    @property
    def whole(self) -> list[tuple[int, int]]:
        """Ranges of the vector of which every rank sends all values."""
        runs = (
            (compressor.chain()[-1], first, end)
            for compressor, first, end in self._owners
        )
        return [
            (self.bounds[first], self.bounds[end])
            for inner, first, end in runs
            if isinstance(inner, Dense)
        ]

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
        for compressors, first, end in self._runs:
            compressor = compressors[0]
            span = slice(self.bounds[first], self.bounds[end])
            part, own = vector[span], None
            if summands is not None:
                own = summands[0][span], summands[1], summands[2][first:end]
            try:
                if own is None and (
                    end - first == 1 or (len(compressors) > 1 and gradient is not None)
                ):
                    calls = zip(
                        compressors, pairwise(self.bounds[first : end + 1]), strict=True
                    )
                    sent = concatenate(
                        [
                            _compressed(each, vector, gradient, slice(*edges))
                            for each, edges in calls
                        ]
                    )
                else:
                    bounds = [
                        bound - span.start for bound in self.bounds[first : end + 1]
                    ]
                    if len(compressors) == 1:
                        sent = compressor.compress_segments(part, bounds, summands=own)
                    else:
                        sent = compressor.compress_each(
                            compressors, part, bounds, summands=own
                        )
                check_selected(sent, part, compressor)
                selected.append(sent)
            except Exception as error:
                self._name_segment(error, first, end, part)
                raise
        return concatenate(selected) if len(selected) > 1 else selected[0]

    def observe(self, aggregate: SparseVector, votes: Array | None = None) -> None:
        """See `Compressor.observe`; passes each compressor its part."""
        owners = self._owners
        if len(owners) == 1:
            owners[0][0].observe(aggregate, votes)
            return
        if all(
            type(part).observe in _FORGETFUL
            for owner, _, _ in owners
            for part in owner.chain()
        ):
            return
        edges = [0, *(self.bounds[end] for _, _, end in owners)]
        parts = split(aggregate, edges)
        shares = parts if votes is None else split(aggregate.with_values(votes), edges)
        for (compressor, _, _), part, share in zip(owners, parts, shares, strict=True):
            compressor.observe(part, None if votes is None else share.values)

    def snapshot(self) -> list[Snapshot]:
        """See `Compressor.snapshot`; of a compressor that several vectors share, as the first one found it."""
        return [
            each
            for compressor, _, _ in reversed(self._owners)
            for each in compressor.snapshot()
        ]

    def reset(self) -> None:
        for compressor, _, _ in self._owners:
            compressor.reset()

    def _name_segment(
        self, error: Exception, first: int, end: int, part: Array
    ) -> None:
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
        for name, (low, high) in zip(
            self.names[first:end], pairwise(self.bounds[first : end + 1]), strict=True
        ):
            try:
                kernels_for(vector).raise_not_finite(vector[low - start : high - start])
            except ValueError as error:
                raise ValueError(
                    str(error) if name is None else f"in {name}: {error}"
                ) from None


def _compressed(
    compressor: Compressor, vector: Array, gradient: Array | None, span: slice
) -> SparseVector:
    return compressor.compress(
        read_only(vector[span]), gradient=None if gradient is None else gradient[span]
    )


def _selects_segments(compressor: Compressor) -> bool:
    """Return whether one object serves several segments: each of its chain implements `compress_segments`."""
    default, chain = Compressor.compress_segments, compressor.chain()
    return all(
        type(each).compress_segments is not default for each in chain
    ) and not any(map(_keeps_own, chain))


def _keeps_own(compressor: Compressor) -> bool:
    """Return whether every segment needs an object of its own, and one call serves several of them."""
    return type(compressor).compress_each is not Compressor.compress_each


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
        consecutive = kernels_for(own).consecutive(
            self.first, self.end, selected.indices.dtype
        )
        indices = np.concatenate(
            [selected.indices[:low], consecutive, selected.indices[high:]]
        )
        values = np.concatenate([selected.values[:low], own, selected.values[high:]])
        return SparseVector.trusted(indices, values, selected.length)

    def compress_segments(
        self,
        corrected: Array,
        bounds: Sequence[int],
        *,
        summands: Summands | None = None,
    ) -> SparseVector:
        """See `Compressor.compress_segments`; bounds: those of the other compressor."""
        if summands is None:
            return self.compress(read_only(corrected))
        write_sum(summands, corrected)
        return self.compress(read_only(corrected), gradient=np.concatenate(summands[2]))
