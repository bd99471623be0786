"""The contract of a compressor: the selection, its properties for an exchange, and its state between steps.

docs/contributing/own_compressor.md says what one of your own implements, with an example.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from mpicomp.arrays import Array
from mpicomp.arrays.frameworks import to_vector
from mpicomp.arrays.memory import flat, read_only
from mpicomp.correction import Correction
from mpicomp.kernels import Selected
from mpicomp.state import ROWS, SHARED, Configured, check_object
from mpicomp.vector import SparseVector, concatenate

Snapshot = tuple[Configured, dict[str, Any]]
"""A compressor or a feedback, and its attributes."""


class Compressor(Configured):
    """Base class of compressors: select the entries of a dense vector that are sent.

    Store every constructor argument in an attribute of the same name: `repr` shows them, and
    ranks compare settings by it. Assign new values to attributes, and change no list or array
    in place.
    """

    density: float | None = None
    """The fraction of the entries to select, for compressors that take one; `WarmUp` changes it."""

    @property
    def fraction(self) -> float | None:
        """The fraction of the entries of a long vector that are selected, about; None if it is not known before."""
        return self.density

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the selected entries of a vector.

        The result has no exact zero of `corrected`, and at least one entry if any is not zero.

        Args:
            corrected: the gradient with the residual added, of any shape, taken in C order;
                float16, float32 or float64. It may be read-only: do not write to it.
            gradient: what the step added to the residual, read-only too; None if it is not
                available.

        Returns:
            A SparseVector of the length and dtype of `corrected`.

        Raises:
            ValueError: a value of `corrected` is not finite, also one that is not selected; it
                names the first. The compressor does not change then.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no compress(corrected, *, gradient=None)"
        )

    def select(self, correction: Correction, bounds: Sequence[int]) -> SparseVector:
        """Return the entries selected in each segment of a vector, as one vector.

        This one calls `compress` for each segment; a `SegmentedCompressor` selects from all in
        one call.

        Args:
            correction: the vector to select from. Its sum is written to its buffer, also if an
                error is raised after that.
            bounds: the first position of each segment, and the length.

        Returns:
            A SparseVector of the length and dtype of the correction.

        Raises:
            TypeError: `compress` returned something else.
            ValueError: as `compress`; or it returned a vector of another length or dtype.
        """
        corrected = correction.add()
        gradient = correction.gradient
        vectors = []
        for segment, (first, end) in enumerate(pairwise(bounds)):
            part = None if gradient is None else read_only(flat(gradient[segment]))
            values = read_only(corrected[first:end])
            vector = self.compress(values, gradient=part)
            check_selected(vector, values, self)
            vectors.append(vector)
        return concatenate(vectors)

    def observe(self, aggregate: SparseVector) -> None:
        """Receive the mean over the ranks, the same on every rank, once a step; by default do nothing.

        Args:
            aggregate: a SparseVector. Its arrays are also returned to the caller: copy what you
                keep.
        """

    def chain(self) -> list["Compressor"]:
        """Return this compressor and the ones it wraps, the innermost last."""
        return [self]

    def reset(self) -> None:
        """Clear the stored information about single positions, in the whole chain, for a model that was replaced."""

    def parts(self) -> dict[str, Configured]:
        return {f"{depth}.": part for depth, part in enumerate(self.chain())}


class SegmentedCompressor(Compressor):
    """Base of compressors that select from all segments of a vector in one call: they implement `select`.

    In an exchange one object then serves consecutive named tensors. Attributes in
    `varying` are settings that may differ between them: a number, or an array (float64
    or int64) with one element for each segment. Attributes in `state` are arrays with
    one element, or row, for each segment.
    """

    layout = ROWS
    varying: ClassVar[tuple[str, ...]] = ()

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the entries that `select` returns for one segment; see `Compressor.compress`."""
        dense = to_vector(corrected)
        part = dense
        if gradient is not None:
            part = to_vector(gradient).astype(dense.dtype, copy=False)
        correction = Correction([part], dense, shows_gradient=gradient is not None)
        return self.select(correction, [0, dense.size]).forget()

    def select(self, correction: Correction, bounds: Sequence[int]) -> SparseVector:
        raise NotImplementedError(
            f"{type(self).__name__} has no select(correction, bounds)"
        )

    def extend(self, others: Sequence[Any]) -> None:
        """Take the rows of other compressors of this class, for segments that follow."""
        for name in self.varying:
            values = [vars(part)[name] for part in (self, *others)]
            if values[0] is not None and len(set(values)) > 1:
                setattr(self, name, np.array(values))
        if self.layout == ROWS:
            for name in self.state:
                rows = [vars(part)[name] for part in (self, *others)]
                setattr(self, name, np.concatenate(rows))


