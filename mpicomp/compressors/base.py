"""The contract of a compressor: the selection, its properties for an exchange, and its state between steps.

docs/own_compressor.md says what one of your own implements, with an example.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from mpicomp.arrays import Array, kernels_for, read_only, to_numpy
from mpicomp.settings import Configured
from mpicomp.vector import SparseVector, concatenate

# a vector, its factor, and the parts of another vector
Summands = tuple[Array, float, Sequence[Array]]

Snapshot = tuple["Compressor", dict[str, Any]]  # of the attributes

Check = Callable[[Any, Array | None], Any]
"""Return the value of an attribute from a loaded array: check(compressor, array), where None means that it is missing.

Raises ValueError with a text that says what was expected, such as "an integer of at least 0".
"""


@dataclass(frozen=True)
class Report:
    """Statistics of a call of a compressor.

    target, achieved: densities. nbytes: of the returned indices and values in memory.
    threshold: of the magnitude, None for methods without one. rounds: of its search.
    """

    target: float
    achieved: float
    nbytes: int
    threshold: float | None = None
    rounds: int = 1


class Compressor(Configured):
    """Select the entries of a dense vector that are sent.

    Store every constructor argument in an attribute of the same name: `repr` shows
    them, and ranks compare settings by it. Assign new values to attributes, and change
    no list or array in place: `snapshot` stores references.
    """

    state: ClassVar[Mapping[str, Check]] = {}
    """Attributes to save, each with the check of a loaded value; an attribute that is None is not saved."""

    density: float | None = None
    """The fraction of the entries to select, for compressors that take one; `WarmUp` changes it."""

    report: Report | None = None
    """Statistics of the last call; None before any."""

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the selected entries of `corrected`, the gradient with the residual added.

        corrected: an array of any shape, taken in C order; float16, float32 or float64.
        It may be read-only: do not write to it. gradient: what the step added to the
        residual; None if it is not available.

        Returns no exact zero of `corrected`, and at least one entry if any is not zero
        (`common.at_positions`). Raises ValueError naming the first value of `corrected`
        that is not finite, also one that is not selected (`common.finite_vector`); the
        compressor does not change then.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no compress(corrected, *, gradient=None)"
        )

    def compress_segments(
        self,
        corrected: Array,
        bounds: Sequence[int],
        *,
        summands: Summands | None = None,
    ) -> SparseVector:
        """Return the entries that `compress` selects in each segment of a vector, as one vector.

        corrected: 1-d, C-contiguous. bounds: the first position of each segment, and
        the length of the vector. summands: (residual, scale, parts); `corrected` is
        first overwritten by ``scale * residual`` plus the parts, one gradient for each
        segment. A compressor with a kernel that adds and selects in one pass, or in all
        segments at once, implements this method: one object then serves all segments
        with equal settings that follow each other, otherwise each has its own.

        Raises the errors of `compress`; `corrected` is written in any case.
        """
        spans = [slice(*span) for span in pairwise(bounds)]
        parts: Sequence[Array | None] = [None] * len(spans)
        if summands is not None:
            write_sum(summands, corrected)
            parts = summands[2]
        pairs = zip(spans, parts, strict=True)
        return concatenate(
            [
                self.compress(read_only(corrected[span]), gradient=part)
                for span, part in pairs
            ]
        )

    @staticmethod
    def compress_each(
        compressors: Sequence[Any],
        corrected: Array,
        bounds: Sequence[int],
        *,
        summands: Summands | None = None,
    ) -> SparseVector:
        """Return the entries that compressors of this class select, each in its segment, as one vector.

        compressors: one for each segment, joined by `is_joined_with`. The others as for
        `compress_segments`. Implemented by a class whose state is that of one segment,
        and which has a kernel for several.
        """
        raise NotImplementedError(
            "this compressor has no compress_each(compressors, corrected, bounds)"
        )

    def is_joined_with(self, other: "Compressor") -> bool:
        """Return whether one call serves a segment of this compressor and one of another: if settings are equal."""
        return repr(self) == repr(other)

    def share(self, length: int) -> float | None:
        """Return the target density for a vector of `length`; None without one."""
        return None

    def reported(
        self,
        vector: SparseVector,
        threshold: float | None = None,
        rounds: int = 1,
        target: float | None = None,
    ) -> SparseVector:
        """Set `report` to the statistics of a call, and return its vector. target: None for that of `share`."""
        achieved, asked = (
            vector.density,
            self.share(vector.length) if target is None else target,
        )
        self.report = Report(
            achieved if asked is None else asked,
            achieved,
            vector.nbytes,
            threshold,
            rounds,
        )
        return vector

    def observe(self, aggregate: SparseVector, votes: Array | None = None) -> None:
        """Receive the mean over the ranks, the same on every rank, once a step; by default do nothing.

        aggregate: copy what you keep, as the caller receives its arrays. votes: for
        each entry the fraction of the ranks that sent it, 0 to 1, if the collective
        returns votes.
        """

    def chain(self) -> list["Compressor"]:
        """Return this compressor and the ones it wraps, the innermost last."""
        return [self]

    def snapshot(self) -> list[Snapshot]:
        """Return the attributes of the chain, which are set again after a step that failed."""
        return [(part, dict(vars(part))) for part in self.chain()]

    def reset(self) -> None:
        """Clear the stored information about single positions, in the whole chain. For a model that was replaced."""

    def state_dict(self) -> dict[str, Array]:
        """Return copies of the state of the chain, without settings: arrays in host memory by "depth.attribute"."""
        return {
            key: np.array(to_numpy(getattr(part, name)))
            for key, (part, name) in self._state_keys().items()
            if getattr(part, name) is not None
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict` of a compressor with these settings.

        Raises ValueError for keys that are unknown or missing, and for values of a
        shape, kind or range that this compressor cannot have; nothing changes then.
        """
        known = self._state_keys()
        if not state.keys() <= known.keys():
            raise ValueError(
                f"the state has {sorted(state)}: expected {sorted(known)} at most, of {self!r}"
            )
        values = []
        for key, (part, name) in known.items():
            array = np.asarray(to_numpy(state[key])) if key in state else None
            try:
                values.append(part.state[name](part, array))
            except ValueError as error:
                got = "nothing" if array is None else repr(state[key])
                if array is not None and array.size != 1:
                    got = f"{array.dtype} of shape {array.shape}"
                raise ValueError(
                    f"the state has {got} as {key}: expected {error}"
                ) from None
        for (part, name), value in zip(known.values(), values, strict=True):
            setattr(part, name, value)

    def _state_keys(self) -> dict[str, tuple["Compressor", str]]:
        return {
            f"{depth}.{name}": (part, name)
            for depth, part in enumerate(self.chain())
            for name in part.state
        }


