"""Aggregation-aware selection: prefer the entries of the last aggregate, so that the ranks' supports overlap.

Inspired by "Communication usage optimization of gradient sparsification with aggregation in deep learning", ICNCC 2018:
a server sends the union of the ranks' supports, and large gradients stay large for a short time only. Every exact sum
sends that union.

Differences from the paper: no formula of it is public; the scores below are our own.

A rank knows the support A of the last aggregate, its magnitudes, and how many aggregates ago each index was in one. The
k largest scores are sent; feedback keeps the rest, so every entry is sent at some time, except with a quota of 1.
"""

from typing import Any

import numpy as np

from mpicomp.arrays import Array, kernels_for, namespace, to_device_of
from mpicomp.compressors.common import Density, at_positions, finite_vector
from mpicomp.settings import to_choice, to_number
from mpicomp.vector import SparseVector

METRICS = ("support", "recency", "votes", "magnitude", "quota")


def _check_bonus(compressor: "AggregationAware", array: Array | None) -> Array | None:
    """Return a loaded bonus, None if there is none; see `mpicomp.compressors.base.Check`."""
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
    """Select by magnitude and by the last aggregates.

    density or k: see `Density`. metric: the score of an entry with the magnitude x:

        support    x (1 + weight) if the last aggregate has the entry
        recency    x (1 + weight decay^age), age in aggregates since the last one that had it
        votes      x (1 + weight votes / ranks), votes: the number of ranks that sent it last
        magnitude  x + weight |A|
        quota      x; the fraction `quota` of k is selected inside the last aggregate, the rest, at least one entry
                   below a quota of 1, anywhere

    weight: at least 0. decay, quota: 0 to 1. Raises ValueError otherwise. One object serves one vector; call `observe`
    with every aggregate. Before the first one the selection is exact top-k.

    >>> AggregationAware(k=2).compress(gradient).indices.tolist()
    [1, 3]
    """

    state = {"_bonus": _check_bonus}

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
        self.metric = to_choice("metric", metric, METRICS)
        self.weight = to_number("weight", weight, least=0)
        self.decay, self.quota = to_number("decay", decay, least=0, most=1), to_number("quota", quota, least=0, most=1)
        self._bonus: Array | None = None  # of each position, before the weight

    def observe(self, aggregate: SparseVector, votes: Array | None = None) -> None:
        """Receive the sum over the ranks.

        aggregate: as the collective returned it. votes: for the metric "votes", for each entry the fraction of the
        ranks that sent it, 0 to 1, else ValueError.
        """
        values = aggregate.values
        zeros = namespace(values).zeros(aggregate.length, np.promote_types(values.dtype, np.float32))
        before = zeros if self._bonus is None else to_device_of(self._bonus, values)
        bonus = before * zeros.dtype.type(self.decay if self.metric == "recency" else 0)
        if self.metric == "votes":
            if votes is None or len(votes) != aggregate.nnz:
                raise ValueError(
                    f"votes is {votes!r}: expected a share for each of {aggregate.nnz} entries; "
                    "use partial(sparse_allreduce, votes=True)"
                )
            bonus[aggregate.indices] = to_device_of(votes, values)
        else:  # a filled sum has zeros where no rank sent an entry
            sent = np.flatnonzero(values)
            bonus[aggregate.indices[sent]] = np.abs(values[sent]) if self.metric == "magnitude" else 1
        self._bonus = bonus

    def reset(self) -> None:
        """Clear the stored aggregates."""
        self._bonus = None

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the k entries of the largest scores; see `Compressor.compress`."""
        dense, bonus = finite_vector(corrected), self._bonus
        if bonus is not None and bonus.size != dense.size:
            raise ValueError(f"corrected has {dense.size} values: expected {bonus.size} as in the last aggregate")
        if bonus is not None and bonus.dtype != np.promote_types(dense.dtype, np.float32):
            raise ValueError(f"corrected is {dense.dtype}: the last aggregate was stored in {bonus.dtype}")
        return self.reported(at_positions(dense, self._positions(dense)))

    def _positions(self, dense: Array) -> Array:
        """Return the positions of the k largest scores."""
        k, largest = self.count(dense.size), kernels_for(dense).largest
        scores = np.abs(dense).astype(np.float32 if dense.dtype == np.float16 else dense.dtype)
        bonus = None if self._bonus is None else to_device_of(self._bonus, dense)
        if bonus is None:
            pass
        elif self.metric == "quota":
            most = k if self.quota == 1 else min(round(self.quota * k), k - 1)
            inside = largest(np.where(bonus > 0, scores, 0), most)[0]
            scores[inside] = 0
            return np.sort(np.concatenate([inside, largest(scores, k - inside.size)[0]]))
        elif self.metric == "magnitude":
            scores += np.where(scores > 0, scores.dtype.type(self.weight) * bonus, 0).astype(scores.dtype)
        else:
            scores *= (1 + self.weight * bonus).astype(scores.dtype)
        return largest(scores, k)[0]  # type: ignore[no-any-return]