class Wrapper(Compressor):
    """Base class of compressors that wrap another one; attributes in `state` hold for all segments.

    Args:
        compressor: the inner one.

    Raises:
        TypeError: `compressor` is no compressor.
    """

    layout = SHARED

    def __init__(self, compressor: Compressor) -> None:
        check_compressor(compressor)
        self.compressor = compressor

    def observe(self, aggregate: SparseVector) -> None:
        self.compressor.observe(aggregate)

    def chain(self) -> list[Compressor]:
        return [self, *self.compressor.chain()]

    def reset(self) -> None:
        self.compressor.reset()


def join(compressors: Sequence[Compressor]) -> Compressor:
    """Return the first of some compressors for the segments of all, which `are_joinable`."""
    if len(compressors) == 1:
        return compressors[0]
    chains = [compressor.chain() for compressor in compressors]
    for first, *others in zip(*chains, strict=True):
        assert isinstance(first, SegmentedCompressor)
        first.extend(others)
    return compressors[0]


def are_joinable(one: Compressor, other: Compressor) -> bool:
    """Return whether one object serves segments of both: they differ in varying settings only."""
    ours = [_shared_settings(part) for part in one.chain()]
    theirs = [_shared_settings(part) for part in other.chain()]
    return None not in ours and ours == theirs


def _shared_settings(part: Compressor) -> list[Any] | None:
    """Return the settings that compressors must share to be joined; None if this one serves a single segment only."""
    if not isinstance(part, SegmentedCompressor):
        return None
    fixed: list[Any] = [type(part)]
    if part.layout == SHARED:
        fixed.append(part.held())
    for name, value in part._settings().items():
        if name in part.varying:
            fixed.append(value is None)
        elif not isinstance(value, Compressor):
            fixed.append(repr(value))
    return fixed


@contextmanager
def set_back(snapshots: Sequence[Snapshot]) -> Iterator[None]:
    """Set compressors to their snapshots within a block; the last snapshot of a compressor counts."""
    now = snapshot([compressor for compressor, _ in snapshots])
    restore(snapshots)
    try:
        yield
    finally:
        restore(now)


def snapshot(parts: Sequence[Configured]) -> list[Snapshot]:
    """Return the attributes of compressors, which are set again after a step that failed."""
    return [(part, dict(vars(part))) for part in parts]


def restore(snapshots: Sequence[Snapshot]) -> None:
    """Set the attributes of compressors to those of snapshots, in order."""
    for compressor, before in snapshots:
        vars(compressor).clear()
        vars(compressor).update(before)


def known(length: int, bounds: Sequence[int], entries: Selected) -> SparseVector:
    """Return the vector of entries that a kernel selected, and all that it knows of them."""
    vector = SparseVector.trusted(entries.indices, entries.values, length)
    if entries.facts is not None:
        vector.remember(entries.facts, bounds, entries.places)
    return vector


def check_compressor(compressor: Any, name: str = "compressor") -> None:
    """Raise TypeError unless this is a compressor whose settings can be compared; for a class or a function too."""
    check_object(compressor, Compressor, name, "TopK(density=0.01)")


def check_selected(vector: Any, dense: Array, compressor: Compressor) -> None:
    """Raise TypeError or ValueError unless a compressor returned a vector of numbers of the length and dtype it got."""
    if not isinstance(vector, SparseVector):
        raise TypeError(
            f"{compressor!r} returned {type(vector).__name__}: expected a SparseVector"
        )
    if (vector.length, vector.dtype, vector.width) != (dense.size, dense.dtype, None):
        raise ValueError(
            f"{compressor!r} returned {vector!r}: expected {dense.dtype} numbers of length {dense.size}"
        )
