"""Aggregation-aware selection: prefer the entries of the last aggregate, so that the ranks' supports overlap.

Inspired by "Communication usage optimization of gradient sparsification with
aggregation in deep learning", ICNCC 2018: a server sends the union of the ranks'
supports, and large gradients stay large for a short time only. Every exact sum sends
that union.

Differences from the paper: no formula of it is public; the scores below are our own.

A rank knows the support of the last aggregate. The k largest scores are sent; feedback
keeps the rest, so every entry is sent at some time, except with a quota of 1.

A bonus never lowers a score, so that the k largest scores are among the k largest
magnitudes and the entries of the support: a selection is exact top-k, in one pass with
the addition of the residual, and a choice among these.
"""

from collections.abc import Sequence

import numpy as np

from mpicomp.arrays import Array
from mpicomp.arrays.device import kernels_for, to_device_of
from mpicomp.compressors.topk import TopK
from mpicomp.correction import Correction
from mpicomp.kernels import Selected
from mpicomp.settings import to_choice, to_number
from mpicomp.state import POSITIONS
from mpicomp.vector import SparseVector, merge, places_of, without_zeros

METRICS = ("support", "quota")


class AggregationAware(TopK):
    """Select by magnitude and by the last aggregate.

    One object serves one vector; `observe` receives every aggregate, which `GradientExchange`
    passes. Before the first one the selection is exact top-k.

    Args:
        density: the fraction of the entries to select, as in `TopK`; or `k`.
        k: the number of entries, at least 1.
        metric: how an entry of the magnitude x is preferred. "support": by its score, which is
            x (1 + weight) if the last aggregate has the entry, else x. "quota": the fraction
            `quota` of k is selected inside the last aggregate, and the rest, at least one entry
            below a quota of 1, anywhere.
        weight: of "support", at least 0.
        quota: of "quota", 0 to 1.

    Raises:
        ValueError: an argument is out of range, or both of `density` and `k` are given, or none.

    >>> AggregationAware(k=2).compress(gradient).indices.tolist()
    [1, 3]
    """

    state = {"_history": (0, 1)}
    layout = POSITIONS

    def __init__(
        self,
        density: float | None = None,
        *,
        k: int | None = None,
        metric: str = "support",
        weight: float = 1.0,
        quota: float = 0.75,
    ) -> None:
        super().__init__(density, k=k)
        self.metric = to_choice("metric", metric, METRICS)
        self.weight = to_number("weight", weight, least=0)
        self.quota = to_number("quota", quota, least=0, most=1)
        # A vector of all segments, with ones at the positions of the last aggregate.
        self._aggregate: SparseVector | None = None

    @property
    def _history(self) -> Array | None:
        """The last aggregate as it is saved: 1 at its positions and 0 elsewhere; None without one."""
        return None if self._aggregate is None else self._aggregate.to_dense()

    @_history.setter
    def _history(self, history: Array | None) -> None:
        self._aggregate = None
        if history is not None:
            self.observe(SparseVector.from_dense(history))

    def observe(self, aggregate: SparseVector) -> None:
        """Receive the sum over the ranks, as the collective returned it.

        Args:
            aggregate: a SparseVector.
        """
        # A sum that was filled has zeros where no rank sent an entry.
        seen = without_zeros(aggregate)
        self._aggregate = seen.with_values(np.ones_like(seen.values, np.float32))

    def reset(self) -> None:
        """Clear the stored aggregate."""
        self._aggregate = None

    def select(self, correction: Correction, bounds: Sequence[int]) -> SparseVector:
        """Return the k entries of the largest scores in each segment; see `Compressor.select`.

        Exact top-k, and a choice among its entries and those of the history: no bonus
        lowers a score, so that no other entry is selected.
        """
        aggregate = self._aggregate
        corrected = correction.out
        if aggregate is not None and aggregate.length != corrected.size:
            raise ValueError(
                f"corrected has {corrected.size} values: expected {aggregate.length} as in the last aggregate"
            )
        largest = super().select(correction, bounds)
        if aggregate is None:
            return largest
        return self._chosen(largest, aggregate, corrected, bounds)

    def _chosen(
        self,
        largest: SparseVector,
        aggregate: SparseVector,
        corrected: Array,
        bounds: Sequence[int],
    ) -> SparseVector:
        """Return the entries with the largest scores of each segment, among the largest and those of the aggregate."""
        kind = np.promote_types(corrected.dtype, np.float32)
        nothing = largest.with_values(np.zeros_like(largest.values, kind))
        ones = SparseVector.trusted(
            to_device_of(aggregate.indices, corrected),
            to_device_of(aggregate.values, corrected).astype(kind, copy=False),
            aggregate.length,
        )
        bonus = merge(nothing, ones)
        factor = kind.type(1)
        if self.metric == "support":
            factor += kind.type(self.weight)
        values, scores = kernels_for(corrected).gather_scores(
            corrected, bonus.indices, bonus.values, factor
        )
        edges = places_of(bonus, bounds)
        counts = self.counts(np.diff(bounds))
        chosen = self._best(scores, bonus.values, edges, counts)
        return SparseVector.trusted(
            bonus.indices[chosen], values[chosen], corrected.size
        )

    def _best(
        self, scores: Array, bonus: Array, edges: Sequence[int], counts: Array
    ) -> Array:
        """Return the places of the largest scores of each segment, in increasing order."""
        kernels = kernels_for(scores)
        sizes = np.diff(edges)

        def largest(scores: Array, counts: Array) -> Selected:
            k = np.minimum(counts, sizes)
            return kernels.largest_in_segments(scores, edges, k, sizes.clip(1), k)  # type: ignore[no-any-return]

        if self.metric == "quota":
            most = counts
            if self.quota < 1:
                inside_counts = np.rint(self.quota * counts).astype(np.int64)
                most = np.minimum(inside_counts, counts - 1)
            inside = largest(np.where(bonus > 0, scores, 0), most)
            scores[inside.indices] = 0
            rest = largest(scores, counts - np.diff(inside.places))
            return np.sort(np.concatenate([inside.indices, rest.indices]))
        return largest(scores, counts).indices
