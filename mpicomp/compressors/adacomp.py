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
from itertools import pairwise
from typing import Any

import numpy as np

from mpicomp.arrays import Array, kernels_for, to_vector
from mpicomp.compressors.base import Compressor, Summands
from mpicomp.compressors.common import mean_and_largest, placed
from mpicomp.settings import to_integer
from mpicomp.vector import SparseVector, merge

_REMEDY = (
    "AdaComp needs the new gradient too: take ErrorFeedback() or NoFeedback(), or call compress(corrected, "
    "gradient=gradient)"
)


class AdaComp(Compressor):
    """Select adaptively in bins of consecutive entries, and send one magnitude.

    The bins and the magnitude are those of one layer: give an exchange named tensors,
    and a function of their names and shapes for compressors with other bins; see
    `GradientExchange`. In one flat vector bins straddle layers.

    bin_size: entries in a bin, 1 to 16384, else ValueError. The paper uses 50 for
    convolutions and 500 for fully connected and recurrent layers.

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
            raise ValueError(_REMEDY)
        dense, new = to_vector(corrected), to_vector(gradient)
        if dense.size != new.size:
            raise ValueError(
                f"gradient has {new.size} values: expected {dense.size} as in corrected"
            )
        return _selected(
            [self], dense, [0, dense.size], [new.astype(dense.dtype, copy=False)]
        )

    def compress_segments(
        self,
        corrected: Array,
        bounds: Sequence[int],
        *,
        summands: Summands | None = None,
    ) -> SparseVector:
        """See `Compressor.compress_segments`; one pass over all segments."""
        return self.compress_each(
            [self] * (len(bounds) - 1), corrected, bounds, summands=summands
        )

    @staticmethod
    def compress_each(
        compressors: Sequence[Any],
        corrected: Array,
        bounds: Sequence[int],
        *,
        summands: Summands | None = None,
    ) -> SparseVector:
        """See `Compressor.compress_each`; one pass over all segments, each of which has bins of its own."""
        if summands is None:
            raise ValueError(_REMEDY)
        residual, scale, parts = summands
        return _selected(compressors, corrected, bounds, parts, (residual, scale))

    def is_joined_with(self, other: Compressor) -> bool:
        """See `Compressor.is_joined_with`; bins may differ."""
        return isinstance(other, AdaComp)


def _selected(
    compressors: Sequence[AdaComp],
    dense: Array,
    bounds: Sequence[int],
    parts: Sequence[Array],
    summand: tuple[Array, float] | None = None,
) -> SparseVector:
    """Return the entries of all segments; each compressor reports on its own. parts: of the new gradient."""
    scales = np.zeros(len(parts), dense.dtype)

    def magnitudes(largest: Array, places: Array) -> Array:
        scales[:] = _means(largest, places, dense.dtype)
        return scales

    bins = [each.bin_size for each in compressors]
    kernels = kernels_for(dense)
    indices, values, places = kernels.entries_in_bins(
        dense, parts, bounds, bins, magnitudes, summand=summand
    )
    vector = SparseVector.trusted(indices, values, dense.size)
    rows = zip(
        pairwise(bounds), pairwise(places.tolist()), scales, compressors, strict=True
    )
    for (first, end), (low, high), scale, compressor in rows:
        own = SparseVector.trusted(indices[low:high], values[low:high], end - first)
        # the new gradient cancels the largest entry of every bin
        if scale and low == high:
            positions, largest = kernels.largest(dense[first:end], 1)
            own = placed(positions, np.copysign(scale, largest), end - first)
            vector = merge(vector, placed(positions + first, own.values, dense.size))
        compressor.reported(own, float(scale))
    return vector


def _means(largest: Array, places: Array, dtype: np.dtype[Any]) -> Array:
    """Return the mean over the bins of each segment, above zero if a bin is."""
    found = kernels_for(largest).magnitudes_in_segments(largest, places, two=False)
    means, most = found[:, 0], found[:, 1]
    # the sum may be infinite
    for row in np.flatnonzero(
        most > np.finfo(np.float64).max / np.diff(places).clip(1)
    ):
        means[row] = mean_and_largest(largest[places[row] : places[row + 1]])[0]
    scales: Array = means.astype(dtype)
    # as the mean with many bins of zeros
    scales[(scales == 0) & (most > 0)] = np.finfo(dtype).smallest_subnormal
    return scales
