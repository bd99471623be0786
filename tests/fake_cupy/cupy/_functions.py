"""Functions of arrays, by NumPy's on the hidden memory; only names that CuPy has."""

from collections.abc import Callable
from typing import Any

import numpy as np

from cupy._array import as_dtype, ndarray, plain, ran, waited, wrapped
from cupy._counts import count
from cupy._flush import MOVING, flush, flushed
from cupy._signatures import checked

_CREATING = "empty zeros ones full arange linspace eye".split()
_COMPUTING = (
    "abs absolute add all any append argpartition argsort argmax argmin array_equal bincount bitwise_and "
    "broadcast_to ceil clip concatenate copysign cumsum diff divide divmod dot empty_like equal exp flatnonzero floor "
    "floor_divide frexp "
    "full_like greater invert isfinite isinf isnan less log log2 logical_and logical_not logical_or max maximum mean "
    "min minimum multiply negative nonzero not_equal ones_like packbits prod ravel repeat reshape right_shift "
    "searchsorted sign signbit sort split sqrt square stack subtract sum partition take tile unique unpackbits "
    "true_divide vdot vstack hstack where zeros_like moveaxis count_nonzero left_shift bitwise_or bitwise_xor "
    "array_split roll less_equal greater_equal power remainder"
).split()
# the size of what they return depends on data
_WAITING = "flatnonzero nonzero unique".split()
_UNCHANGED = "empty empty_like".split()  # they leave memory as it is


def _creating(name: str) -> Callable[..., ndarray]:
    def create(*args: Any, **how: Any) -> ndarray:
        how.pop("like", None)
        return wrapped(
            getattr(np, name)(*map(plain, args), **how),
            None if name in _UNCHANGED else name,
        )

    return create


def _computing(name: str) -> Callable[..., Any]:
    function = getattr(np, name)

    def compute(*args: Any, **how: Any) -> Any:
        if name == "repeat" and isinstance(
            args[1] if len(args) > 1 else how["repeats"], ndarray | np.ndarray
        ):
            raise TypeError("CuPy's repeat takes no array of counts")
        if name in _WAITING:
            waited(name)
        out = how.get("out")
        given = [
            list(arg) if name in ("split", "array_split") and i == 1 else plain(arg)
            for i, arg in enumerate(args)
        ]
        moves = name in MOVING
        with np.errstate(all="ignore"):
            result = function(
                *(given if moves else flushed(given)),
                **{key: plain(value) for key, value in how.items()},
            )
        if out is not None:
            if not moves:
                flush(plain(out))
            ran(name)
            return out
        if not moves:
            result = flushed(result)
        return wrapped(result, None if name in _UNCHANGED else name)

    return compute


for _name in _CREATING:
    globals()[_name] = _creating(_name)
for _name in _COMPUTING:
    globals()[_name] = _computing(_name)


def array(obj: Any, dtype: Any = None, copy: bool = True, order: str = "K") -> ndarray:
    if not isinstance(obj, ndarray):
        count("uploads", "array")
    return wrapped(
        np.array(_given(obj), dtype), "array" if isinstance(obj, ndarray) else None
    )


def asarray(a: Any, dtype: Any = None) -> ndarray:
    """Return an array of the device: what is there without a copy, what is on the host as a copy."""
    if isinstance(a, ndarray) and (dtype is None or a.dtype == dtype):
        return a
    if hasattr(a, "__cuda_array_interface__") and not isinstance(a, ndarray):
        return wrapped(
            a._fake._hidden.astype(dtype or a._fake.dtype, copy=False), "astype"
        )
    return array(a, dtype)


def _given(obj: Any) -> Any:
    return obj._ready() if isinstance(obj, ndarray) else obj


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    given = asarray(a, dtype)
    return (
        given
        if given._hidden.flags.c_contiguous
        else wrapped(np.ascontiguousarray(given._ready()), "copy")
    )


def asnumpy(
    a: Any,
    stream: Any = None,
    order: str = "C",
    out: Any = None,
    *,
    blocking: bool = True,
) -> np.ndarray:
    return a.get() if isinstance(a, ndarray) else np.asarray(a)


def copyto(
    dst: ndarray, src: Any, casting: str = "same_kind", where: Any = None
) -> None:
    np.copyto(dst._ready(), as_dtype(plain(src), dst.dtype), casting=casting)
    ran("copyto")


def from_dlpack(array: Any) -> ndarray:
    """Take an array of a library that the tests make up: it has the array of the fake device in `_fake`."""
    return array if isinstance(array, ndarray) else array._fake


def get_array_module(*args: Any) -> Any:
    import cupy

    return cupy if any(isinstance(arg, ndarray) for arg in args) else np


__all__ = [
    *_CREATING,
    *_COMPUTING,
    "array",
    "asarray",
    "ascontiguousarray",
    "asnumpy",
    "copyto",
    "from_dlpack",
]
__all__ += ["get_array_module"]
for _name in __all__:
    globals()[_name] = checked(_name, globals()[_name])
for _name in "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool_ intp dtype".split():
    globals()[_name] = getattr(np, _name)
    __all__.append(_name)
