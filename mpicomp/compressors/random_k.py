"""Random-k and block-random-k: positions drawn from a seed that all ranks share.

Source: S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with memory", NeurIPS 2018 (arXiv 1809.07599); blocks:
T. Vogels, S. P. Karimireddy, M. Jaggi, PowerSGD, NeurIPS 2019 (arXiv 1905.13727), its baseline "random block".

Every rank draws the same positions in the same call, without replacement, from a generator of its own; so the union has
k entries, and with `aligned=True` no index has to travel: see `collectives.aligned_allreduce`. NumPy's global random
state is not touched.
"""

from typing import Any

import numpy as np

from mpicomp.arrays import beside
from mpicomp.compressors.base import expect_integer
from mpicomp.compressors.common import Array, Density, all_at, at_positions, check_number, finite_vector
from mpicomp.vector import SparseVector, without_zeros


class RandomK(Density):
    """Select k positions at random, the same ones on all ranks.

    density or k: see `Density`. seed: the same on all ranks. unbiased: divide the values by the probability with which
    their position is drawn, so that what travels is the gradient on average; for use without error feedback only, which
    keeps the rest anyway. Nothing travels then where all that is drawn is zero. aligned: send exact zeros too, so that
    the supports are the same on all ranks.

    `step` counts the calls, and is a part of the seed: set it when a run is taken up again.
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
        """Divide the values by their probability; no other entry may come where they are all zero."""
        if vector.nnz:
            wide = vector.values.astype(np.promote_types(vector.dtype, np.float32))
            values = (wide / self.probability(vector.length)).astype(vector.dtype)
            vector = SparseVector(vector.indices, values, vector.length)
        return vector if self.aligned else without_zeros(vector)

    def probability(self, length: int) -> float:
        """Return with which probability a position is drawn, each alike."""
        return self.share(length)

    def positions(self, length: int) -> Array:
        """Return the positions of this step, increasing; in main memory."""
        rng = np.random.default_rng([self.seed, self.step])
        return np.sort(rng.choice(length, min(length, self.count(length)), replace=False, shuffle=False))


class BlockRandomK(RandomK):
    """Select whole blocks of consecutive positions at random, the same ones on all ranks.

    block: positions in a block, at least 1, else ValueError; as many blocks as hold k positions, rounded up. The others
    as for `RandomK`. Blocks cost one random number each, and are read and written in order.
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
        """Return with which probability a block is drawn, and so each of its positions."""
        blocks, wanted = self._blocks(length)
        return wanted / blocks if blocks else 0.0

    def _blocks(self, length: int) -> tuple[int, int]:
        """Return how many blocks there are, and how many of them are drawn."""
        return -(-length // self.block), -(-min(length, self.count(length)) // self.block)

    def positions(self, length: int) -> Array:
        """Return the positions of this step, increasing: of its blocks, the last of which may be short."""
        blocks, wanted = self._blocks(length)
        rng = np.random.default_rng([self.seed, self.step])
        starts = np.sort(rng.choice(blocks, wanted, replace=False, shuffle=False)) * self.block
        positions = (starts[:, None] + np.arange(self.block)).reshape(-1)
        return positions[positions < length]
