"""The contract of a feedback method, and the arrays that outlive a step.

A step calls `compress` (or `correct`), `settle` and `commit`, in this order; a step that fails ends anywhere before
`commit`. Everything that can fail (memory, arithmetic, checks) is in the first two, which write to spare buffers only:
the arrays do not change before `commit`, and a second `correct` returns the same result. `commit` swaps arrays with
their spares: it allocates nothing and raises nothing.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from mpicomp.arrays import (
    VALUE_DTYPES,
    Array,
    beside,
    kernels_for,
    namespace,
    new_vector,
    on_device,
    read_only,
    to_numpy,
)
from mpicomp.compressors import Compressor
from mpicomp.settings import Configured, refuse_bools
from mpicomp.vector import SparseVector

Added = tuple[SparseVector, ...]  # vectors to add to the gradient's own array, in this order
Layout = dict[str, np.dtype[Any]]


def wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype for values that are accumulated over many steps: float32 for float16, else `dtype`.

    A velocity in float16 stops short of its limit: with momentum 0.99, addends below half its last place are lost.
    """
    return np.promote_types(dtype, np.float32)


class Feedback(Configured):
    """Base class of all feedback methods: keep the entries that are not sent.

    A method implements `correct`, `settle` and `_layout`, which returns the dtypes of the arrays it keeps, all of shape
    (n,); they are zero before the first gradient. One object serves one vector of one length and dtype. Constructor
    arguments are stored in attributes of the same name: `repr` shows them, and saved states are compared by it.
    """

    in_place: bool = False  # the gradient's own array holds the residual; see `ErrorFeedback`
    sends_gradients: ClassVar[bool] = True  # the residual is in gradient units, not in those of an update of the model

    takes_parts: bool = (
        False  # `correct` and `compress` also accept a list of arrays, the consecutive parts of a gradient
    )
    bounds: Sequence[int] | None = None  # the first position of each segment, and the length; None for one segment

    _numbers: tuple[str, ...] = ()  # the attributes that are saved beside the arrays, the same on all ranks

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}
        self._spares: dict[str, Array] = {}
        self._begun = False  # a step was kept: the arrays are not just zeros
        self._staged = False  # `correct` was called, and `settle` was not
        self._settled: tuple[str, ...] = ()  # the arrays that `commit` swaps with their spares

    def correct(self, gradient: Array) -> Array:
        """Return the vector to compress: `gradient` (1-d) plus the residual; changes no array that is kept."""
        raise NotImplementedError(f"{type(self).__name__} has no correct(): expected a method of the class")

    def compress(self, gradient: Array, compressor: Compressor) -> tuple[Array, SparseVector]:
        """Return `correct(gradient)` and the entries that a compressor selects from a read-only view of it."""
        corrected, added = self.correct(gradient), gradient
        if compressor.needs_gradient:
            kept = self.residual
            added = corrected if kept is None else corrected - kept
        return corrected, compressor.compress(read_only(corrected), gradient=added)

    def settle(self, corrected: Array, sent: SparseVector, rejected: SparseVector | None, mean: SparseVector) -> Added:
        """Prepare to keep `corrected` less `sent`, the values that receivers decode, plus `rejected`.

        corrected: the result of `correct` or `compress`; the feedback may write to it. mean: the result of the
        exchange, of the dtype of the gradient. Returns, for feedback in place, the vectors to add to the gradient's
        array, in this order; else nothing.

        Raises RuntimeError without a `correct` before, ValueError for another length, OverflowError if the result
        leaves the range of its dtype.
        """
        raise NotImplementedError(f"{type(self).__name__} has no settle(): expected a method of the class")

    def commit(self) -> None:
        """Swap in the arrays that `settle` prepared."""
        for name in self._settled:
            self._spares[name], self._arrays[name] = self._arrays[name], self._spares[name]
        self._begun, self._settled = True, ()

    @property
    def averaging_due(self) -> bool:
        """Whether this step ends by averaging the residuals over the ranks; the same on all ranks."""
        return False

    @property
    def settled_residual(self) -> Array:
        """The residual that `commit` would keep, in the dtype in which residuals are summed over the ranks."""
        return self._spares["residual"].astype(wide(self._spares["residual"].dtype), copy=False)

    def average(self, mean_residual: Array) -> None:
        """Replace `settled_residual` by a copy of its mean over the ranks; called before `commit`."""
        raise NotImplementedError(f"{type(self).__name__} averages no residuals")

    def ahead(self, x: Any) -> Any:
        """Return the point at which to evaluate the next gradient, for parameters x: x, except in `StepAhead`."""
        return x

    @property
    def residual(self) -> Array | None:
        """The residual, shape (n,): a read-only view, valid until the next call; None before the first step."""
        return self._view("residual")

    @property
    def residual_norm(self) -> float:
        """Euclidean norm of the residual, 0 without one; one pass over it."""
        residual = self.residual
        if residual is None:
            return 0.0
        kept = residual.astype(wide(residual.dtype), copy=False)  # squares leave the range of float16
        return math.sqrt(float(np.vdot(kept, kept)))

    @property
    def size(self) -> int | None:
        """Length of the arrays; None before the first step, or without arrays."""
        return next((array.size for array in self._arrays.values()), None) if self._begun else None

    def fits(self, size: int, dtype: np.dtype[Any]) -> bool:
        """Return whether the arrays, if there are any, are those for gradients of this size and dtype."""
        return self.size is None or self._is_for((size,), dtype)

    def rescale(self, factor: float) -> None:
        """Multiply the residual by `factor`, the old learning rate over the new one, if it is in gradient units.

        The update from the residual then keeps its size. Raises ValueError unless 0 < factor < infinity, OverflowError
        if a value leaves its range.
        """
        refuse_bools(factor=factor)
        if not 0 < factor < math.inf:
            raise ValueError(f"factor is {factor!r}: expected the old learning rate over the new one, a number above 0")
        self._staged, self._settled = False, ()
        if not (self._begun and self.sends_gradients and "residual" in self._arrays):
            return
        residual, scaled = self._arrays["residual"], self._spare("residual")
        with np.errstate(over="ignore"):
            np.multiply(residual, float(factor), out=scaled)
        if not np.isfinite(scaled).all():
            raise OverflowError(f"the residual times {factor} leaves the range of {scaled.dtype}")
        self._arrays["residual"], self._spares["residual"] = scaled, residual

    def reset(self) -> None:
        """Clear the state; the mass of the residual is lost. For a model that was replaced."""
        self._arrays, self._spares = {}, {}
        self._begun, self._staged, self._settled = False, False, ()

    def state_dict(self) -> dict[str, Array]:
        """Return copies of the state by name: arrays in host memory, which np.savez can store.

        Numbers are 0-d arrays. Before the first step there are only numbers. Settings are not included.
        """
        arrays = self._arrays if self._begun else {}
        return {name: np.asarray(getattr(self, name)) for name in self._numbers} | {
            name: np.array(to_numpy(array)) for name, array in arrays.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load copies of a `state_dict`; the following steps have the same bits.

        Dtype and shape must be those of earlier calls, if any; call `reset` first to change them. Raises ValueError for
        other names, dtypes or shapes, and for values that are not finite; nothing changes then.
        """
        given = {name: np.asarray(state[name]) for name in state}
        numbers = {name: given.pop(name) for name in self._numbers if name in given}
        names = set(self._layout(VALUE_DTYPES[0]))
        if len(numbers) < len(self._numbers) or set(given) not in (set(), names):
            raise ValueError(
                f"the state has {sorted(state)}: expected {sorted({*self._numbers, *names})} of {type(self).__name__} "
                f"with these settings, or {sorted(self._numbers)} of one before its first step"
            )
        for name, number in numbers.items():
            expected = np.asarray(getattr(self, name))
            if number.shape != () or number.dtype != expected.dtype:
                raise ValueError(f"{name} is {_kind(number)}: expected {_kind(expected)}")
        got = ", ".join(f"{name} {_kind(array)}" for name, array in given.items())
        if given and not self._dtypes_for(given):
            fits = " or ".join(str({name: str(kind) for name, kind in self._layout(d).items()}) for d in VALUE_DTYPES)
            raise ValueError(f"the state has {got}: expected {fits}")
        if any(array.ndim != 1 for array in given.values()) or len({array.size for array in given.values()}) > 1:
            raise ValueError(f"the state has {got}: expected arrays of one shape (n,)")
        held = self._arrays if self._begun and given else {}
        if any(_kind(array) != _kind(given[name]) for name, array in held.items()):
            kinds = ", ".join(f"{name} {_kind(array)}" for name, array in held.items())
            raise ValueError(
                f"the state has {got}: expected {kinds} as in the calls before; reset() first to change it"
            )
        for name, array in [*numbers.items(), *given.items()]:
            if not np.isfinite(array).all():
                raise ValueError(f"{name} has a value that is not finite: expected what state_dict() returned")
        for name, number in numbers.items():
            setattr(self, name, number.item())
        self._arrays, self._spares = {name: new_vector(np, each.size, each.dtype) for name, each in given.items()}, {}
        for name, array in given.items():
            self._arrays[name][:] = array
        self._begun, self._staged, self._settled = bool(given), False, ()

    def _layout(self, dtype: np.dtype[Any]) -> Layout:
        """Return the dtypes of the arrays, by name, for gradients of `dtype`."""
        return {"residual": dtype}

    def _view(self, name: str) -> Array | None:
        return read_only(self._arrays[name]) if self._begun and name in self._arrays else None

    def _stage(self, gradient: Array | list[Array]) -> None:
        """Check a gradient, or the parts of one, and allocate the arrays before the first step."""
        if isinstance(gradient, list):
            first, shape = gradient[0], (sum(part.size for part in gradient),)
        else:
            first, shape = gradient, gradient.shape
        self._settled = ()  # the spares are overwritten
        self._arrays = {name: beside(array, first) for name, array in self._arrays.items()}
        if self._is_for(shape, first.dtype):
            self._staged = True
            return
        got = f"{first.dtype} of shape {shape}"
        if self._begun:
            raise ValueError(
                f"the gradient is {got}: expected {' or '.join(self._dtypes_for(self._arrays))} of shape "
                f"({self.size},) as in the calls before; use one {type(self).__name__} for each tensor"
            )
        if len(shape) != 1 or first.dtype not in VALUE_DTYPES:
            expected = " or ".join(map(str, VALUE_DTYPES))
            raise ValueError(f"the gradient is {got}: expected {expected} of shape (n,)")
        xp, layout = namespace(first), self._layout(first.dtype)
        self._arrays = {name: new_vector(xp, *shape, dtype) for name, dtype in layout.items()}
        self._spares, self._staged = {}, True

    def _spare(self, name: str) -> Array:
        """Return the buffer for the next `name`."""
        array, held = self._arrays[name], self._spares.get(name)
        if held is None or on_device(held) != on_device(array):
            self._spares[name] = new_vector(namespace(array), array.size, array.dtype)
        return self._spares[name]

    def _check_staged(self, size: int, *vectors: SparseVector | None) -> None:
        """Raise RuntimeError unless `correct` was called, ValueError for a vector of another length."""
        if not self._staged:
            raise RuntimeError(
                "settle without correct: call correct before each settle, and nothing that changes the state between"
            )
        for vector in vectors:
            if vector is not None and vector.length != size:
                raise ValueError(f"got a vector of length {vector.length}: expected {size} as of the gradient")
        self._staged = False

    def _subtract(self, corrected: Array, sent: SparseVector, rejected: SparseVector | None) -> None:
        """Turn `corrected`, the spare residual, into the new one: subtract `sent` and add `rejected`."""
        self._check_staged(corrected.size, sent, rejected)
        kernels = kernels_for(corrected)
        kernels.scatter_add(corrected, sent.indices, -sent.values)
        if rejected is not None:
            kernels.scatter_add(corrected, rejected.indices, rejected.values)
            check_range(kernels.gather(corrected, rejected.indices), "residual")

    def _is_for(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
        """Return whether the arrays are those for gradients of this shape and dtype."""
        held = {name: (array.dtype, array.shape) for name, array in self._arrays.items()}
        return held == {name: (kind, shape) for name, kind in self._layout(dtype).items()}

    def _dtypes_for(self, arrays: Mapping[str, Array]) -> list[str]:
        """Return the dtypes of gradients for which arrays of these dtypes are kept."""
        held = {name: array.dtype for name, array in arrays.items()}
        return [str(dtype) for dtype in VALUE_DTYPES if self._layout(dtype) == held]


def check_feedback(feedback: Any, compressor: Compressor) -> None:
    """Raise TypeError unless this is a feedback that works with a compressor."""
    if not isinstance(feedback, Feedback):
        got = f"the class {feedback.__name__}" if isinstance(feedback, type) else repr(feedback)
        raise TypeError(
            f"feedback is {got}: expected an object such as ErrorFeedback() or NoFeedback(), or of a class of your own "
            "that derives from mpicomp.Feedback"
        )
    if feedback.in_place and compressor.needs_gradient:
        raise TypeError(
            f"{compressor!r} needs the new gradient without the residual, which in_place=True adds to it: expected "
            "ErrorFeedback()"
        )


def check_range(values: Array | SparseVector, what: str) -> None:
    """Raise OverflowError if a value is not finite. what: of the values, in the error."""
    try:
        if isinstance(values, SparseVector):
            values.check_finite()
        else:
            kernels_for(values).raise_not_finite(values)
    except ValueError:
        remedy = "scale the gradients down, or use float32"
        raise OverflowError(f"the {what} leaves the range of {values.dtype}: {remedy}") from None


def _kind(array: Array) -> str:
    return f"{array.dtype} of shape {array.shape}"
