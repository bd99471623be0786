"""What the methods share: arrays that outlive a step, spares that the next step is written to, saving and loading.

Invariant: `correct` writes to spares only, so that a step that fails leaves the arrays as they were, and a second
`correct` gives what the first gave. `keep` lets an array and its spare change places: a step allocates nothing.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import VALUE_DTYPES, beside, kernels_for, namespace, on_device, read_only, to_numpy
from mpicomp.vector import SparseVector

Array = NDArray[Any]
Layout = dict[str, np.dtype[Any]]


def wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of what is added up over many steps: float32 for float16, else `dtype`.

    A velocity in float16 stops short: with momentum 0.99 an addend below half its last place is lost at every step.
    """
    return np.promote_types(dtype, np.float32)


class Kept:
    """Hold the arrays of a method, by name, all of one shape (n,); they start at zero with the first gradient.

    A method tells their dtypes for gradients of a dtype (`_layout`), which of them are in gradient units, and which of
    its attributes are numbers to save.
    """

    _in_gradient_units: tuple[str, ...] = ("residual",)
    _numbers: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}
        self._spares: dict[str, Array] = {}
        self._begun = False  # the arrays hold what a step kept, not just zeros
        self._staged = False  # the spares hold a step that waits for `keep`

    @property
    def residual(self) -> Array | None:
        """What this rank owes, shape (n,): a read-only view that holds until the next call; None before any."""
        return self._view("residual")

    @property
    def size(self) -> int | None:
        """For how many numbers it keeps something; None before any."""
        return math.prod(self._shape()) if self._begun else None

    def result(self, mean: SparseVector, out: Array | None = None) -> Array:
        """Return the mean as a dense vector, shape (n,); `out` where it is given."""
        return mean.to_dense(out)

    def rescale(self, factor: float) -> None:
        """Multiply what is owed in gradient units by `factor`, the old learning rate over the new one.

        What is owed of an update then stays as large as it was. Raises ValueError unless 0 < factor < infinity,
        OverflowError when a value leaves its range.
        """
        if not 0 < factor < math.inf:
            raise ValueError(f"factor is {factor!r}: expected the old learning rate over the new one, a number above 0")
        names = self._in_gradient_units if self._begun else ()
        self._staged = False
        for name in names:
            with np.errstate(over="ignore"):
                scaled = np.multiply(self._arrays[name], float(factor), out=self._spare(name))
            if not np.isfinite(scaled).all():
                raise OverflowError(f"the {name} times {factor} leaves the range of {scaled.dtype}")
        for name in names:
            self._swap(name, self._spares[name])

    def reset(self) -> None:
        """Forget everything kept: its mass is lost, as after a change of the model."""
        self._arrays, self._spares = {}, {}
        self._begun = self._staged = False

    def state_dict(self) -> dict[str, Array]:
        """Return copies of everything kept, by name, in main memory; before the first `keep` just the numbers."""
        arrays = self._arrays if self._begun else {}
        return {name: np.asarray(getattr(self, name)) for name in self._numbers} | {
            name: np.array(to_numpy(array)) for name, array in arrays.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a copy of what `state_dict` returned; see `Feedback`.

        The dtype and shape are those of the calls before, if there were any; `reset` first to change them.
        """
        given = {name: np.asarray(state[name]) for name in state}
        self._check_names(set(given))
        numbers = {name: given.pop(name) for name in self._numbers}
        self._check_numbers(numbers)
        self._check_arrays(given)
        for name, array in [*numbers.items(), *given.items()]:
            if not np.isfinite(array).all():
                raise ValueError(f"{name} has a value that is not finite: expected what state_dict() returned")
        for name, number in numbers.items():
            setattr(self, name, number.item())
        self._arrays, self._spares = {name: array.copy() for name, array in given.items()}, {}
        self._begun, self._staged = bool(given), False

    def _layout(self, dtype: np.dtype[Any]) -> Layout:
        """Return the dtypes of the arrays, by name, for gradients of `dtype`."""
        return {"residual": dtype}

    def _view(self, name: str) -> Array | None:
        if not self._begun:
            return None
        return read_only(self._arrays[name])

    def _stage(self, gradient: Array) -> None:
        """Check a gradient, and make the arrays for the first one."""
        self._arrays = {name: beside(array, gradient) for name, array in self._arrays.items()}
        layout = self._layout(gradient.dtype)
        held = self._layout_held()
        if self._begun and (layout != held or gradient.shape != self._shape()):
            raise ValueError(
                f"the gradient is {_kind(gradient)}: expected {_names_of(self._fitting(held))} of shape "
                f"{self._shape()} as in the calls before; use one {type(self).__name__} for each tensor"
            )
        if not self._begun and (layout != held or gradient.shape != self._shape()):
            if gradient.ndim != 1 or gradient.dtype not in VALUE_DTYPES:
                raise ValueError(f"the gradient is {_kind(gradient)}: expected {_names_of(VALUE_DTYPES)} of shape (n,)")
            xp = namespace(gradient)
            self._arrays = {name: xp.zeros(gradient.shape, dtype) for name, dtype in layout.items()}
            self._spares = {}
        self._staged = True

    def _spare(self, name: str, dtype: np.dtype[Any] | None = None) -> Array:
        """Return the array to write the next `name` to. dtype: for one that is no array of the method."""
        wanted = dtype or self._arrays[name].dtype
        beside_it = next(iter(self._arrays.values()))
        held = self._spares.get(name)
        if held is None or held.dtype != wanted or on_device(held) != on_device(beside_it):
            self._spares[name] = namespace(beside_it).empty(self._shape(), wanted)
        return self._spares[name]

    def _swap(self, name: str, new: Array) -> None:
        """Let an array and its spare change places."""
        self._spares[name], self._arrays[name] = self._arrays[name], new

    def _settle(self, owed: Array, sent: SparseVector, rejected: SparseVector | None, sign: int = -1) -> None:
        """End a step that was staged: subtract from `owed` what was sent, add what came back; the other way if sign=1.

        Raises RuntimeError when no step is staged, ValueError for another length; nothing has changed then.
        """
        if not self._staged:
            raise RuntimeError(
                "keep without correct: call correct before each keep, and nothing that changes the state between"
            )
        for vector in (sent, *([] if rejected is None else [rejected])):
            if vector.length != owed.size:
                raise ValueError(f"got a vector of length {vector.length}: expected {owed.size} as of the gradient")
        kernels = kernels_for(owed)
        kernels.scatter_add(owed, sent.indices, sent.values if sign == 1 else -sent.values)
        if rejected is not None:
            kernels.scatter_add(owed, rejected.indices, -rejected.values if sign == 1 else rejected.values)
        self._begun, self._staged = True, False

    def _shape(self) -> tuple[int, ...]:
        return next((array.shape for array in self._arrays.values()), ())

    def _layout_held(self) -> Layout:
        return {name: array.dtype for name, array in self._arrays.items()}

    def _fitting(self, held: Layout) -> list[np.dtype[Any]]:
        """Return the dtypes of gradients that arrays of these dtypes are for."""
        return [dtype for dtype in VALUE_DTYPES if self._layout(dtype) == held]

    def _check_names(self, given: set[str]) -> None:
        numbers, arrays = set(self._numbers), set(self._layout(VALUE_DTYPES[0]))
        if given not in (numbers, numbers | arrays):
            raise ValueError(
                f"the state has {sorted(given)}: expected {sorted(numbers | arrays)} of {type(self).__name__} with "
                f"these settings, or {sorted(numbers)} of one that has kept nothing"
            )

    def _check_numbers(self, numbers: dict[str, Array]) -> None:
        for name, number in numbers.items():
            expected = np.asarray(getattr(self, name))
            if number.shape != () or number.dtype != expected.dtype:
                raise ValueError(f"{name} is {_kind(number)}: expected {_kind(expected)}")

    def _check_arrays(self, arrays: dict[str, Array]) -> None:
        if not arrays:
            return
        got, held = _kinds(arrays), {name: array.dtype for name, array in arrays.items()}
        if not self._fitting(held):
            fits = " or ".join(str({name: str(kind) for name, kind in self._layout(d).items()}) for d in VALUE_DTYPES)
            raise ValueError(f"the state has {got}: expected {fits}")
        shapes = {array.shape for array in arrays.values()}
        if len(shapes) > 1 or len(*shapes) != 1:
            raise ValueError(f"the state has {got}: expected arrays of one shape (n,)")
        if self._begun and (held != self._layout_held() or shapes != {self._shape()}):
            here = _kinds(self._arrays)
            raise ValueError(f"the state has {got}: expected {here} as in the calls before; reset() first to change it")


def _kind(array: Array) -> str:
    return f"{array.dtype} of shape {array.shape}"


def _names_of(dtypes: Any) -> str:
    return " or ".join(map(str, dtypes))


def _kinds(arrays: dict[str, Array]) -> str:
    return ", ".join(f"{name} {_kind(array)}" for name, array in arrays.items())
