"""Warm-up: a schedule of densities for the first steps of a training.

Source: Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally, "Deep gradient compression", ICLR
2018 (arXiv 1712.01887).
"""

from collections.abc import Sequence

from mpicomp.compressors.base import (
    Compressor,
    SegmentedCompressor,
    Wrapper,
)
from mpicomp.compressors.common import to_density
from mpicomp.correction import Correction
from mpicomp.settings import to_integer
from mpicomp.vector import SparseVector


class WarmUp(Wrapper, SegmentedCompressor):
    """Run a compressor with a schedule of densities.

    To quantise as well: `Quantised(WarmUp(...), "float16")`.

    Args:
        compressor: one with a `density`.
        densities: one for each stage, each in (0, 1]; the last one is kept.
        calls: the number of calls in a stage.

    Raises:
        TypeError: `compressor` is no compressor.
        ValueError: the list is empty, a number is out of range, or the compressor was made with
            k.

    Source: Y. Lin et al., Deep Gradient Compression, ICLR 2018 (arXiv 1712.01887).

    >>> compressor = WarmUp(TopK(0.25), [1.0, 0.5, 0.25])
    >>> [compressor.compress(gradient).nnz for step in range(4)]
    [4, 2, 1, 1]
    """

    state = {"step": (0, 2**62)}

    def __init__(
        self,
        compressor: Compressor,
        densities: Sequence[float] = (0.25, 0.0625, 0.015625, 0.004, 0.001),
        *,
        calls: int = 1,
    ) -> None:
        super().__init__(compressor)
        if not len(densities) or compressor.density is None:
            raise ValueError(
                f"got densities={list(densities)}, compressor={compressor!r}: expected at least one density, and a "
                "compressor made with density=, such as TopK(0.001); in few bits Quantised(WarmUp(TopK(0.001)), form)"
            )
        self.densities = list(map(to_density, densities))
        self.calls = to_integer("calls", calls)
        self.step = 0

    def select(self, correction: Correction, bounds: Sequence[int]) -> SparseVector:
        """Select at the density of this step; see `Compressor.select`."""
        target = self.compressor.density
        stage = min(self.step // self.calls, len(self.densities) - 1)
        self.compressor.density = self.densities[stage]
        try:
            vector = self.compressor.select(correction, bounds)
        finally:
            self.compressor.density = target
        self.step += 1
        return vector
