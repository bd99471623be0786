"""The contract of a compressor: what it selects, what an exchange asks of it, and the state that outlives a step.

A compressor of your own derives from `Compressor` and writes `compress`; everything else has a default. One that works
on what another one selects derives from `Wrapper`. docs/compressors.md has an example.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import kernels_for, read_only, to_numpy
from mpicomp.vector import SparseVector

Array = NDArray[Any]
Check = Callable[[Any, Array | None], Any]
"""Turn a loaded array into the value of an attribute: check(compressor, array), where None means that it is missing.

Raises ValueError whose text says what was expected, such as "an integer of at least 0".
"""
Snapshot = list[tuple["Compressor", dict[str, Any]]]

MOST_STEPS = 2**62


@dataclass(frozen=True)
class Report:
    """What the last call did.

    target, achieved: densities. threshold: of the magnitude, None where the method has none. rounds: of its search.
    nbytes: of the indices and values that it returned, as they are in memory (a message may be smaller:
    `mpicomp.codec.encoded_nbytes`).
    """

    target: float
    achieved: float
    nbytes: int
    threshold: float | None = None
    rounds: int = 1


class Compressor:
    """Pick the entries of a dense vector that are sent.

    Store every constructor argument in an attribute of the same name: `repr` shows them, and ranks compare settings by
    it. Assign new values to attributes instead of changing lists or arrays in place: `snapshot` keeps the attributes,
    not copies of their contents.
    """

    state: ClassVar[Mapping[str, Check]] = {}
    """Attributes that outlive a step, each with the check of a loaded value; an attribute that is None is not saved."""

    needs_gradient: bool = False
    """Whether `compress` requires `gradient`: what the step added to the residual."""

    observes: bool = False
    """Whether `observe` is to be called with the ranks' mean."""

    communicates: bool = False
    """Whether `compress` is a collective call: all ranks call it, and it raises on all of them or on none."""

    density: float | None = None
    """The fraction of the entries to select, for compressors that take one; `WarmUp` changes it."""

    report: Report | None = None
    """What the last call did; None before any."""

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the selected entries of `corrected`, the gradient with the residual added.

        corrected: an array of any shape, taken in C order; float16, float32 or float64. It may be read-only: do not
        write to it. gradient: what the step added to the residual, in the units of the feedback, for compressors that
        set `needs_gradient`. An exact zero is not selected, unless positions are chosen without looking at the values.

        Raises ValueError naming the first value that is not finite; the compressor is then as it was before.
        """
        raise NotImplementedError(f"{type(self).__name__} has no compress(corrected, *, gradient=None)")

    def compress_sum(self, residual: Array, gradient: Array, out: Array) -> SparseVector:
        """Write residual + gradient to `out` and compress it; methods with a fused kernel do both in one pass.

        residual, gradient, out: 1-d, C-contiguous, of one length and dtype; `out` shares no memory with the others.
        Raises what `compress` does; `out` is written in any case.
        """
        kernels_for(out).add(residual, gradient, out)
        return self.compress(read_only(out), gradient=gradient)

    def observe(self, aggregate: SparseVector, votes: Array | None = None) -> None:
        """Take note of the ranks' mean, the same on every rank; called once a step where `observes` is set.

        votes: for each entry the fraction of the ranks that sent it, 0 to 1, where the collective returns votes.
        """

    def chain(self) -> list["Compressor"]:
        """Return this compressor and those that it wraps, the innermost last."""
        return [self]

    def snapshot(self) -> Snapshot:
        """Return the attributes of the chain as they are; `restore` sets them again after a step that failed."""
        return [(part, dict(vars(part))) for part in self.chain()]

    def restore(self, snapshot: Snapshot) -> None:
        """Set the attributes of the chain to those of a snapshot."""
        for part, before in snapshot:
            vars(part).clear()
            vars(part).update(before)

    def reset(self) -> None:
        """Forget what is known of single positions, in the whole chain, as after a change of the model."""

    def state_dict(self) -> dict[str, Array]:
        """Return copies of the state of the chain, without settings: arrays in main memory by "depth.attribute"."""
        return {
            key: np.array(to_numpy(getattr(part, name)))
            for key, (part, name) in self._state_keys().items()
            if getattr(part, name) is not None
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned on a compressor with these settings.

        Raises ValueError when a key is unknown or missing, or when a value has another shape, kind or range than this
        compressor's; nothing has changed then.
        """
        known = self._state_keys()
        if not state.keys() <= known.keys():
            raise ValueError(f"the state has {sorted(state)}: expected {sorted(known)} at most, of {self!r}")
        values = {key: _checked(key, part.state[name], part, state) for key, (part, name) in known.items()}
        for key, (part, name) in known.items():
            setattr(part, name, values[key])

    def _state_keys(self) -> dict[str, tuple["Compressor", str]]:
        """Return the compressor and the attribute that each key of a state is for."""
        return {f"{depth}.{name}": (part, name) for depth, part in enumerate(self.chain()) for name in part.state}

    def _settings(self) -> dict[str, Any]:
        """Return the constructor's arguments by name."""
        variadic = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
        parameters = signature(type(self)).parameters.values()
        return {each.name: getattr(self, each.name, "?") for each in parameters if each.kind not in variadic}

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._settings().items() if value is not None)
        return f"{type(self).__name__}({shown})"


