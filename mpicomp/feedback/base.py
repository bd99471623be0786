"""The contract of a feedback method, and the arrays that outlive a step.

A step calls `correct` and `prepare_residual`, which returns a `Write`, and calls that if
it is kept. Everything that can fail is in the first two, which write to spare buffers
only, so a second `correct` returns the same result. The write swaps arrays with their
spares: it allocates nothing and raises nothing.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np

from mpicomp.arrays import Array, ByName, Dtype, Write
from mpicomp.arrays.device import kernels_for, namespace, on_device, to_device_of
from mpicomp.arrays.memory import (
    adjacent,
    concatenated,
    new_vector,
    read_only,
    sizes_of,
    views_between,
)
from mpicomp.arrays.values import VALUE_DTYPES
from mpicomp.bases import Basis, coefficients_of
from mpicomp.correction import Correction
from mpicomp.settings import to_number
from mpicomp.state import POSITIONS, Configured, Range, kind_of_array
from mpicomp.vector import SparseVector, check_range, from_all_values

Dtypes = dict[str, Dtype]


def accumulation_dtype(dtype: Dtype) -> Dtype:
    """Return the dtype for values accumulated over many steps: float32 for float16, whose sums lose small addends."""
    return np.promote_types(dtype, np.float32)


class Feedback(Configured):
    """Base class of all feedback methods: keep the entries that are not sent.

    A method implements `correct`, and `dtypes` if it keeps other arrays than the residual
    (docs/contributing/own_compressor.md has an example). One object serves one vector of
    one length and dtype. Constructor arguments are stored in attributes of the same
    name: `repr` shows them, and saved states are compared by it. A method calls

    * in `__init__`: ``super().__init__()``, before anything else;
    * in `correct`: `_stage`, which checks the gradient, allocates the arrays, of zeros,
      and returns the gradient's parts; `_joined` for these as one vector;
      `_spare(name)` for the buffer of the next `name`, which it fills for each array.
      It returns `_corrected` of the spare residual.
    """

    has_gradient_units: ClassVar[bool] = True
    """Whether the residual is an array of its own, in gradient units: in a basis it has coefficients."""

    _arrays: dict[str, Array]
    _spares: dict[str, Array]
    # Length and dtype of the gradients that the arrays are for.
    _kind: tuple[int, Dtype] | None
    # Whether a step was kept; before the first one the arrays are zeros.
    _begun: bool
    # Whether `correct` was called, and `prepare_residual` was not yet.
    _staged: bool

    def __init__(self) -> None:
        # The sizes of the segments of the staged gradient; their first positions, and
        # its length.
        self._sizes: tuple[int, ...] = ()
        self._bounds: list[int] = [0]
        self.reset()

    def correct(self, *gradient: Array, basis: Basis | None = None) -> Correction:
        """Return what may be sent, the gradient plus the residual; change no array that is kept.

        Args:
            gradient: its consecutive parts, one for each segment, of shape (n,); float16,
                float32 or float64, as in the calls before.
            basis: in which the residual is kept; None for the values.

        Returns:
            A Correction of the length and dtype of the gradient.

        Raises:
            ValueError: the gradient has another length or dtype than those before.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no correct(): expected a method of the class"
        )

    def prepare_residual(
        self,
        correction: Correction,
        sent: SparseVector,
        rejected: SparseVector | None = None,
    ) -> Write:
        """Prepare to keep the correction less `sent`, the values that receivers decode, plus `rejected`.

        A method that forgets old entries does so in `correct`, as `ErrorFeedback(decay=...)`
        does.

        Args:
            correction: that of the last `correct`, added. This method turns its buffer, the
                spare residual, into the next residual.
            sent: the entries that this rank contributed, of the length of the gradient.
            rejected: entries that the collective did not send, of the same length; or None.

        Returns:
            A function that keeps the residual, and cannot fail.

        Raises:
            RuntimeError: `correct` was not called before.
            ValueError: a vector has another length.
            OverflowError: a value leaves the range of its dtype.
        """
        corrected = correction.out
        self._check_staged(corrected.size, sent, rejected)
        kernels = kernels_for(corrected)
        kernels.scatter_add(corrected, sent.indices, sent.values, sign=-1)
        if rejected is not None:
            kernels.scatter_add(corrected, rejected.indices, rejected.values)
            check_range(kernels.gather(corrected, rejected.indices), "residual")
        return self._swap(*self._arrays)

    def prepare_rejected(self, correction: Correction, rejected: Array | None) -> Write:
        """Prepare to keep `rejected` alone, as all values were sent.

        Args:
            correction: that of the last `correct`.
            rejected: the errors of the values, of shape (n,); None for zeros. It may be the
                buffer of the correction.

        Returns:
            A function that keeps the residual, and cannot fail.

        Raises:
            RuntimeError: `correct` was not called before.
            ValueError: `rejected` has another length.
            OverflowError: a value leaves the range of its dtype.
        """
        corrected = correction.out
        if corrected is not self._spares.get("residual"):
            back = None
            if rejected is not None:
                back = from_all_values(rejected)
            return self.prepare_residual(correction, from_all_values(corrected), back)
        if rejected is None:
            kernels_for(corrected).clear(corrected)
        elif rejected is not corrected:
            np.copyto(corrected, rejected)
        nothing = SparseVector.empty(corrected.size, corrected.dtype, like=corrected)
        return self.prepare_residual(correction, nothing)

    def replace_residual(self, residual: Array) -> Write:
        """Prepare to keep a copy of another residual, between two steps.

        Args:
            residual: of the length and dtype of the one that is kept.

        Returns:
            A function that keeps it, and cannot fail.
        """
        np.copyto(self._spare("residual"), residual)
        return self._swap("residual")

    def _swap(self, *names: str) -> Write:
        """Return the function that swaps arrays with their spares."""

        def write() -> None:
            for name in names:
                kept = self._arrays[name]
                self._arrays[name] = self._spares[name]
                self._spares[name] = kept
            self._begun = True

        return write

    @property
    def residual(self) -> Array | None:
        """The residual, shape (n,): a read-only view, valid until the next call; None before the first step."""
        return self._view("residual")

    @property
    def residual_norm(self) -> float:
        """The Euclidean norm of the residual, 0 without one; takes a pass over it."""
        residual = self.residual
        if residual is None:
            return 0.0
        # The squares can leave the range of float16.
        kept = residual.astype(accumulation_dtype(residual.dtype), copy=False)
        return math.sqrt(float(np.vdot(kept, kept)))

    def fits(self, size: int, dtype: Dtype) -> bool:
        """Return whether the arrays, if there are any, are those for such gradients.

        Args:
            size: the number of values.
            dtype: float16, float32 or float64.
        """
        is_empty = not (self._begun and self._arrays)
        return is_empty or self._kind == (size, dtype)

    def rescale(self, factor: float) -> None:
        """Multiply the residual by a factor when the learning rate changes, if it is in gradient units.

        Args:
            factor: the old learning rate over the new one, 0 < factor < infinity.

        Raises:
            ValueError: the factor is out of range.
            OverflowError: a value leaves the range of its dtype.
        """
        factor = to_number(
            "factor", factor, above=0, remedy=", the old learning rate over the new one"
        )
        self._staged = False
        if not (self._begun and self.has_gradient_units and "residual" in self._arrays):
            return
        residual = self._arrays["residual"]
        scaled = self._spare("residual")
        with np.errstate(over="ignore"):
            kernels_for(residual).multiply(residual, factor, scaled)
        if not np.isfinite(scaled).all():
            raise OverflowError(
                f"the residual times {factor} leaves the range of {scaled.dtype}"
            )
        # The dicts are new ones, as the old ones may be restored.
        self._arrays = {**self._arrays, "residual": scaled}
        self._spares = {**self._spares, "residual": residual}

    def reset(self) -> None:
        """Clear the state, for a model that was replaced; the mass of the residual is lost."""
        self._arrays = {}
        self._spares = {}
        self._kind = None
        self._begun = False
        self._staged = False

    def declared(self) -> dict[str, tuple[Range, str]]:
        names = self.dtypes(VALUE_DTYPES[0])
        finite = -np.inf, np.inf
        return super().declared() | dict.fromkeys(names, (finite, POSITIONS))

    def held(self) -> dict[str, Any]:
        held = super().held()
        if self._begun:
            held |= self._arrays
        return held

    def take(self, values: ByName) -> None:
        """Take checked values, also before a first step; refuses arrays for other gradients than those before."""
        numbers = {name: values[name] for name in self.state}
        begun = {
            name: array
            for name, array in values.items()
            if name not in numbers and array is not None
        }
        kind = self._kind_of(begun)
        if self._begun and begun and kind != self._kind:
            raise ValueError(
                f"the state has {_kinds(begun)}: expected {_kinds(self._arrays)} as in the calls before; reset() "
                "first to change it"
            )
        super().take(numbers)
        self.reset()
        self._arrays = begun
        self._kind = kind
        self._begun = bool(begun)

    def _kind_of(self, arrays: Mapping[str, Array]) -> tuple[int, Dtype] | None:
        """Return length and dtype of the gradients that arrays fit, None without any; ValueError if they fit none."""
        sizes = {array.size for array in arrays.values()}
        held = {name: array.dtype for name, array in arrays.items()}
        for dtype in VALUE_DTYPES:
            if len(sizes) == 1 and self.dtypes(dtype) == held:
                return sizes.pop(), dtype
        if not arrays:
            return None
        fits = " or ".join(
            str({name: str(kind) for name, kind in self.dtypes(dtype).items()})
            for dtype in VALUE_DTYPES
        )
        raise ValueError(
            f"the state has {_kinds(arrays)}: expected {fits}, of one shape"
        )

    def dtypes(self, dtype: Dtype) -> Dtypes:
        """Return the dtypes of the arrays to keep, all of shape (n,), by name.

        Args:
            dtype: that of the gradients.
        """
        return {"residual": dtype}

    def _view(self, name: str) -> Array | None:
        if self._begun and name in self._arrays:
            return read_only(self._arrays[name])
        return None

    def _stage(
        self, gradient: Sequence[Array], basis: Basis | None = None
    ) -> Sequence[Array]:
        """Check a gradient, and allocate the arrays before the first step; return its parts in the basis."""
        first = gradient[0]
        sizes = sizes_of(gradient)
        if sizes != self._sizes:
            self._sizes = sizes
            self._bounds = [0, *accumulate(sizes)]
        size = self._bounds[-1]
        if any([type(array) is not type(first) for array in self._arrays.values()]):
            self._arrays = {
                name: to_device_of(array, first) for name, array in self._arrays.items()
            }
        kind = size, first.dtype
        is_vector = first.ndim == 1 or on_device(first)
        if is_vector and kind == self._kind:
            self._staged = True
            return coefficients_of(gradient, basis)
        shape = (size,) if is_vector else first.shape
        got = f"{first.dtype} of shape {shape}"
        if not self.fits(*kind):
            assert self._kind is not None
            length, dtype = self._kind
            raise ValueError(
                f"the gradient is {got}: expected {dtype} of shape ({length},) as in the calls before; use one "
                f"{type(self).__name__} for each tensor"
            )
        if not is_vector or first.dtype not in VALUE_DTYPES:
            expected = " or ".join(map(str, VALUE_DTYPES))
            raise ValueError(
                f"the gradient is {got}: expected {expected} of shape (n,)"
            )
        xp = namespace(first)
        self._arrays = {
            name: new_vector(xp, size, dtype)
            for name, dtype in self.dtypes(first.dtype).items()
        }
        self._spares = {}
        self._kind = kind
        self._staged = True
        return coefficients_of(gradient, basis)

    def _corrected(self, out: Array) -> Correction:
        """Return the spare residual, which holds the sum, as a correction; raises TypeError for another array."""
        if out is not self._spares.get("residual"):
            raise TypeError(
                f"correct() of {type(self).__name__} returned an array that is not kept, so all that is not sent would "
                'be lost: fill the buffer self._spare("residual"), and return self._corrected of that'
            )
        return Correction(views_between(out, self._bounds), out)

    def _joined(self, gradient: Sequence[Array]) -> Array:
        """Return a gradient as one vector; parts that are not adjacent in memory are copied to a buffer."""
        vector = adjacent(gradient)
        if vector is not None:
            return vector
        buffer = self._buffer("gradient", gradient[0], self._bounds[-1])
        return concatenated(gradient, buffer)

    def _spare(self, name: str) -> Array:
        """Return the buffer for the next `name`."""
        array = self._arrays[name]
        return self._buffer(name, array, array.size)

    def _buffer(self, name: str, like: Array, size: int) -> Array:
        """Return the buffer of a name, on the device of another array, and of its dtype."""
        held = self._spares.get(name)
        kind = type(like), size, like.dtype
        if held is None or (type(held), held.size, held.dtype) != kind:
            held = self._spares[name] = new_vector(namespace(like), size, like.dtype)
        return held

    def _check_staged(self, size: int, *vectors: SparseVector | None) -> None:
        """Raise RuntimeError unless `correct` was called, ValueError for a vector of another length."""
        if not self._staged:
            raise RuntimeError(
                "prepare_residual without correct: call correct before each, and nothing that changes the state between"
            )
        for vector in vectors:
            if vector is not None and vector.length != size:
                raise ValueError(
                    f"got a vector of length {vector.length}: expected {size} as of the gradient"
                )
        self._staged = False


def _kinds(arrays: Mapping[str, Array]) -> str:
    return ", ".join(f"{name} {kind_of_array(arrays[name])}" for name in sorted(arrays))
