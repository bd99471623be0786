"""The same hot loops on CuPy arrays: CUDA C++ beside this file, compiled at its first use.

The public functions are those of :mod:`mpicomp.kernels.host`, with bitwise the same
results; only the bits of a NaN that an addition returns depend on the processor. They
take and return contiguous CuPy arrays, and run on the current device and stream.
Importing this package imports CuPy.

``compiling``   the CUDA source as one module, and its launches
``selection``   the magnitudes above a threshold
``segments``    the largest magnitudes of each segment, or of chunks of it; of a sum in the pass that computes it
``bins``        the entries of bins that reach the bin's maximum
``statistics``  sums over a gradient, in one read; a checksum
``fitting``     thresholds of fitted distributions: sums, and what exceeds them
``merging``     sums of sparse vectors, and copies between sparse and dense
``coding``      indices as bitmaps, indices and values in few bits, without loss
``few_bits``    every value of a vector in few bits, with the rounding error
``transforms``  orthonormal transforms of chunks of consecutive values; signs
"""

from mpicomp.kernels.device.bins import entries_in_bins
from mpicomp.kernels.device.coding import (
    from_bitmap,
    from_elias_fano,
    from_offsets,
    magnitude_range,
    to_bitmap,
    to_elias_fano,
    to_offsets,
)
from mpicomp.kernels.device.few_bits import (
    decoder,
    encoder,
)
from mpicomp.kernels.device.fitting import select_by_fits
from mpicomp.kernels.device.merging import (
    accumulate,
    add,
    add_parts,
    add_scaled,
    clear,
    consecutive,
    divide,
    first_disorder,
    gather,
    gather_scores,
    inspect,
    merge,
    multiply,
    quotient,
    scatter_add,
    sparse_writer,
)
from mpicomp.kernels.device.segments import (
    divide_largest,
    largest,
    largest_in_segments,
)
from mpicomp.kernels.device.selection import all_below, raise_not_finite
from mpicomp.kernels.device.statistics import checksum, with_magnitudes
from mpicomp.kernels.device.transforms import hadamard, hadamard_writer, signs

__all__ = [
    "accumulate",
    "add",
    "add_parts",
    "add_scaled",
    "all_below",
    "checksum",
    "clear",
    "consecutive",
    "decoder",
    "divide",
    "divide_largest",
    "encoder",
    "entries_in_bins",
    "first_disorder",
    "from_bitmap",
    "from_elias_fano",
    "from_offsets",
    "gather",
    "gather_scores",
    "hadamard",
    "hadamard_writer",
    "inspect",
    "largest",
    "largest_in_segments",
    "magnitude_range",
    "merge",
    "multiply",
    "quotient",
    "raise_not_finite",
    "scatter_add",
    "select_by_fits",
    "signs",
    "sparse_writer",
    "to_bitmap",
    "to_elias_fano",
    "to_offsets",
    "with_magnitudes",
]
