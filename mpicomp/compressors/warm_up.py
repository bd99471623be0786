"""Warm-up: a schedule of densities for the first steps of a training.

Source: Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally, "Deep gradient compression", ICLR
2018 (arXiv 1712.01887).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mpicomp.arrays import Array
from mpicomp.compressors.base import Compressor, Summands, Wrapper, expect_integer
from mpicomp.compressors.common import to_density
from mpicomp.settings import to_integer
from mpicomp.vector import SparseVector


class WarmUp(Wrapper):
    """Run a compressor with a schedule of densities.

    compressor: any with a `density`; to quantise as well, `Quantised(WarmUp(...),
    "float16")`. densities: one for each stage; the last one is kept. calls: number of
    calls in a stage. Raises ValueError if the list is empty, a number is out of range,
    or the compressor was made with k.

    >>> compressor = WarmUp(TopK(0.25), [1.0, 0.5, 0.25])
    >>> [compressor.compress(gradient).nnz for step in range(4)]
    [4, 2, 1, 1]
    """

    state = {"step": expect_integer(0)}

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
                "compressor made with density="
            )
        self.densities, self.calls, self.step = (
            list(map(to_density, densities)),
            to_integer("calls", calls),
            0,
        )

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Compress at the density of this step; see `Compressor.compress`."""
        with self._stage():
            return self.compressor.compress(corrected, gradient=gradient)

    def compress_segments(
        self,
        corrected: Array,
        bounds: Sequence[int],
        *,
        summands: Summands | None = None,
    ) -> SparseVector:
        """See `Compressor.compress_segments`; calls that of the inner compressor at the density of this step."""
        with self._stage():
            return self.compressor.compress_segments(
                corrected, bounds, summands=summands
            )

    @contextmanager
    def _stage(self) -> Iterator[None]:
        """Set the inner compressor to the density of this step for one call, and count the call if it succeeds."""
        asked = self.compressor.density
        self.compressor.density = self.densities[
            min(self.step // self.calls, len(self.densities) - 1)
        ]
        try:
            yield
        finally:
            self.compressor.density = asked
        self.step, self.report = self.step + 1, self.compressor.report
