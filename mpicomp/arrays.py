"""Arrays in and out: any framework's array as a NumPy view, and the result back as the same kind.

An array comes in without a copy, by being a NumPy array, through the array interface, or through DLPack; it goes back
through the ``from_dlpack`` of the library that it came from. No framework is imported here: an array that arrives
proves that its library is loaded.
"""

import sys
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

VALUE_DTYPES = tuple(np.dtype(t) for t in (np.float16, np.float32, np.float64))

_DLPACK_CPU = 1


def to_host(array: Any) -> Array:
    """Return a NumPy view of an array that lives in main memory, without a copy.

    Takes NumPy arrays, objects with ``__array_interface__`` and objects that speak DLPack from the CPU (PyTorch, JAX,
    CuPy's pinned arrays, ...). A PyTorch tensor that requires grad is detached.

    Raises TypeError for anything else, and for an array on a device.
    """
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "__dlpack_device__"):
        kind = int(array.__dlpack_device__()[0])
        if kind != _DLPACK_CPU:
            raise TypeError(f"{_kind(array)} is on a device (DLPack type {kind}): copy it to main memory first")
        return np.from_dlpack(array.detach() if hasattr(array, "detach") else array)
    if hasattr(array, "__array_interface__"):
        return np.asarray(array)
    raise TypeError(f"got {_kind(array)}: expected an array (NumPy, or one that speaks DLPack)")


def to_vector(array: Any) -> Array:
    """Return an array of any shape as one contiguous vector in C order: a view where that is possible.

    Raises TypeError as `to_host` does, and when the values are not float16, float32 or float64.
    """
    host = to_host(array)
    if host.dtype not in VALUE_DTYPES:
        raise TypeError(f"values are {host.dtype}: expected float16, float32 or float64; convert them with astype")
    return np.ascontiguousarray(host).reshape(-1)


def like(result: Array, original: Any) -> Any:
    """Return `result` as the same kind of array as `original`: without a copy, where its library can."""
    if isinstance(original, np.ndarray):
        return result
    library = sys.modules[type(original).__module__.partition(".")[0]]
    for module in (library, getattr(library, "numpy", None), sys.modules.get("jax.numpy")):
        if module is not None and hasattr(module, "from_dlpack"):
            return module.from_dlpack(result)
    return result


def kernels_for(array: Any) -> ModuleType:
    """Return the kernels module that serves `array`; Numba is loaded at the first call, not on import."""
    from mpicomp.kernels import host

    return host


def _kind(array: Any) -> str:
    return f"{type(array).__module__}.{type(array).__qualname__}"
