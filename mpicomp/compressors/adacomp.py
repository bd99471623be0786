"""AdaComp: select per bin the entries that exceed the bin maximum after the gradient is added once more.

Source: C.-Y. Chen, J. Choi, D. Brand, A. Agrawal, W. Zhang, K. Gopalakrishnan,
"AdaComp: adaptive residual gradient compression for data-parallel distributed
training", AAAI 2018 (arXiv 1712.02679).

With the residue R and the new gradient dW: G = R + dW, H = G + dW; an entry is sent if |H| >= max |G| over its bin.
All entries are sent with one magnitude, the mean of max |G| over all bins, and the sign of G: with `codec="smallest"` a
value takes a bit. The difference is in the residual.

Differences from the paper: a bin of zeros sends nothing, though it counts in the mean; if nothing is selected from a
vector that is not zero, its largest entry is sent. Messages are those of `mpicomp.codec`, where an index takes about
5.3 bits at five entries in a bin of 50; the paper takes 8 bits for an offset in its bin and a sign.
"""

from collections.abc import Sequence

import numpy as np

from mpicomp.arrays.device import kernels_for
from mpicomp.compressors.base import SegmentedCompressor, known
from mpicomp.correction import Correction
from mpicomp.settings import to_integer
from mpicomp.vector import SparseVector

_REMEDY = (
    "AdaComp needs the new gradient too: take ErrorFeedback() or NoFeedback(), or call compress(corrected, "
    "gradient=gradient)"
)


class AdaComp(SegmentedCompressor):
    """Select adaptively in bins of consecutive entries, and send one magnitude.

    The bins and the magnitude are those of one layer: give an exchange named tensors, and a
    function of their names and shapes for compressors with other bins (`GradientExchange`).
    In one flat vector bins straddle layers.

    Args:
        bin_size: entries in a bin, 1 to 16384. The paper uses 50 for convolutions and 500 for
            fully connected and recurrent layers.

    Raises:
        ValueError: `bin_size` is out of range.

    Source: C.-Y. Chen et al., AAAI 2018 (arXiv 1712.02679).

    >>> AdaComp(bin_size=2).compress(gradient, gradient=gradient).indices.tolist()
    [1, 3]
    """

    varying = ("bin_size",)

    def __init__(self, bin_size: int = 50) -> None:
        self.bin_size = to_integer("bin_size", bin_size, 1, 16384)

    def select(self, correction: Correction, bounds: Sequence[int]) -> SparseVector:
        """Return the selected entries, of one magnitude in each segment; see `Compressor.select`.

        Raises ValueError without the new gradient, and if it has another size.
        """
        parts = correction.gradient
        if parts is None:
            raise ValueError(_REMEDY)
        corrected = correction.out
        sizes = np.diff(bounds)
        for part, size in zip(parts, sizes.tolist(), strict=True):
            if part.size != size:
                raise ValueError(
                    f"gradient has {part.size} values: expected {size} as in corrected"
                )
        kernels = kernels_for(corrected)
        bins = np.broadcast_to(self.bin_size, sizes.shape).tolist()
        entries = kernels.entries_in_bins(
            corrected,
            parts,
            bounds,
            bins,
            residual=correction.residual,
            decay=correction.decay,
        )
        return known(corrected.size, bounds, entries)
