"""Random-k: select random positions, from a seed that all ranks share.

Source: S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with memory", NeurIPS 2018 (arXiv 1809.07599).

Every rank draws the same positions in the same call, without replacement; so the union has k entries, and with
`aligned=True` no index is sent: see `collectives.aligned_allreduce`. NumPy's global random state is not used.

Difference from the paper: exact zeros are not sent, unless `aligned`.
"""

from typing import Any

import numpy as np

from mpicomp.arrays import to_device_of
from mpicomp.compressors.base import expect_integer
from mpicomp.compressors.common import Density, all_at, at_positions, finite_vector
from mpicomp.settings import to_bool, to_integer
from mpicomp.vector import SparseVector, without_zeros


class RandomK(Density):
    """Select k positions at random, the same ones on all ranks.

    density or k: see `Density`. seed: the same on all ranks. unbiased: divide the values by the probability that their
    position is drawn, so that the expectation is the gradient; only for use without error feedback, which keeps the
    rest anyway. If all drawn values are zero, nothing is sent then. aligned: send exact zeros too, so that the supports
    are the same on all ranks.

    `step` counts the calls, and is part of the seed: set it when a run is resumed.

    >>> RandomK(k=2, seed=1).compress(gradient).nnz
    2
    """

    state = {"step": expect_integer(0)}

    def __init__(
        self,
        density: float | None = None,
        *,
        k: int | None = None,
        seed: int = 0,
        unbiased: bool = False,
        aligned: bool = False,
    ) -> None:
        super().__init__(density, k=k)
        self.seed, self.step = to_integer("seed", seed, 0), 0
        self.unbiased, self.aligned = to_bool("unbiased", unbiased), to_bool("aligned", aligned)

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the entries at this step's positions; see `Compressor.compress`."""
        dense = finite_vector(corrected)
        rng, count = np.random.default_rng([self.seed, self.step]), min(dense.size, self.count(dense.size))
        positions = to_device_of(np.sort(rng.choice(dense.size, count, replace=False, shuffle=False)), dense)
        vector = (all_at if self.aligned or self.unbiased else at_positions)(dense, positions)
        self.step += 1
        return self.reported(self._weighted(vector) if self.unbiased else vector)

    def _weighted(self, vector: SparseVector) -> SparseVector:
        """Divide the values by their probability; if all are zero, no other entry replaces them."""
        wide = vector.values.astype(np.promote_types(vector.dtype, np.float32))
        vector = vector.with_values((wide / self.share(vector.length)).astype(vector.dtype))
        return vector if self.aligned else without_zeros(vector)
