"""Tensors and the forms in which they come: one array, a list that is one vector, or arrays by name.

Inside all are by name. A tensor is described once; its later gradients are compared with that.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import contiguous, kind_of, namespace, to_values, writable_vector

Array = NDArray[Any]

ALONE = "gradient"  # the name of what has none: the one array, or the one vector


@dataclass(frozen=True)
class Tensor:
    """A tensor as it was described first.

    dtype: in which it is exchanged. xp: the module that makes arrays where it lives. wrap: makes the caller's kind of
    array of such an array.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    xp: Any
    wrap: Callable[[Array], Any]

    @classmethod
    def describe(cls, name: str, array: Any) -> "Tensor":
        """Return what is known of an array; TypeError that names the tensor for what is none."""
        values = _values(name, array)
        return cls(name, values.shape, values.dtype, namespace(values), kind_of(array))

    @cached_property
    def size(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)

    def flatten(self, array: Any) -> Array:
        """Return a gradient as one vector, a view where possible; None as zeros.

        Raises TypeError or ValueError for another shape, dtype or memory than at first.
        """
        if array is None:
            return self.xp.zeros(self.size, self.dtype)  # type: ignore[no-any-return]
        return contiguous(self._checked(self.name, array)).reshape(-1)

    def writable(self, array: Any, name: str) -> Array:
        """Return an array that is to be written to as one vector, a view.

        Raises TypeError or ValueError that names it when it has another shape, dtype or memory, is read-only, or not
        C-contiguous.
        """
        self._checked(name, array)
        try:
            return writable_vector(array)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from error

    def residual_in(self, gradient: Any) -> Array:
        """Return the gradient's own array as one vector to be written to; raises where it cannot hold the residual."""
        if gradient is None:
            raise ValueError(f"{self.name} has no gradient, whose array holds the residual (in_place): give it zeros")
        return self.writable(gradient, self.name)

    def _checked(self, name: str, array: Any) -> Array:
        if type(array) is np.ndarray and (array.shape, array.dtype, np) == (self.shape, self.dtype, self.xp):
            return array  # the case that is everywhere, without the questions
        values = _values(name, array)
        if namespace(values) is not self.xp:
            raise ValueError(f"{name} is in {namespace(values).__name__}'s memory: expected {self.xp.__name__}'s")
        if (values.shape, values.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"{name} is {values.dtype} of shape {values.shape}: expected {self.dtype} of shape {self.shape} as in "
                "the first step; use one exchange for each model"
            )
        return values


class Form(Enum):
    """The form of a gradient, and of the mean that comes back."""

    ARRAY = "one array"
    LIST = "a list of arrays"
    DICT = "arrays by name"

    @classmethod
    def of(cls, gradient: Any) -> "Form":
        """Return the form of a gradient."""
        if isinstance(gradient, Mapping):
            return cls.DICT
        return cls.LIST if isinstance(gradient, list | tuple) else cls.ARRAY

    def by_name(self, gradient: Any) -> dict[str, Any]:
        """Return the arrays of a gradient by name."""
        if self is Form.LIST:
            return {f"item {place} of the list": array for place, array in enumerate(gradient)}
        return dict(gradient) if self is Form.DICT else {ALONE: gradient}

    def outs_by_name(self, out: Any, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return the output buffers by name; TypeError or ValueError where their form is not that of the gradient."""
        if out is None:
            return {}
        if Form.of(out) is not self and self is not Form.ARRAY:
            raise TypeError(f"out is {type(out).__name__}: expected {self.value}, as the gradients are")
        outs = self.by_name(out)
        if self is Form.LIST and len(outs) != len(arrays):
            raise ValueError(f"out is {len(outs)} arrays: expected a list of {len(arrays)}, as the gradients are")
        for name in outs.keys() - arrays.keys():
            raise ValueError(f"out has {name!r}: expected names of the gradients that are given")
        return outs

    def back(self, means: dict[str, Any], names: Mapping[str, Any]) -> Any:
        """Return results by name in this form: those of `names` first."""
        if self is Form.DICT:
            return {name: means[name] for name in names} | means
        return [means[name] for name in names] if self is Form.LIST else means[ALONE]

    def described(self, arrays: Mapping[str, Any]) -> list[Tensor]:
        """Return what is known of each array; TypeError or ValueError for what is none, or cannot be one vector."""
        if not arrays:
            raise ValueError(f"got {self.value}, and it is empty: expected at least one array")
        for name in arrays:
            if not isinstance(name, str):
                raise TypeError(f"a tensor has the name {name!r}: expected a string")
        tensors = [Tensor.describe(name, array) for name, array in arrays.items()]
        if self is Form.LIST and len({(tensor.dtype, tensor.xp.__name__) for tensor in tensors}) > 1:
            kinds = sorted({f"{tensor.dtype} in {tensor.xp.__name__}'s memory" for tensor in tensors})
            raise TypeError(f"got {' and '.join(kinds)} in one list: expected one dtype, in one memory")
        return tensors

    def check(self, arrays: Mapping[str, Any], first: "Form", names: Collection[str]) -> None:
        """Raise TypeError, KeyError or ValueError for gradients of another form or other names than the first ones."""
        if self is not first:
            raise TypeError(f"got {self.value}: expected {first.value}, as in the first step of this exchange")
        for name in arrays:
            if name not in names:
                raise KeyError(f"{name!r} is none of the tensors of the first step: use another exchange for them")
        if self is Form.LIST and len(arrays) < len(names):
            raise ValueError(f"got {len(arrays)} arrays: expected {len(names)}, as in the first step of this exchange")

    def kinds(self, tensors: list[Tensor]) -> dict[str, str]:
        """Return what all ranks must have alike of tensors, as text by name."""
        if self is Form.DICT:
            return {tensor.name: f"{tensor.dtype} of shape {tensor.shape}" for tensor in tensors}
        return {ALONE: f"{tensors[0].dtype} of {sum(tensor.size for tensor in tensors)} values"}


def _values(name: str, array: Any) -> Array:
    try:
        return to_values(array)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from error
