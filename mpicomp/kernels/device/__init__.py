"""The same hot loops on CuPy arrays: CUDA C++ beside this file, compiled at its first use.

The public functions are those of :mod:`mpicomp.kernels.host`, with bitwise the same results; only the bits of a NaN
that an addition returns depend on the processor. They take and return contiguous CuPy arrays, and run on the current
device and stream. Importing this package imports CuPy.

``compiling``   the CUDA source as one module, and its launches
``selection``   the largest magnitudes, and those above a threshold; of a sum in the pass that computes it
``chunks``      the largest magnitudes of each chunk of consecutive values
``statistics``  sums over a gradient, in one read
``surveying``   sums in one fast read, and the values that the next steps are expected to need
``merging``     sums of sparse vectors, and copies between sparse and dense
``coding``      indices as bitmaps, indices and values in few bits, without loss
``few_bits``    every value of a vector in few bits, with the rounding error
"""

from mpicomp.kernels.device.chunks import largest_in_chunks
from mpicomp.kernels.device.coding import (
    from_bitmap,
    from_elias_fano,
    from_offsets,
    magnitude_range,
    to_bitmap,
    to_elias_fano,
    to_offsets,
)
from mpicomp.kernels.device.few_bits import add_quantised, dequantise, quantise
from mpicomp.kernels.device.merging import (
    accumulate,
    add,
    clear,
    consecutive,
    divide,
    first_disorder,
    gather,
    inspect,
    merge,
    scatter,
    scatter_add,
)
from mpicomp.kernels.device.selection import (
    above,
    add_above,
    add_largest,
    divide_largest,
    exceeding,
    histogram,
    largest,
    raise_not_finite,
    top_k,
)
from mpicomp.kernels.device.statistics import moments, sides, two_magnitudes
from mpicomp.kernels.device.surveying import Survey, sample, survey
from mpicomp.kernels.host.statistics import Moments, Sides
from mpicomp.kernels.host.surveying import Sums

__all__ = [
    "Moments",
    "Sides",
    "Sums",
    "Survey",
    "above",
    "accumulate",
    "add",
    "add_above",
    "add_largest",
    "add_quantised",
    "clear",
    "consecutive",
    "dequantise",
    "divide",
    "divide_largest",
    "exceeding",
    "first_disorder",
    "from_bitmap",
    "from_elias_fano",
    "from_offsets",
    "gather",
    "histogram",
    "inspect",
    "largest",
    "largest_in_chunks",
    "magnitude_range",
    "merge",
    "moments",
    "quantise",
    "raise_not_finite",
    "sample",
    "scatter",
    "scatter_add",
    "sides",
    "survey",
    "to_bitmap",
    "to_elias_fano",
    "to_offsets",
    "top_k",
    "two_magnitudes",
]
