"""Hypothesis strategies of sparse vectors."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mpicomp import SparseVector

DTYPES = [np.dtype(t) for t in (np.float16, np.float32, np.float64)]


def finite_values(dtype, size):
    """Return a strategy of arrays of a size, or of a shape, of finite values whose sums in pairs are finite too."""
    bound = float(np.finfo(dtype).max) / 4
    return hnp.arrays(
        dtype,
        size,
        elements=hnp.from_dtype(np.dtype(dtype), min_value=-bound, max_value=bound),
    )


@st.composite
def sparse_vectors(draw, length=None, dtype=None, width=None):
    """Draw a vector; `width` makes one of rows."""
    length = draw(st.integers(0, 50)) if length is None else length
    dtype = draw(st.sampled_from(DTYPES)) if dtype is None else dtype
    indices = np.flatnonzero(draw(hnp.arrays(np.bool_, length)))
    shape = (indices.size,) if width is None else (indices.size, width)
    return SparseVector(indices, draw(finite_values(dtype, shape)), length)
