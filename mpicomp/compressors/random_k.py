"""Random-k and block-random-k: select random positions, from a seed that all ranks share.

Source: S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with memory", NeurIPS 2018 (arXiv 1809.07599); blocks:
T. Vogels, S. P. Karimireddy, M. Jaggi, PowerSGD, NeurIPS 2019 (arXiv 1905.13727), its baseline "random block".

Every rank draws the same positions in the same call, without replacement; so the union has k entries, and with
`aligned=True` no index is sent: see `collectives.aligned_allreduce`. NumPy's global random state is not used.

Differences from the papers: exact zeros are not sent, unless `aligned`.
"""

from typing import Any

import numpy as np

from mpicomp.arrays import Array, beside
from mpicomp.compressors.base import expect_integer
from mpicomp.compressors.common import Density, all_at, at_positions, check_number, finite_vector
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
        check_number("seed", seed, 0)
        self.seed, self.unbiased, self.aligned, self.step = int(seed), bool(unbiased), bool(aligned), 0

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the entries at this step's positions; see `Compressor.compress`."""
        dense = finite_vector(corrected)
        positions = beside(self.positions(dense.size), dense)
        vector = (all_at if self.aligned or self.unbiased else at_positions)(dense, positions)
        self.step += 1
        return self.reported(self._weighted(vector) if self.unbiased else vector)

    def _weighted(self, vector: SparseVector) -> SparseVector:
        """Divide the values by their probability; if all are zero, no other entry replaces them."""
        if vector.nnz:
            wide = vector.values.astype(np.promote_types(vector.dtype, np.float32))
            values = (wide / self.probability(vector.length)).astype(vector.dtype)
            vector = SparseVector(vector.indices, values, vector.length)
        return vector if self.aligned else without_zeros(vector)

    def probability(self, length: int) -> float:
        """Return the probability that a position is drawn, the same for all."""
        return self.share(length)

    def positions(self, length: int) -> Array:
        """Return the positions of this step, increasing; in host memory."""
        rng = np.random.default_rng([self.seed, self.step])
        return np.sort(rng.choice(length, min(length, self.count(length)), replace=False, shuffle=False))


class BlockRandomK(RandomK):
    """Select whole blocks of consecutive positions at random, the same ones on all ranks.

    block: positions in a block, at least 1, else ValueError; ceil(k / block) blocks are drawn. The other parameters are
    those of `RandomK`. A block takes one random number, and is read and written in order.

    >>> BlockRandomK(k=2, block=2, seed=1).compress(gradient).span
    2
    """

    def __init__(
        self,
        density: float | None = None,
        *,
        k: int | None = None,
        block: int = 256,
        seed: int = 0,
        unbiased: bool = False,
        aligned: bool = False,
    ) -> None:
        super().__init__(density, k=k, seed=seed, unbiased=unbiased, aligned=aligned)
        check_number("block", block)
        self.block = int(block)

    def probability(self, length: int) -> float:
        """Return the probability that a block, and so each of its positions, is drawn."""
        blocks, wanted = self._blocks(length)
        return wanted / blocks if blocks else 0.0

    def _blocks(self, length: int) -> tuple[int, int]:
        """Return the number of blocks, and how many of them are drawn."""
        return -(-length // self.block), -(-min(length, self.count(length)) // self.block)

    def positions(self, length: int) -> Array:
        """Return the positions of this step, increasing; the last block of the vector may be short."""
        blocks, wanted = self._blocks(length)
        rng = np.random.default_rng([self.seed, self.step])
        starts = np.sort(rng.choice(blocks, wanted, replace=False, shuffle=False)) * self.block
        positions = (starts[:, None] + np.arange(self.block)).reshape(-1)
        return positions[positions < length]
