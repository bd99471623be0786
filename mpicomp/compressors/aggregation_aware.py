"""Aggregation-aware selection: prefer what the last aggregate has, so that the ranks' supports overlap.

Inspired by "Communication usage optimization of gradient sparsification with aggregation in deep learning", ICNCC 2018:
what a server sends out is the union of the ranks' supports, and large gradients stay large for a short time only. No
formula of the paper is public; the weights here are our own.

A rank knows the support A of the last aggregate, its magnitudes, and how long each index has been out of it. The k
largest scores travel; feedback keeps the rest, so nothing starves for ever, but for what a quota of 1 leaves out.
"""

from typing import Any

import numpy as np

from mpicomp.arrays import beside, kernels_for, namespace
from mpicomp.compressors.common import Array, Density, at_positions, finite_vector
from mpicomp.vector import SparseVector

METRICS = ("support", "recency", "votes", "magnitude", "quota")


def _check_bonus(compressor: "AggregationAware", array: Array | None) -> Array | None:
    """Return a loaded bonus, None where there is none; see `mpicomp.compressors.base.Check`."""
    if array is None:
        return None
    held, most = compressor._bonus, np.inf if compressor.metric == "magnitude" else 1
    if array.ndim != 1 or array.dtype not in (np.float32, np.float64):
        raise ValueError("a vector of float32 or float64")
    if held is not None and (held.size, held.dtype) != (array.size, array.dtype):
        raise ValueError(f"{held.size} values of {held.dtype} as in the last aggregate; reset() first to change that")
    if not (np.isfinite(array).all() and (array >= 0).all() and (array <= most).all()):
        raise ValueError(f"finite values from 0 to {most}")
    return array.copy()


class AggregationAware(Density):
    """Select by magnitude and by what the last aggregates had.

    density or k: see `Density`. metric, for the magnitude x of an entry:

        support    x (1 + weight) where the last aggregate has the entry
        recency    x (1 + weight decay^age), age in aggregates since it was there
        votes      x (1 + weight votes / ranks), of how many ranks sent it last
        magnitude  x + weight |A|
        quota      the share `quota` of k inside the last aggregate, the rest, at least one below a quota of 1, anywhere

    weight: at least 0. decay, quota: 0 to 1. Raises ValueError otherwise. One object for one vector; call `observe`
    with every aggregate. Before the first one it is exact top-k.
    """

    state = {"_bonus": _check_bonus}
    observes = True

    def __init__(
        self,
        density: float | None = None,
        *,
        k: int | None = None,
        metric: str = "support",
        weight: float = 1.0,
        decay: float = 0.8,
        quota: float = 0.75,
    ) -> None:
        super().__init__(density, k=k)
        if metric not in METRICS:
            raise ValueError(f"metric is {metric!r}: expected one of {list(METRICS)}")
        if not (0 <= weight < np.inf and 0 <= decay <= 1 and 0 <= quota <= 1):
            raise ValueError(f"got weight={weight}, decay={decay}, quota={quota}: expected >= 0, 0 to 1, and 0 to 1")
        self.metric, self.weight, self.decay, self.quota = metric, float(weight), float(decay), float(quota)
        self._bonus: Array | None = None  # of each position, before the weight

    def observe(self, aggregate: SparseVector, votes: Array | None = None) -> None:
        """Take note of what the ranks' sum was.

        aggregate: as the collective returned it. votes: for the metric "votes", the share of the ranks that sent each
        of its entries, 0 to 1, one for each; ValueError without it.
        """
        values = aggregate.values
        zeros = namespace(values).zeros(aggregate.length, np.promote_types(values.dtype, np.float32))
        before = zeros if self._bonus is None else beside(self._bonus, values)
        bonus = before * zeros.dtype.type(self.decay if self.metric == "recency" else 0)
        if self.metric == "votes":
            if votes is None or len(votes) != aggregate.nnz:
                raise ValueError(
                    f"votes is {votes!r}: expected a share for each of {aggregate.nnz} entries; "
                    "take sparse_allgather, or partial(sparse_allreduce, votes=True)"
                )
            bonus[aggregate.indices] = beside(votes, values)
        else:  # a sum that was filled up has zeros where nothing came
            there = np.flatnonzero(values)
            bonus[aggregate.indices[there]] = np.abs(values[there]) if self.metric == "magnitude" else 1
        self._bonus = bonus

    def reset(self) -> None:
        """Forget the aggregates."""
        self._bonus = None

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the k entries of the largest scores; see `Compressor.compress`."""
        dense = finite_vector(corrected)
        self._check_fit(dense)
        return self.reported(at_positions(dense, self._positions(dense)))

    def _check_fit(self, dense: Array) -> None:
        """Raise ValueError unless the last aggregate, observed or loaded, is one of vectors such as this."""
        if self._bonus is None:
            return
        if self._bonus.size != dense.size:
            raise ValueError(f"corrected has {dense.size} values: expected {self._bonus.size} as in the last aggregate")
        if self._bonus.dtype != np.promote_types(dense.dtype, np.float32):
            raise ValueError(f"corrected is {dense.dtype}: the last aggregate was kept in {self._bonus.dtype}")

    def _inside(self, k: int) -> int:
        """Return how many places are for what was in the last aggregate: below a quota of 1 not all of them."""
        return k if self.quota == 1 else min(round(self.quota * k), k - 1)

    def _positions(self, dense: Array) -> Array:
        k = self.count(dense.size)
        scores = np.abs(dense).astype(np.float32 if dense.dtype == np.float16 else dense.dtype)
        if self._bonus is None:
            return _largest(scores, k)
        bonus = beside(self._bonus, dense)
        if self.metric == "quota":
            inside = _largest(np.where(bonus > 0, scores, 0), self._inside(k))
            scores[inside] = 0
            return np.sort(np.concatenate([inside, _largest(scores, k - inside.size)]))
        if self.metric == "magnitude":
            scores += np.where(scores > 0, scores.dtype.type(self.weight) * bonus, 0).astype(scores.dtype)
        else:
            scores *= (1 + self.weight * bonus).astype(scores.dtype)
        return _largest(scores, k)


def _largest(scores: Array, k: int) -> Array:
    positions: Array = kernels_for(scores).top_k(scores, k)
    return positions
