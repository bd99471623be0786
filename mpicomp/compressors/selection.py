"""The selection from a vector of segments, such as the tensors of a bucket, by the compressors of its runs."""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from mpicomp.arrays import Array
from mpicomp.arrays.device import kernels_for
from mpicomp.arrays.values import check_finite
from mpicomp.compressors.base import (
    Compressor,
    Snapshot,
    are_joinable,
    check_selected,
    join,
    snapshot,
)
from mpicomp.compressors.dense import Dense
from mpicomp.correction import Correction
from mpicomp.errors import prefix
from mpicomp.vector import SparseVector, concatenate, merge, split


class Run(NamedTuple):
    """A compressor and the consecutive segments it serves, from `first` to before `end`.

    bounds: of these segments, from 0.
    """

    compressor: Compressor
    first: int
    end: int
    bounds: tuple[int, ...]


class Selection:
    """Select from each segment of a vector by the compressor of its run.

    names: of the segments, in errors; None names none. bounds: the first position of
    each segment, and the length. compressors: one for each segment. Neighbours that
    differ only in their `varying` settings are served by one object and one call.

    >>> two = Selection(["a", "b"], [0, 2, 4], [TopK(k=1), TopK(k=2)])
    >>> two.select(Correction([gradient], gradient)).indices.tolist(), len(two.runs)
    ([1, 2, 3], 1)
    """

    def __init__(
        self,
        names: Sequence[str | None],
        bounds: Sequence[int],
        compressors: Sequence[Compressor],
    ) -> None:
        self.names = names
        # Error messages begin with these.
        self._prefixes = ["" if name is None else f"in {name}: " for name in names]
        self.bounds = list(bounds)
        # The settings are recorded now, as `WarmUp` changes those of the compressor
        # that it wraps.
        self.settings = [compressor.get_config() for compressor in compressors]
        self.runs: list[Run] = []
        first = 0
        for end in range(1, len(compressors) + 1):
            if end < len(compressors) and are_joinable(*compressors[end - 1 : end + 1]):
                continue
            start = self.bounds[first]
            edges = [bound - start for bound in self.bounds[first : end + 1]]
            run = Run(join(compressors[first:end]), first, end, tuple(edges))
            self.runs.append(run)
            first = end
        # Whether no code of the user may have changed what was selected.
        self._is_of_library = all(
            type(part).__module__.startswith("mpicomp.") for part in self._parts()
        )

    def _parts(self) -> list[Compressor]:
        """Return all compressors, with those that they wrap now."""
        return [part for run in reversed(self.runs) for part in run.compressor.chain()]

    @cached_property
    def dense_ranges(self) -> list[tuple[int, int]]:
        """Ranges of the vector of which every rank sends all values."""
        return [
            (self.bounds[run.first], self.bounds[run.end])
            for run in self.runs
            if isinstance(run.compressor.chain()[-1], Dense)
        ]

    def select(
        self, correction: Correction, share: tuple[int, int] = (0, 0)
    ) -> SparseVector:
        """Return the entries selected in all segments, as one vector; errors name the segment.

        share: a range of which all values are returned. See `Compressor.select`.
        """
        first, end = share
        if first < end:
            return self._select_outside(correction, first, end)
        vectors = []
        for run in self.runs:
            own = correction
            if len(self.runs) > 1:
                span = slice(self.bounds[run.first], self.bounds[run.end])
                own = correction.between(run.first, run.end, span)
            try:
                vector = run.compressor.select(own, run.bounds)
                check_selected(vector, own.out, run.compressor)
            except Exception as error:
                if run.end - run.first == 1:
                    prefix(error, self._prefixes[run.first])
                elif isinstance(error, ValueError):
                    self._check_segments(correction.add(), run.first, run.end)
                raise
            vectors.append(vector)
        selected = concatenate(vectors) if len(vectors) > 1 else vectors[0]
        return selected if self._is_of_library else selected.forget()

    def _select_outside(
        self, correction: Correction, first: int, end: int
    ) -> SparseVector:
        """Return all values of a range, and the entries selected outside of it: `select` gets zeros in the range."""
        corrected = correction.add()
        outside = corrected.copy()
        outside[first:end] = 0
        selected = self.select(correction._replace(out=outside, residual=None))
        self.check_finite(corrected)
        own = corrected[first:end]
        indices = kernels_for(own).consecutive(first, end, selected.indices.dtype)
        return merge(selected, SparseVector.trusted(indices, own, corrected.size))

    def observe(self, aggregate: SparseVector) -> None:
        """Pass each compressor its part of the mean; see `Compressor.observe`."""
        if len(self.runs) == 1:
            self.runs[0].compressor.observe(aggregate)
            return
        edges = [0, *(self.bounds[run.end] for run in self.runs)]
        for run, part in zip(self.runs, split(aggregate, edges), strict=True):
            run.compressor.observe(part)

    def snapshot(self) -> list[Snapshot]:
        """Return the attributes of all compressors; of one that several buckets share, those before the first."""
        return snapshot(self._parts())

    def reset(self) -> None:
        """Clear the stored information about single positions; see `Compressor.reset`."""
        for run in self.runs:
            run.compressor.reset()

    def check_finite(self, vector: Array) -> None:
        """Raise ValueError that names the first value that is not finite, by segment and its index there."""
        try:
            check_finite(vector)
        except ValueError:
            self._check_segments(vector, 0, len(self._prefixes))
            raise

    def _check_segments(self, vector: Array, first: int, end: int) -> None:
        """Raise ValueError that names the first of these segments with a value that is not finite, if there is one."""
        edges = pairwise(self.bounds[first : end + 1])
        for text, (low, high) in zip(self._prefixes[first:end], edges, strict=True):
            try:
                check_finite(vector[low:high])
            except ValueError as error:
                prefix(error, text)
                raise