class Wrapper(Compressor):
    """Base of compressors that wrap another one.

    compressor: the inner one, else TypeError.
    """

    def __init__(self, compressor: Compressor) -> None:
        check_compressor(compressor)
        self.compressor = compressor

    def observe(self, aggregate: SparseVector, votes: Array | None = None) -> None:
        self.compressor.observe(aggregate, votes)

    def chain(self) -> list[Compressor]:
        return [self, *self.compressor.chain()]

    def reset(self) -> None:
        self.compressor.reset()


@contextmanager
def set_back(snapshots: Sequence[Snapshot]) -> Iterator[None]:
    """Set compressors to their snapshots within a block; the last snapshot of a compressor counts."""
    now = [(compressor, dict(vars(compressor))) for compressor, _ in snapshots]
    restore(snapshots)
    try:
        yield
    finally:
        restore(now)


def restore(snapshots: Sequence[Snapshot]) -> None:
    """Set the attributes of compressors to those of snapshots, in order."""
    for compressor, before in snapshots:
        vars(compressor).clear()
        vars(compressor).update(before)


def write_sum(summands: Summands, out: Array) -> None:
    """Write scale * vector + parts to `out`, where the parts of the second summand follow each other."""
    kernels_for(out).add_parts(*summands, out)


def check_compressor(compressor: Any, name: str = "compressor") -> None:
    """Raise TypeError unless this is a compressor; for a class or a function with the remedy."""
    if isinstance(compressor, Compressor):
        return
    if isinstance(compressor, type) and issubclass(compressor, Compressor):
        got, remedy = (
            f"the class {compressor.__name__}",
            f"an object of it, such as {compressor.__name__}(...)",
        )
    elif callable(compressor):
        got = f"the function {compressor!r}"
        remedy = "an object of a class that derives from mpicomp.Compressor and has the function as its method compress"
    else:
        got, remedy = repr(compressor), "a compressor such as TopK(density=0.01)"
    raise TypeError(f"{name} is {got}: expected {remedy}")


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


def expect_integer(least: int, most: int = 2**62) -> Check:
    """Return the check of an integer from `least` to `most`, for `Compressor.state`."""
    return _expect(int, "iu", "an integer", least, most)


def expect_number(least: float, most: float) -> Check:
    """Return the check of a finite number from `least` to `most`, for `Compressor.state`."""
    return _expect(float, "iuf", "a finite number", least, most)


def _expect(convert: type, kinds: str, text: str, least: float, most: float) -> Check:
    def check(compressor: Any, array: Array | None) -> Any:
        sound = (
            array is not None
            and not array.shape
            and array.dtype.kind in kinds
            and least <= array.item() <= most
        )
        if array is None or not sound or not math.isfinite(array.item()):
            raise ValueError(f"{text} from {least} to {most}")
        return convert(array)

    return check
