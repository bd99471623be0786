"""The same hot loops on CuPy arrays: CUDA C++ beside this file, compiled at its first use.

The public functions are those of :mod:`mpicomp.kernels.host`, with the same results to the last bit; they take and
return CuPy arrays, and work on the current device and stream. Importing this package imports CuPy.

``compiling``   the CUDA source as one module
``selection``   the largest magnitudes, and what is above a threshold
"""

from mpicomp.kernels.device.selection import (
    Search,
    above,
    exceeding,
    histogram,
    kth_largest,
    largest,
    magnitude_keys,
    raise_not_finite,
    select,
    top_k,
)

__all__ = [
    "Search",
    "above",
    "exceeding",
    "histogram",
    "kth_largest",
    "largest",
    "magnitude_keys",
    "raise_not_finite",
    "select",
    "top_k",
]
