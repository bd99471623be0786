"""Tensors: what an exchange knows of each array of a gradient.

The first step describes each tensor by name; later gradients, and the arrays for means,
are compared with it.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from mpicomp.arrays import Array, ByName, Dtype
from mpicomp.arrays.device import namespace
from mpicomp.arrays.frameworks import kind_of, to_values, writable_vector
from mpicomp.arrays.memory import contiguous, flat

ALONE = "gradient"  # the name of one array, and of the segment of a list


class Form(StrEnum):
    """The form of a gradient; its text is that of errors."""

    ARRAY = "one array"
    LIST = "a list of arrays"
    DICT = "arrays by name"


ARRAY = Form.ARRAY
LIST = Form.LIST
DICT = Form.DICT


class Kind(NamedTuple):
    """The dtype and the library of an array of the caller."""

    dtype: str
    library: str

    @classmethod
    def of(cls, array: Any) -> "Kind":
        """Return the kind of an array."""
        # A subclass of np.ndarray counts as NumPy, whatever its module.
        library = "numpy"
        if not isinstance(array, np.ndarray):
            library = type(array).__module__.partition(".")[0]
        dtype = str(getattr(array, "dtype", "")).rpartition(".")[2]
        return cls(dtype, library)

    def __str__(self) -> str:
        return f"{self.dtype} of {self.library}"


@dataclass(frozen=True, eq=False)
class Tensor:
    """The description of a tensor from the first step; constant, and equal to itself alone.

    dtype: in which it is exchanged. xp: the module that makes its arrays. kind: that of
    the caller's arrays. wrap: converts one to them. places: "numpy" or "cupy", where it
    is on each rank; bucket_nbytes: of a bucket with it and with others, at most; both of
    named tensors.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    xp: Any
    kind: Kind
    wrap: Callable[[Array], Any]
    places: tuple[str, ...] = ()
    bucket_nbytes: float = 0

    @cached_property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes, in the dtype in which it is exchanged."""
        return self.size * self.dtype.itemsize

    @cached_property
    def is_copied(self) -> bool:
        """Whether `wrap` may return a copy: of bfloat16, or of another library, as JAX copies what is not aligned."""
        libraries = "numpy", "cupy", "torch"
        return self.kind.dtype == "bfloat16" or self.kind.library not in libraries

    @cached_property
    def facts(self) -> tuple[Any, ...]:
        """What `plain_vectors` compares of an array; on a device with the current one of the first call."""
        if self.xp is not np:
            device = self.xp.cuda.runtime.getDevice()
            return self.xp.ndarray, self.shape, self.dtype, True, device
        plain: Any = None  # the class of no array
        if self.kind == (str(self.dtype), "numpy"):
            plain = np.ndarray
        elif self.kind == (str(self.dtype), "torch"):
            plain = sys.modules["torch"].Tensor
        return plain, self.shape, self.dtype, True

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
        is_leaf = getattr(array, "is_leaf", False)
        if is_leaf and getattr(array, "requires_grad", False):
            raise TypeError(
                f"{self.name} is a parameter, not a gradient: pass its .grad"
            )
        kind = Kind.of(array)
        if kind != self.kind:
            raise ValueError(
                f"{self.name} is {kind}: expected {self.kind} as in the first step"
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


def plain_vectors(tensors: Sequence[Tensor], arrays: ByName) -> list[Array] | None:
    """Return arrays, by name, as vectors; None for others than the described ones, writable and C-contiguous.

    Those are of NumPy or PyTorch in host memory; or on the current device, in the shapes
    that they have: kernels take them as vectors, of which each would cost 3 us.
    """
    first = tensors[0]
    names, expected = _expected(tuple(tensors))
    given: list[Any] = [*map(arrays.get, names)]
    try:
        if first.xp is np:
            return _host_vectors(expected, given)
        if first.facts[-1] != first.xp.cuda.runtime.getDevice():
            return None
        # `Tensor.facts` has this order; `attrgetter` takes longer.
        facts = [
            (a.__class__, a.shape, a.dtype, a._c_contiguous, a.data.device_id)
            for a in given
        ]
    # The array is of another library, or PyTorch refuses it.
    except (AttributeError, RuntimeError, TypeError):
        return None
    return given if facts == expected else None


# Every step asks for those of each bucket.
@lru_cache(maxsize=256)
def _expected(tensors: tuple[Tensor, ...]) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return the names and the facts of tensors."""
    names = [tensor.name for tensor in tensors]
    return names, [tensor.facts for tensor in tensors]


def _host_vectors(expected: list[Any], given: list[Any]) -> list[Array] | None:
    """Return arrays of NumPy or PyTorch as vectors; None if they are not as described, or have no memory."""
    values = [
        a if a.__class__ is np.ndarray else a.untyped_storage().data_ptr() and a.numpy()
        for a in given
    ]
    pairs = zip(given, values, strict=True)
    facts = [(a.__class__, v.shape, v.dtype, v.flags.carray) for a, v in pairs]
    if facts != expected:
        return None
    return [value.reshape(-1) for value in values]


def _values(name: str, array: Any) -> Array:
    try:
        return to_values(array)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from error


def describe(arrays: ByName, form: Form) -> list[Tensor]:
    """Return a description of each array; raises TypeError or ValueError for arrays that cannot be exchanged."""
    if not isinstance(arrays, Mapping):
        raise TypeError(
            f"got {type(arrays).__name__}: expected a dict of arrays, such as dict(model.named_parameters())"
        )
    if not arrays:
        raise ValueError(f"got {form}, and it is empty: expected at least one array")
    tensors = []
    for name, array in arrays.items():
        # `np.savez` truncates names at a null character.
        if not isinstance(name, str) or "\0" in name:
            raise TypeError(
                f"a tensor has the name {name!r}: expected a string without null characters"
            )
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
                Kind.of(array),
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
