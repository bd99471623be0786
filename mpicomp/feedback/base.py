"""What every feedback method is: the contract, and the arrays that outlive a step.

A step is `compress` (or `correct`), `settle`, `commit`, in this order; a step that fails ends anywhere before `commit`.
All that can fail (memory, arithmetic, checks) is in the first two, which write to spare buffers only: so the arrays are
as before until `commit`, and a second `correct` gives what the first gave. `commit` lets an array and its spare change
places, or writes values that `settle` prepared: it allocates nothing, raises nothing.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import VALUE_DTYPES, beside, kernels_for, namespace, on_device, read_only, to_numpy
from mpicomp.compressors import Compressor
from mpicomp.vector import SparseVector

Array = NDArray[Any]
Layout = dict[str, np.dtype[Any]]
Write = tuple[Array, Array, Array]  # an array, indices, and the values to write there


def wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of what is added up over many steps: float32 for float16, else `dtype`.

    A velocity in float16 stops short: with momentum 0.99 an addend below half its last place is lost at every step.
    """
    return np.promote_types(dtype, np.float32)


class Feedback:
    """Keep what is not sent. Base class of all methods.

    A method implements `correct`, and says by `_layout` which arrays it keeps, all of one shape (n,); they start at
    zero with the first gradient. One object serves one vector of one length and dtype.
    """

    in_place: bool = False  # the gradient's own array holds the residual; see `ErrorFeedback`
    has_dense_result: ClassVar[bool] = False  # `result` is a dense array: there is no sparse mean
    sends_gradients: ClassVar[bool] = True  # what is sent is in gradient units, not an update of the model

    _in_gradient_units: tuple[str, ...] = ("residual",)  # the arrays that `rescale` scales
    _numbers: tuple[str, ...] = ()  # the attributes that are saved beside the arrays

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}
        self._spares: dict[str, Array] = {}
        self._begun = False  # the arrays hold what a step kept, not just zeros
        self._staged = False  # the spares hold a step that waits for `settle`
        self._settled: tuple[str, ...] = ()  # whose spares `commit` takes
        self._writes: list[Write] = []  # what `commit` writes

    def correct(self, gradient: Array) -> Array:
        """Return what is to be compressed: `gradient` (1-d) with what was kept; changes no array that is kept."""
        raise NotImplementedError(f"{type(self).__name__} has no correct(): expected a method of the class")

    def compress(self, gradient: Array, compressor: Compressor) -> tuple[Array, SparseVector]:
        """Return `correct(gradient)`, and what a compressor selects of it; the compressor gets a read-only view."""
        corrected = self.correct(gradient)
        added = self._added(gradient, corrected) if compressor.needs_gradient else gradient
        return corrected, compressor.compress(read_only(corrected), gradient=added)

    def settle(
        self, corrected: Array, sent: SparseVector, rejected: SparseVector | None, mean: SparseVector
    ) -> tuple[SparseVector, ...]:
        """Prepare to keep `corrected` less `sent`, the values that receivers decode, plus `rejected`, what came back.

        corrected: what `correct` or `compress` returned; the feedback may write to it. mean: what the exchange hands
        out, of the dtype of the gradient. Returns, for feedback in place, what is to be added to the gradient's array,
        in this order; else nothing.

        Raises RuntimeError when there was no `correct` before, ValueError for another length, OverflowError where what
        is kept leaves its range.
        """
        raise NotImplementedError(f"{type(self).__name__} has no settle(): expected a method of the class")

    def commit(self) -> None:
        """Keep what `settle` prepared."""
        for array, indices, values in self._writes:
            kernels_for(array).scatter(array, indices, values)
        for name in self._settled:
            self._spares[name], self._arrays[name] = self._arrays[name], self._spares[name]
        self._begun, self._settled, self._writes = True, (), []

    def result(self, mean: SparseVector) -> SparseVector | Array:
        """Return what the exchange hands out, after `commit`: the mean, or a dense array (n,), not to be written to."""
        return mean

    @property
    def averaging_due(self) -> bool:
        """Whether this step ends with an averaging of the ranks' residuals; the same on all ranks."""
        return False

    @property
    def settled_residual(self) -> Array:
        """The residual that `commit` is to keep, in the dtype in which residuals are added up over the ranks."""
        return self._spares["residual"].astype(wide(self._spares["residual"].dtype), copy=False)

    def average(self, mean_residual: Array) -> None:
        """Take the ranks' mean of `settled_residual` in its place; its values are copied. Before `commit`."""
        raise NotImplementedError(f"{type(self).__name__} averages no residuals")

    def ahead(self, x: Any) -> Any:
        """Return where to evaluate the next gradient, for the parameters x: x itself, but for `StepAhead`."""
        return x

    @property
    def residual(self) -> Array | None:
        """The residual, shape (n,): a read-only view, valid until the next call; None before any step."""
        return self._view("residual")

    @property
    def residual_norm(self) -> float:
        """Euclidean norm of the residual, 0 where there is none; one pass over it."""
        residual = self.residual
        if residual is None:
            return 0.0
        kept = residual.astype(wide(residual.dtype), copy=False)  # squares leave the range of float16
        return math.sqrt(float(np.vdot(kept, kept)))

    @property
    def size(self) -> int | None:
        """For how many numbers it keeps something; None before any."""
        return math.prod(self._shape()) if self._begun and self._arrays else None

    def fits(self, size: int, dtype: np.dtype[Any]) -> bool:
        """Return whether what is kept, if anything is, is of gradients of this size and dtype."""
        held = {name: array.dtype for name, array in self._arrays.items()}
        return self.size is None or (self.size == size and self._layout(dtype) == held)

    def rescale(self, factor: float) -> None:
        """Multiply the residual by `factor`, the old learning rate over the new one, where it is in gradient units.

        The residual of an update then stays as large as it was. Raises ValueError unless 0 < factor < infinity,
        OverflowError when a value leaves its range.
        """
        if not 0 < factor < math.inf:
            raise ValueError(f"factor is {factor!r}: expected the old learning rate over the new one, a number above 0")
        names = self._in_gradient_units if self._begun else ()
        self._staged, self._settled = False, ()
        for name in names:
            with np.errstate(over="ignore"):
                scaled = np.multiply(self._arrays[name], float(factor), out=self._spare(name))
            if not np.isfinite(scaled).all():
                raise OverflowError(f"the {name} times {factor} leaves the range of {scaled.dtype}")
        for name in names:
            self._spares[name], self._arrays[name] = self._arrays[name], self._spares[name]

    def reset(self) -> None:
        """Forget everything kept: its mass is lost, as after a change of the model."""
        self._arrays, self._spares = {}, {}
        self._begun, self._staged, self._settled, self._writes = False, False, (), []

    def state_dict(self) -> dict[str, Array]:
        """Return copies of everything kept, by name, in main memory: arrays only, which np.savez can store.

        Numbers are 0-d arrays. Before the first step there are just the numbers. Settings are not in it.
        """
        arrays = self._arrays if self._begun else {}
        return {name: np.asarray(getattr(self, name)) for name in self._numbers} | {
            name: np.array(to_numpy(array)) for name, array in arrays.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a copy of what `state_dict` returned; the steps that follow have the same bits.

        The dtype and shape are those of the calls before, if there were any; `reset` first to change them. Raises
        ValueError for other names, dtypes or shapes, and for what is not finite; nothing changes then.
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
        self._begun, self._staged, self._settled = bool(given), False, ()

    def _added(self, gradient: Array, corrected: Array) -> Array:
        """Return what the step added to the residual, in the units of what is compressed."""
        kept = self.residual
        return corrected if kept is None else corrected - kept

    def _layout(self, dtype: np.dtype[Any]) -> Layout:
        """Return the dtypes of the arrays, by name, for gradients of `dtype`."""
        return {"residual": dtype}

    def _view(self, name: str) -> Array | None:
        return read_only(self._arrays[name]) if self._begun and name in self._arrays else None

    def _stage(self, gradient: Array) -> None:
        """Check a gradient, and make the arrays for the first one."""
        self._settled = ()  # the spares that it is of are written to
        self._arrays = {name: beside(array, gradient) for name, array in self._arrays.items()}
        layout = self._layout(gradient.dtype)
        held = {name: array.dtype for name, array in self._arrays.items()}
        fits = layout == held and (not layout or gradient.shape == self._shape())
        if self._begun and not fits:
            raise ValueError(
                f"the gradient is {_kind(gradient)}: expected {_names_of(self._fitting(held))} of shape "
                f"{self._shape()} as in the calls before; use one {type(self).__name__} for each tensor"
            )
        if not self._begun and not fits:
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

    def _check_staged(self, size: int, *vectors: SparseVector | None) -> None:
        """Raise RuntimeError unless a step is staged, ValueError for a vector of another length; end the stage."""
        if not self._staged:
            raise RuntimeError(
                "settle without correct: call correct before each settle, and nothing that changes the state between"
            )
        for vector in vectors:
            if vector is not None and vector.length != size:
                raise ValueError(f"got a vector of length {vector.length}: expected {size} as of the gradient")
        self._staged, self._writes = False, []

    def _subtract(self, corrected: Array, sent: SparseVector, rejected: SparseVector | None) -> None:
        """Make of a spare what is kept: less what was sent, plus what came back."""
        self._check_staged(corrected.size, sent, rejected)
        kernels = kernels_for(corrected)
        kernels.scatter_add(corrected, sent.indices, -sent.values)
        if rejected is not None:
            kernels.scatter_add(corrected, rejected.indices, rejected.values)
            check_range(kernels.gather(corrected, rejected.indices), "residual")

    def _shape(self) -> tuple[int, ...]:
        return next((array.shape for array in self._arrays.values()), ())

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
        here = {name: array.dtype for name, array in self._arrays.items()}
        if self._begun and (held != here or shapes != {self._shape()}):
            raise ValueError(
                f"the state has {got}: expected {_kinds(self._arrays)} as in the calls before; reset() first to "
                "change it"
            )


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
            f"{compressor!r} looks at the new gradient alone, which in_place=True mixes with the residual: expected "
            "ErrorFeedback()"
        )


def check_range(values: Array, what: str) -> None:
    """Raise OverflowError where a value that is to be kept is not finite."""
    try:
        kernels_for(values).raise_not_finite(values)
    except ValueError:
        remedy = "scale the gradients down, or use float32"
        raise OverflowError(f"the {what} leaves the range of {values.dtype}: {remedy}") from None


def _kind(array: Array) -> str:
    return f"{array.dtype} of shape {array.shape}"


def _names_of(dtypes: Any) -> str:
    return " or ".join(map(str, dtypes))


def _kinds(arrays: dict[str, Array]) -> str:
    return ", ".join(f"{name} {_kind(array)}" for name, array in arrays.items())
