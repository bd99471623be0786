"""Aggregation-aware selection: prefer the entries of the last aggregate, so that the ranks' supports overlap.

Inspired by "Communication usage optimization of gradient sparsification with
aggregation in deep learning", ICNCC 2018: a server sends the union of the ranks'
supports, and large gradients stay large for a short time only. Every exact sum sends
that union.

Differences from the paper: no formula of it is public; the scores below are our own.

A rank knows the support A of the last aggregate, its magnitudes, and how many
aggregates ago each index was in one. The k largest scores are sent; feedback keeps the
rest, so every entry is sent at some time, except with a quota of 1.

A bonus never lowers a score, so that the k largest scores are among the k largest
magnitudes and the entries with a bonus: a selection is exact top-k, in one pass with
the addition of the residual, and a choice among these. The history is sparse: with
"recency" an index leaves it once its bonus does not change a score any more.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mpicomp.arrays import (
    Array,
    kernels_for,
    magnitudes,
    nonzero,
    to_device_of,
    to_vector,
)
from mpicomp.compressors.base import Summands
from mpicomp.compressors.common import Density
from mpicomp.compressors.topk import TopK
from mpicomp.settings import to_choice, to_number
from mpicomp.vector import SparseVector, concatenate, merge, places_of, without_zeros

METRICS = ("support", "recency", "votes", "magnitude", "quota")


def _check_bonus(compressor: "AggregationAware", array: Array | None) -> Array | None:
    """Return a loaded bonus, None if there is none; see `mpicomp.compressors.base.Check`."""
    if array is None:
        return None
    held, most = compressor._history, np.inf if compressor.metric == "magnitude" else 1
    if array.ndim != 1 or array.dtype not in (np.float32, np.float64):
        raise ValueError("a vector of float32 or float64")
    if held is not None and (held.length, held.dtype) != (array.size, array.dtype):
        raise ValueError(
            f"{held.length} values of {held.dtype} as in the last aggregate; reset() first to change that"
        )
    if not (np.isfinite(array).all() and (array >= 0).all() and (array <= most).all()):
        raise ValueError(f"finite values from 0 to {most}")
    return array


class AggregationAware(Density):
    """Select by magnitude and by the last aggregates.

    density or k: see `Density`. metric: the score of an entry with the magnitude x:

        support    x (1 + weight) if the last aggregate has the entry
        recency    x (1 + weight decay^age), age in aggregates since the last one that had it
        votes      x (1 + weight votes / ranks), votes: the number of ranks that sent it last
        magnitude  x + weight |A|
        quota      x; the fraction `quota` of k is selected inside the last aggregate, the rest, at least one entry
                   below a quota of 1, anywhere

    weight: at least 0. decay, quota: 0 to 1. Raises ValueError otherwise. One object
    serves one vector; call `observe` with every aggregate. Before the first one the
    selection is exact top-k.

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
        self.decay, self.quota = (
            to_number("decay", decay, least=0, most=1),
            to_number("quota", quota, least=0, most=1),
        )
        # the bonus of each position, before the weight
        self._history: SparseVector | None = None

    @property
    def _bonus(self) -> Array | None:
        """The history as it is saved, a dense vector."""
        return None if self._history is None else self._history.to_dense()

    @_bonus.setter
    def _bonus(self, bonus: Array | None) -> None:
        self._history = None if bonus is None else SparseVector.from_dense(bonus)

    def observe(self, aggregate: SparseVector, votes: Array | None = None) -> None:
        """Receive the sum over the ranks.

        aggregate: as the collective returned it. votes: for the metric "votes", for
        each entry the fraction of the ranks that sent it, 0 to 1, else ValueError.
        """
        if self.metric == "votes":
            if votes is None or len(votes) != aggregate.nnz:
                raise ValueError(
                    f"votes is {votes!r}: expected a share for each of {aggregate.nnz} entries; "
                    "use partial(sparse_allreduce, votes=True)"
                )
            seen = aggregate.with_values(to_device_of(votes, aggregate.values))
        else:  # a filled sum has zeros where no rank sent an entry
            seen = without_zeros(aggregate)
        bonus = (
            magnitudes(seen.values)
            if self.metric in ("votes", "magnitude")
            else np.ones_like(seen.values)
        )
        kind = np.promote_types(aggregate.dtype, np.float32)
        latest = SparseVector.trusted(
            seen.indices.copy(), bonus.astype(kind), aggregate.length
        )
        if self.metric == "recency" and self._history is not None:
            before = _beside(self._history, bonus)
            both = merge(
                before.with_values(before.values * kind.type(self.decay)), latest
            )
            ages = np.minimum(both.values, kind.type(1))
            # the others do not change a score any more
            places = np.flatnonzero(1 + self.weight * ages > 1)
            latest = both.with_values(ages).divide(places)[0]
        self._history = latest

    def reset(self) -> None:
        """Clear the stored aggregates."""
        self._history = None

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the k entries of the largest scores; see `Compressor.compress`."""
        dense = to_vector(corrected)
        return self.compress_each([self], dense, [0, dense.size])

    def compress_segments(
        self,
        corrected: Array,
        bounds: Sequence[int],
        *,
        summands: Summands | None = None,
    ) -> SparseVector:
        """See `Compressor.compress_segments`; one object is for one segment, several take `compress_each`."""
        if len(bounds) != 2:
            return super().compress_segments(corrected, bounds, summands=summands)
        return self.compress_each([self], corrected, bounds, summands=summands)

    @staticmethod
    def compress_each(
        compressors: Sequence[Any],
        corrected: Array,
        bounds: Sequence[int],
        *,
        summands: Summands | None = None,
    ) -> SparseVector:
        """See `Compressor.compress_each`: exact top-k, and a choice among its entries and those of the history.

        No bonus lowers a score, so that no other entry is selected.
        """
        one, kind = compressors[0], np.promote_types(corrected.dtype, np.float32)
        for each, (first, end) in zip(compressors, pairwise(bounds), strict=True):
            each._check_fits(end - first, corrected.dtype)
        top, alone = (
            TopK(one.density, k=one.k),
            summands is None and len(compressors) == 1,
        )
        sent = (
            top.compress(corrected)
            if alone
            else top.compress_segments(corrected, bounds, summands=summands)
        )
        if any(each._history is not None for each in compressors):
            parts = zip(compressors, np.diff(bounds).tolist(), strict=True)
            held = [
                each._history or SparseVector.empty(size, kind, beside=corrected)
                for each, size in parts
            ]
            history = concatenate([_beside(each, corrected) for each in held])
            bonus = merge(sent.with_values(np.zeros_like(sent.values, kind)), history)
            values = kernels_for(corrected).gather(corrected, bonus.indices)
            edges, rows = (
                places_of(bonus, bounds),
                zip(compressors, pairwise(bounds), strict=True),
            )
            chosen = [
                each._chosen(
                    values[low:high], bonus.values[low:high], each.count(end - first)
                )
                + low
                for (each, (first, end)), (low, high) in zip(
                    rows, pairwise(edges), strict=True
                )
            ]
            places = np.concatenate(chosen)
            sent = SparseVector.trusted(
                bonus.indices[places], values[places], corrected.size
            )
        for each, (first, end), (low, high) in zip(
            compressors,
            pairwise(bounds),
            pairwise(places_of(sent, bounds)),
            strict=True,
        ):
            each.reported(
                SparseVector.trusted(
                    sent.indices[low:high], sent.values[low:high], end - first
                )
            )
        return sent

    def _check_fits(self, size: int, dtype: np.dtype[Any]) -> None:
        """Raise ValueError unless the history is of a vector of this size and dtype."""
        held = self._history
        if held is not None and held.length != size:
            raise ValueError(
                f"corrected has {size} values: expected {held.length} as in the last aggregate"
            )
        if held is not None and held.dtype != np.promote_types(dtype, np.float32):
            raise ValueError(
                f"corrected is {dtype}: the last aggregate was stored in {held.dtype}"
            )

    def _chosen(self, values: Array, bonus: Array, k: int) -> Array:
        """Return the places of the k largest scores, in order."""
        kernels, scores = kernels_for(values), magnitudes(values).astype(bonus.dtype)

        def largest(scores: Array, k: int) -> Array:
            return kernels.largest(scores, k)[0] if k else np.flatnonzero(scores[:0])

        if self.metric == "quota":
            most = k if self.quota == 1 else min(round(self.quota * k), k - 1)
            inside = largest(np.where(bonus > 0, scores, 0), most)
            scores[inside] = 0
            return np.sort(np.concatenate([inside, largest(scores, k - inside.size)]))
        if self.metric == "magnitude":
            added = np.where(nonzero(scores), bonus, bonus.dtype.type(0))
            kernels.add_scaled(added, self.weight, scores, scores)
        else:
            kernels.multiply(scores, 1 + self.weight * bonus, scores)
        return largest(scores, k)


def _beside(vector: SparseVector, other: Array) -> SparseVector:
    """Return a vector on the device of an array."""
    return SparseVector.trusted(
        to_device_of(vector.indices, other),
        to_device_of(vector.values, other),
        vector.length,
    )
