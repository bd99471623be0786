"""Hot loops over arrays in host memory, compiled by Numba at their first use and cached on disk.

The public functions take arrays and return arrays; the compiled kernels below them (a
leading underscore) fill given buffers and return a count. No kernel uses fastmath, and
every sum has a fixed order, so the results are the same in every run.

Passes over two million values or more use several threads: MPICOMP_THREADS, else as
many as this rank has cores (:mod:`mpicomp.threads`). The results do not depend on the
number. Input arrays may be read-only.

``selection``     the largest magnitudes, and those above a threshold
``segments``      the largest magnitudes of each segment of a vector, or of chunks of it
``statistics``    sums over a gradient, in one read; a checksum
``fitting``       thresholds of fitted distributions: sums, and what exceeds them
``merging``       sums of sparse vectors, and copies between sparse and dense
``streaming``     passes over dense vectors that are longer than the cache
``fused``         a sum, and in the same pass its largest magnitudes
``bins``          the entries of bins that reach the bin's maximum
``bits``          magnitudes as integers; indices as bitmaps
``coding``        indices and values in few bits, without loss
``halves``        float16: conversion to and from float32, and sums
``few_bits``      every value of a vector in few bits, with the rounding error
``patches``       what changed between two versions of weights, bit for bit
``transforms``    orthonormal transforms of chunks of consecutive values; signs
``lanes``         passes over values that are declared by a formula, in whole vectors
``instructions``  instructions of processors that Numba does not expose
``compiled``      how kernels are compiled, and their files
"""

from mpicomp.kernels.host.bins import entries_in_bins
from mpicomp.kernels.host.bits import from_bitmap, magnitude_range, to_bitmap
from mpicomp.kernels.host.coding import (
    from_elias_fano,
    from_offsets,
    to_elias_fano,
    to_offsets,
)
from mpicomp.kernels.host.few_bits import decoder, encoder
from mpicomp.kernels.host.fitting import select_by_fits
from mpicomp.kernels.host.fused import add_largest
from mpicomp.kernels.host.merging import (
    accumulate,
    consecutive,
    divide,
    first_disorder,
    gather,
    gather_scores,
    inspect,
    merge,
    scatter_add,
    sparse_writer,
)
from mpicomp.kernels.host.patches import change_writer, digest, encode_changes
from mpicomp.kernels.host.segments import largest_in_segments
from mpicomp.kernels.host.selection import (
    all_below,
    divide_largest,
    largest,
    raise_not_finite,
)
from mpicomp.kernels.host.statistics import (
    checksum,
    sides,
    with_magnitudes,
)
from mpicomp.kernels.host.streaming import (
    add,
    add_parts,
    add_scaled,
    clear,
    multiply,
    quotient,
)
from mpicomp.kernels.host.transforms import hadamard, hadamard_writer, signs

__all__ = [
    "accumulate",
    "add",
    "add_largest",
    "add_parts",
    "add_scaled",
    "all_below",
    "change_writer",
    "checksum",
    "clear",
    "consecutive",
    "decoder",
    "digest",
    "divide",
    "divide_largest",
    "encode_changes",
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
    "sides",
    "signs",
    "sparse_writer",
    "to_bitmap",
    "to_elias_fano",
    "to_offsets",
    "with_magnitudes",
]
