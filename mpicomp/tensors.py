"""Tensors: what an exchange knows of each array of a gradient.

The first step describes each tensor by name; later gradients, and the arrays for means,
are compared with it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np

from mpicomp.arrays import (
    Array,
    ByName,
    Dtype,
    contiguous,
    flat,
    kind_of,
    namespace,
    to_values,
    writable_vector,
)

# of a CuPy array: see `Tensor.facts`
_FACTS = attrgetter("__class__", "shape", "dtype", "_c_contiguous", "data.device_id")

ALONE = "gradient"  # the name of one array, and of the segment of a list

# the forms, as errors name them
ARRAY = "one array"
LIST = "a list of arrays"
DICT = "arrays by name"


@dataclass(frozen=True)
class Tensor:
    """The description of a tensor from the first step.

    dtype: in which it is exchanged. xp: the module that makes its arrays. kind: the
    library and the dtype of the caller's arrays, as text. wrap: converts one to them.
    places: "numpy" or "cupy", where it is on each rank; of named tensors.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    xp: Any
    kind: str
    wrap: Callable[[Array], Any]
    places: tuple[str, ...] = ()

    @cached_property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @cached_property
    def is_copied(self) -> bool:
        """Whether `wrap` may return a copy: of bfloat16, or of another library, as JAX copies what is not aligned."""
        dtype, _, library = self.kind.partition(" of ")
        return dtype == "bfloat16" or library not in ("numpy", "cupy", "torch")

    @cached_property
    def facts(self) -> tuple[Any, ...]:
        """What `device_arrays` compares of a CuPy array, with the current device of the first call."""
        device = self.xp.cuda.runtime.getDevice()
        return self.xp.ndarray, self.shape, self.dtype, True, device

    def new(self) -> Array:
        """Return a vector of zeros of its size and dtype, on its device."""
        return self.xp.zeros(self.size, self.dtype)  # type: ignore[no-any-return]

    def flatten(self, array: Any) -> Array:
        """Return a gradient as one vector, a view where possible; zeros for None.

        Raises TypeError or ValueError for another shape, dtype or device than in the
        first step, and for a parameter of PyTorch.
        """
        if array is None:
            return self.new()
        values = self._checked(self.name, array)
        if values is not array:
            is_leaf = getattr(array, "is_leaf", False)
            if is_leaf and getattr(array, "requires_grad", False):
                raise TypeError(
                    f"{self.name} is a parameter, not a gradient: pass its .grad"
                )
            if described(array) != self.kind:
                raise TypeError(
                    f"{self.name} is {described(array)}: expected {self.kind} as in the first step"
                )
        return flat(contiguous(values))

    def writable(
        self, array: Any, name: str, view: Callable[[Any], Array] = writable_vector
    ) -> Array:
        """Return an output array as one vector, a writable view; or what `view` returns of it.

        name: of the array in errors. Raises as `flatten` and `view` do.
        """
        self._checked(name, array)
        try:
            return view(array)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from error

    def _checked(self, name: str, array: Any) -> Array:
        if (
            type(array) is np.ndarray
            and self.xp is np
            and array.shape == self.shape
            and array.dtype == self.dtype
        ):
            return array
        values = _values(name, array)
        if namespace(values) is not self.xp:
            raise ValueError(
                f"{name} is in {namespace(values).__name__}'s memory: expected {self.xp.__name__}'s"
            )
        if (values.shape, values.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"{name} is {values.dtype} of shape {values.shape}: expected {self.dtype} of shape {self.shape} as in "
                "the first step; use one exchange for each model"
            )
        return values


def device_arrays(
    tensors: Sequence[Tensor], arrays: ByName, checked: Sequence[Array] = ()
) -> list[Array] | None:
    """Return the arrays of tensors, by name, in the shapes that they have; None for others than the described ones.

    Those are on the current device and C-contiguous: kernels take them as vectors, of
    which each would cost 3 us. checked: arrays that were described so before.
    """
    xp = tensors[0].xp
    if xp is np or tensors[0].facts[-1] != xp.cuda.runtime.getDevice():
        return None
    of_tensors: list[Any] = [arrays.get(tensor.name) for tensor in tensors]
    # to look at each takes 0.2 us
    if [*map(id, of_tensors)] == [*map(id, checked)]:
        return of_tensors
    try:
        facts = [*map(_FACTS, of_tensors)]
    except AttributeError:  # of another library
        return None
    return of_tensors if facts == [tensor.facts for tensor in tensors] else None


def _values(name: str, array: Any) -> Array:
    try:
        return to_values(array)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from error


def described(array: Any) -> str:
    """Return the dtype of an array and its library, as text."""
    library = type(array).__module__.partition(".")[0]
    dtype = str(getattr(array, "dtype", "")).rpartition(".")[2]
    return f"{dtype} of {library}"


def describe(arrays: ByName, form: str) -> list[Tensor]:
    """Return a description of each array; raises TypeError or ValueError for arrays that cannot be exchanged."""
    if not isinstance(arrays, Mapping):
        raise TypeError(
            f"got {type(arrays).__name__}: expected a dict of arrays, such as dict(model.named_parameters())"
        )
    if not arrays:
        raise ValueError(f"got {form}, and it is empty: expected at least one array")
    tensors = []
    for name, array in arrays.items():
        if not isinstance(name, str):
            raise TypeError(f"a tensor has the name {name!r}: expected a string")
        if array is None:
            raise TypeError(
                f"{name} is None in the first step: pass zeros, or register the tensors before"
            )
        values = _values(name, array)
        tensors.append(
            Tensor(
                name,
                values.shape,
                values.dtype,
                namespace(values),
                described(array),
                kind_of(array),
            )
        )
    kinds = sorted(
        {f"{tensor.dtype} in {tensor.xp.__name__}'s memory" for tensor in tensors}
    )
    if form == LIST and len(kinds) > 1:
        raise TypeError(
            f"got {' and '.join(kinds)} in one list: expected one dtype, in one memory"
        )
    return tensors