class Wrapper(Compressor):
    """Base of compressors that work on what another one selects.

    compressor: the inner one; TypeError when it is none. Whether gradients are needed, means are observed, or ranks
    communicate is as for the inner one.
    """

    def __init__(self, compressor: Compressor) -> None:
        check_compressor(compressor)
        self.compressor = compressor
        self.needs_gradient, self.observes = compressor.needs_gradient, compressor.observes
        self.communicates = compressor.communicates

    def observe(self, aggregate: SparseVector, votes: Array | None = None) -> None:
        """See `Compressor.observe`; the inner compressor is given both."""
        self.compressor.observe(aggregate, votes)

    def chain(self) -> list[Compressor]:
        """See `Compressor.chain`."""
        return [self, *self.compressor.chain()]

    def reset(self) -> None:
        """See `Compressor.reset`."""
        self.compressor.reset()


def check_compressor(compressor: Any, name: str = "compressor") -> None:
    """Raise TypeError unless this is a compressor; the text says how to make one of a class or a function."""
    if isinstance(compressor, Compressor):
        return
    if isinstance(compressor, type) and issubclass(compressor, Compressor):
        got, remedy = f"the class {compressor.__name__}", f"an object of it, such as {compressor.__name__}(...)"
    elif callable(compressor):
        got = f"the function {compressor!r}"
        remedy = "an object of a class that derives from mpicomp.Compressor and has the function as its method compress"
    else:
        got, remedy = repr(compressor), "a compressor such as TopK(density=0.01)"
    raise TypeError(f"{name} is {got}: expected {remedy}")


def check_selected(vector: Any, dense: Array, compressor: Compressor) -> None:
    """Raise TypeError or ValueError unless a compressor returned a vector of numbers of the length and dtype it got."""
    if not isinstance(vector, SparseVector):
        raise TypeError(f"{compressor!r} returned {type(vector).__name__}: expected a SparseVector")
    if (vector.length, vector.dtype, vector.width) != (dense.size, dense.dtype, None):
        raise ValueError(f"{compressor!r} returned {vector!r}: expected {dense.dtype} numbers of length {dense.size}")


def expect_integer(least: int, most: int = MOST_STEPS) -> Check:
    """Return the check of an integer from `least` to `most`, for `Compressor.state`."""

    def check(compressor: Any, array: Array | None) -> int:
        if array is None or array.shape or array.dtype.kind not in "iu" or not least <= array.item() <= most:
            raise ValueError(f"an integer from {least} to {most}")
        return int(array)

    return check


def expect_number(least: float, most: float) -> Check:
    """Return the check of a finite number from `least` to `most`, for `Compressor.state`."""

    def check(compressor: Any, array: Array | None) -> float:
        sound = array is not None and not array.shape and array.dtype.kind in "iuf" and least <= array.item() <= most
        if array is None or not sound or not math.isfinite(array.item()):
            raise ValueError(f"a finite number from {least} to {most}")
        return float(array)

    return check


def _checked(key: str, check: Check, part: Compressor, state: Mapping[str, Any]) -> Any:
    """Return the value that an attribute gets from a state; ValueError naming what is wrong with it."""
    array = np.asarray(to_numpy(state[key])) if key in state else None
    try:
        return check(part, array)
    except ValueError as error:
        got = f"{array.dtype} of shape {array.shape}" if array is not None and array.size != 1 else repr(state.get(key))
        raise ValueError(f"the state has {'nothing' if array is None else got} as {key}: expected {error}") from None
