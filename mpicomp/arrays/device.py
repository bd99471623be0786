"""The device of an array: NumPy's or CuPy's functions for it, its kernels, and copies between host and device.

Array algebra is written once: NumPy's functions dispatch on CuPy's arrays, and
``namespace(array)`` makes new arrays on the same device. Hot loops are in
`mpicomp.kernels`; `kernels_for` returns the module for an array.
"""

import sys
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from mpicomp.arrays import Array


def on_device(array: Any) -> bool:
    """Return whether this is a CuPy array."""
    if type(array) is np.ndarray:
        return False
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(array, cupy.ndarray)


def namespace(array: Any) -> Any:
    """Return the module that makes arrays on the device of `array`: ``numpy`` or ``cupy``."""
    if type(array) is np.ndarray or not on_device(array):
        return np
    return sys.modules["cupy"]


def to_numpy(array: Any) -> Array:
    """Return a copy of a CuPy array in host memory, once pending work on it is done; other arrays as NumPy's."""
    return array.get() if on_device(array) else np.asarray(array)


def to_device_of(array: Any, other: Any) -> Any:
    """Return an array on the device of `other`: the array itself if it is on that device, else a copy."""
    if on_device(array) == on_device(other):
        return array
    return to_numpy(array) if on_device(array) else namespace(other).asarray(array)


def kernels_for(array: Any) -> ModuleType:
    """Return the module of kernels for `array`: Numba's or CuPy's, loaded at the first call and not on import."""
    if type(array) is np.ndarray or not on_device(array):
        return _kernels("host")
    return _kernels("device")


@cache
def _kernels(memory: str) -> ModuleType:
    return import_module(f"mpicomp.kernels.{memory}")
