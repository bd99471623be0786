"""Arrays in and out: any framework's array as a NumPy view, and the result back as the same kind.

An array comes in without a copy, by being a NumPy array, through the array interface, or through DLPack; it goes back
through the ``from_dlpack`` of the library that it came from. No framework is imported here: an array that arrives
proves that its library is loaded.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

VALUE_DTYPES = tuple(np.dtype(t) for t in (np.float16, np.float32, np.float64))

_IN_MAIN_MEMORY = (1, 3, 11)  # DLPack's device types: the CPU, and memory pinned for CUDA or ROCm


def to_host(array: Any) -> Array:
    """Return a NumPy view of an array that lives in main memory, without a copy.

    Takes NumPy arrays, objects with ``__array_interface__`` and objects that speak DLPack from main memory (PyTorch,
    JAX, pinned memory of CuPy, ...). A PyTorch tensor that requires grad is detached. bfloat16 becomes float32, a copy.

    Raises TypeError for anything else, for an array on a device, and for a masked array.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("got a masked array: fill it first (array.filled(0)), a mask does not travel")
    if _is_bfloat16(array):
        array = _widened(array)
    if isinstance(array, np.ndarray):
        return np.asarray(array)
    if hasattr(array, "__dlpack_device__"):
        return _from_dlpack(array)
    if hasattr(array, "__array_interface__"):
        return np.asarray(array)
    hint = "use its to_dense()" if hasattr(array, "to_dense") else "NumPy, or one that speaks DLPack"
    raise TypeError(f"got {_kind(array)}: expected an array ({hint})")


def _from_dlpack(array: Any) -> Array:
    kind = int(array.__dlpack_device__()[0])
    if kind not in _IN_MAIN_MEMORY:
        raise TypeError(f"{_kind(array)} is on a device (DLPack type {kind}): copy it to main memory first")
    try:
        return np.from_dlpack(array.detach() if hasattr(array, "detach") else array)
    except (BufferError, RuntimeError) as error:
        dtype = getattr(array, "dtype", "an unknown dtype")
        raise TypeError(f"NumPy cannot take {_kind(array)} of {dtype}: convert it to float32 ({error})") from error


def to_values(array: Any) -> Array:
    """Return what `to_host` does; TypeError as well when the values are not float16, float32 or float64."""
    host = to_host(array)
    if host.dtype not in VALUE_DTYPES:
        raise TypeError(f"values are {host.dtype}: expected float16, float32 or float64; convert them with astype")
    return host


def to_vector(array: Any) -> Array:
    """Return what `to_values` does as one contiguous vector in C order: a view where that is possible."""
    return np.ascontiguousarray(to_values(array)).reshape(-1)


def like(result: Array, original: Any) -> Any:
    """Return `result` as the same kind of array as `original`: without a copy, where its library can.

    Goes through the library's ``from_dlpack`` (JAX keeps it in ``jax.numpy``); where there is none, NumPy comes back.
    Beside a bfloat16 array a float32 result is rounded to bfloat16.
    """
    return kind_of(original)(result)


def kind_of(original: Any) -> Callable[[Array], Any]:
    """Return the function that makes NumPy arrays the same kind as `original`, as `like` does; it does not hold it."""
    root = type(original).__module__.partition(".")[0]
    library = sys.modules.get("jax.numpy" if root in ("jax", "jaxlib") else root)
    foreign = not isinstance(original, np.ndarray) and hasattr(library, "from_dlpack")
    short = original.dtype if _is_bfloat16(original) else None

    def back(result: Array) -> Any:
        array = library.from_dlpack(result) if foreign else result  # type: ignore[union-attr]
        if short is None or result.dtype != np.float32:
            return array
        return array.to(short) if hasattr(array, "to") else array.astype(short)

    return back


def _is_bfloat16(array: Any) -> bool:
    return str(getattr(array, "dtype", "")).endswith("bfloat16")


def _widened(array: Any) -> Any:
    """Return a bfloat16 array as float32, where its library can: NumPy has no name for it."""
    if hasattr(array, "float"):
        return array.float()
    return array.astype("float32") if hasattr(array, "astype") else array


def kernels_for(array: Any) -> ModuleType:
    """Return the kernels module that serves `array`; Numba is loaded at the first call, not on import."""
    from mpicomp.kernels import host

    return host


def _kind(array: Any) -> str:
    return f"{type(array).__module__}.{type(array).__qualname__}"
