"""The basis of the discrete cosine transform (DCT-II), as in DeMo; the library has the Walsh-Hadamard basis.

Source: B. Peng, L. Lister, D. Kingma et al., "DeMo: decoupled momentum optimization",
arXiv 2411.19870.

Differences from the paper: chunks are of consecutive values of the flat vector; the
paper cuts tensors into tiles of up to 64 x 64.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.fft import dct, idct

from mpicomp import Basis

Vector = NDArray[Any]


class Cosine(Basis):
    """The basis of the orthonormal DCT-II, of NumPy's arrays. The shorter chunk at the end has one of its own length.

    chunk: values, 1 to 4096, else ValueError.
    """

    def _forward(self, vector: Vector, out: Vector) -> None:
        self._transform(dct, vector, out)

    def _inverse(self, coefficients: Vector, out: Vector) -> None:
        self._transform(idct, coefficients, out)

    def _transform(
        self, transform: Callable[..., Vector], vector: Vector, out: Vector
    ) -> None:
        wide = vector.astype(np.promote_types(vector.dtype, np.float32), copy=False)
        whole = vector.size // self.chunk * self.chunk
        for start, end, size in (
            (0, whole, self.chunk),
            (whole, vector.size, vector.size - whole),
        ):
            if start < end:
                out[start:end] = transform(
                    wide[start:end].reshape(-1, size), norm="ortho"
                ).reshape(-1)
