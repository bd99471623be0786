"""AdaComp: select per bin the entries that exceed the bin maximum after the gradient is added once more.

Source: C.-Y. Chen, J. Choi, D. Brand, A. Agrawal, W. Zhang, K. Gopalakrishnan, "AdaComp: adaptive residual gradient
compression for data-parallel distributed training", AAAI 2018 (arXiv 1712.02679).

With the residue R and the new gradient dW: G = R + dW, H = G + dW; an entry is sent if |H| >= max |G| over its bin.
All entries are sent with one magnitude, the mean of max |G| over all bins, and the sign of G: with `codec="smallest"` a
value takes a bit. The difference is in the residual.

Differences from the paper: a bin of zeros sends nothing, though it counts in the mean; if nothing is selected from a
vector that is not zero, its largest entry is sent. Messages are those of `mpicomp.codec`, where an index takes about
5.3 bits at five entries in a bin of 50; the paper takes 8 bits for an offset in its bin and a sign.
"""

from typing import Any

import numpy as np

from mpicomp.arrays import kernels_for, namespace
from mpicomp.compressors.base import Compressor
from mpicomp.compressors.common import finite_vector, mean_and_largest, placed
from mpicomp.settings import to_integer
from mpicomp.vector import SparseVector


class AdaComp(Compressor):
    """Select adaptively in bins of consecutive entries, and send one magnitude.

    The bins and the magnitude are those of one layer: give an exchange named tensors, and a function of their names and
    shapes for compressors with other bins; see `GradientExchange`. In one flat vector bins straddle layers.

    bin_size: entries in a bin, 1 to 16384, else ValueError. The paper uses 50 for convolutions and 500 for fully
    connected and recurrent layers.

    >>> AdaComp(bin_size=2).compress(gradient, gradient=gradient).indices.tolist()
    [1, 3]
    """

    def __init__(self, bin_size: int = 50) -> None:
        self.bin_size = to_integer("bin_size", bin_size, 1, 16384)

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the selected entries, all of one magnitude; see `Compressor.compress`.

        gradient: the new gradient, of the size of `corrected`; ValueError without it.
        """
        if gradient is None:
            raise ValueError(
                "AdaComp needs the new gradient too: take ErrorFeedback() or NoFeedback(), or call compress(corrected, "
                "gradient=gradient)"
            )
        dense, new = finite_vector(corrected), finite_vector(gradient)
        if dense.size != new.size:
            raise ValueError(f"gradient has {new.size} values: expected {dense.size} as in corrected")
        bins = -(-dense.size // self.bin_size)
        padded = namespace(dense).zeros(bins * self.bin_size, np.float64)
        padded[: dense.size] = np.abs(dense)
        largest = padded.reshape(bins, self.bin_size).max(axis=1)
        with np.errstate(over="ignore"):  # infinity exceeds any maximum, as the sum does
            padded[: dense.size] = np.abs(dense.astype(np.float64) + new)
        chosen = padded.reshape(bins, self.bin_size) >= largest[:, None]
        positions = np.flatnonzero(chosen.reshape(-1)[: dense.size] & (dense != 0))
        if not positions.size:  # the new gradient cancels the largest entry of every bin
            positions, _ = kernels_for(dense).largest(dense, 1)
        scale = dense.dtype.type(mean_and_largest(largest)[0])
        if positions.size and not scale:  # the mean with many bins of zeros may vanish
            scale = np.finfo(dense.dtype).smallest_subnormal
        values = np.copysign(scale, dense[positions])
        return self.reported(placed(positions, values, dense.size), float(scale))
