"""Error feedback (EF-SGD): p = g + decay e, send D = C(p), keep e = p - D.

Source: S. P. Karimireddy, Q. Rebjock, S. Stich, M. Jaggi, "Error feedback fixes SignSGD and other gradient compression
schemes", ICML 2019 (arXiv 1901.09847); the decay: "Communication efficient LLM pre-training with SparseLoCo", 2025
(arXiv 2508.15706).

Differences from the paper: the residual is in gradient units (the paper scales by the learning rate first), and entries
that the collective rejects are added to it. `in_place` is the same arithmetic, with the same bits, without a copy.

Invariant: residual after + sent - rejected = decay * residual before + gradient, exactly where the sums are exact.
"""

from itertools import pairwise
from typing import Any

import numpy as np

from mpicomp.arrays import Array, kernels_for, read_only
from mpicomp.compressors import Compressor
from mpicomp.compressors.base import write_sum
from mpicomp.feedback.base import Added, Feedback, Layout, check_range
from mpicomp.settings import refuse_bools
from mpicomp.vector import SparseVector


class ErrorFeedback(Feedback):
    """Add to each gradient the entries of earlier ones that were not sent.

    The residual has the dtype and size of the gradients and is zero before the first. It is in gradient units:
    `rescale` scales it. It takes the memory of two gradients: the residual, and the one of the next step.

    in_place: keep the residual in the gradient's own array. After a step the array holds the entries that were not
    sent, and the next backward pass adds to it, so do not clear it between steps (in PyTorch: no `zero_grad`). A step
    then reads the gradient once and writes the entries that were sent or rejected. This object has no state then: save,
    clear or rescale the gradient arrays yourself.

    decay: the factor by which the residual is multiplied before each gradient is added, 0 < decay <= 1. Below 1 old
    entries that were not sent fade: 1 - decay of the residual is lost in each step on purpose.

    Raises ValueError for a decay out of range, and for one below 1 with `in_place`.

    >>> ErrorFeedback(decay=0.95)
    ErrorFeedback(in_place=False, decay=0.95)
    """

    def __init__(self, *, in_place: bool = False, decay: float = 1.0) -> None:
        super().__init__()
        refuse_bools(decay=decay)
        if not 0 < decay <= 1:
            raise ValueError(
                f"decay is {decay!r}: expected 0 < decay <= 1 (1 keeps all; to keep nothing take NoFeedback())"
            )
        if in_place and decay < 1:
            raise ValueError(
                f"got in_place=True and decay={decay!r}: in place, the gradient's array holds the sum of residual and "
                "gradient, of which the residual cannot decay alone; expected ErrorFeedback(decay=...) without in_place"
            )
        self.in_place, self.decay = bool(in_place), float(decay)

    @property
    def takes_parts(self) -> bool:  # type: ignore[override]
        """Whether a gradient may be a list of parts, which are added to the residual where they are."""
        return not self.in_place

    def correct(self, gradient: Array | list[Array]) -> Array:
        """Return gradient + decay * residual in a separate buffer; in place, the gradient itself.

        Raises ValueError if the gradient has another size or dtype than the residual: use one object for each tensor.
        """
        self._stage(gradient)
        if self.in_place:
            assert not isinstance(gradient, list), "takes_parts is False in place"
            return gradient
        corrected, parts = self._spare("residual"), gradient if isinstance(gradient, list) else [gradient]
        write_sum((self._arrays["residual"], self.decay, parts), corrected)
        return corrected

    def compress(self, gradient: Array | list[Array], compressor: Compressor) -> tuple[Array, SparseVector]:
        """Return the result of `correct`, and the selected entries; in one pass, if the compressor has a kernel."""
        if self.in_place and compressor.needs_gradient:
            raise TypeError(f"{compressor!r} needs the new gradient: expected ErrorFeedback(in_place=False)")
        joined = isinstance(gradient, list) and len(gradient) != len(self.bounds or (0, 0)) - 1
        if self.in_place or joined:  # the arrays of a list are one segment
            corrected, added = self.correct(gradient), None if joined else gradient
            return corrected, compressor.compress(read_only(corrected), gradient=added)
        self._stage(gradient)
        residual, corrected = self._arrays["residual"], self._spare("residual")
        bounds = self.bounds or [0, corrected.size]
        parts = gradient if isinstance(gradient, list) else [gradient[first:end] for first, end in pairwise(bounds)]
        return corrected, compressor.compress_segments(corrected, bounds, summands=(residual, self.decay, parts))

    def settle(self, corrected: Array, sent: SparseVector, rejected: SparseVector | None, mean: SparseVector) -> Added:
        """Prepare corrected - sent + rejected as the residual; see `Feedback.settle`."""
        if self.in_place:
            return self._changes(corrected, sent, rejected)
        self._subtract(corrected, sent, rejected)
        self._settled = ("residual",)
        return ()

    def rescale(self, factor: float) -> None:
        """Multiply the residual by `factor`; raises RuntimeError in place: rescale the gradient's array instead."""
        if self.in_place:
            raise RuntimeError("the residual is in the gradient's own array (in_place): multiply that by the factor")
        super().rescale(factor)

    def _layout(self, dtype: np.dtype[Any]) -> Layout:
        return {} if self.in_place else super()._layout(dtype)

    def _changes(self, gradient: Array, sent: SparseVector, rejected: SparseVector | None) -> Added:
        """Return the vectors to add to the gradient's array: -sent, then rejected."""
        self._check_staged(gradient.size, sent, rejected)
        back = SparseVector.empty(sent.length, sent.dtype, beside=sent.values) if rejected is None else rejected
        if not (_is_small(sent.values) and _is_small(back.values)):
            gather = kernels_for(gradient).gather
            left, base = gather(gradient, sent.indices) - sent.values, gather(gradient, back.indices)
            if sent.nnz and back.nnz:
                places = np.minimum(np.searchsorted(sent.indices, back.indices), sent.nnz - 1)
                base = np.where(sent.indices[places] == back.indices, left[places], base)
            check_range(left, "residual")
            check_range(base + back.values, "residual")
        removed = sent.with_values(-sent.values)
        return (removed, back) if back.nnz else (removed,)


def _is_small(values: Array) -> bool:
    """Return whether a finite number plus any of these is finite: they are below half the last place of the largest."""
    limits = np.finfo(values.dtype)
    return not values.size or bool(np.abs(values).max() < limits.max * limits.eps / 4)
