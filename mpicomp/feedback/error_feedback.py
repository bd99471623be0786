"""Error feedback (EF-SGD): p = g + e, send D = C(p), keep e = p - D.

Source: S. P. Karimireddy, Q. Rebjock, S. Stich, M. Jaggi, "Error feedback fixes SignSGD and other gradient compression
schemes", ICML 2019 (arXiv 1901.09847).

Differences from the paper: the residual is in gradient units (the paper scales by the learning rate first), and entries
that the collective rejects are added to it. `in_place` is the same arithmetic, with the same bits, without a copy.

Invariant: residual after + sent - rejected = residual before + gradient, exactly where the additions are exact.
"""

from typing import Any

import numpy as np

from mpicomp.arrays import Array, kernels_for
from mpicomp.compressors import Compressor
from mpicomp.feedback.base import Added, Feedback, Layout, check_range
from mpicomp.vector import SparseVector


class ErrorFeedback(Feedback):
    """Add to each gradient the entries of earlier ones that were not sent.

    The residual has the dtype and size of the gradients and is zero before the first. It is in gradient units:
    `rescale` scales it. It takes the memory of two gradients: the residual, and the one of the next step.

    in_place: keep the residual in the gradient's own array. After a step the array holds the entries that were not
    sent, and the next backward pass adds to it, so do not clear it between steps (in PyTorch: no `zero_grad`). A step
    then reads the gradient once and writes the entries that were sent or rejected. This object has no state then: save,
    clear or rescale the gradient arrays yourself.
    """

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = bool(in_place)

    def correct(self, gradient: Array) -> Array:
        """Return gradient + residual in a separate buffer; in place, the gradient itself.

        Raises ValueError if the gradient has another size or dtype than the residual: use one object for each tensor.
        """
        self._stage(gradient)
        if self.in_place:
            return gradient
        corrected = self._spare("residual")
        kernels_for(corrected).add(self._arrays["residual"], gradient, corrected)
        return corrected

    def compress(self, gradient: Array, compressor: Compressor) -> tuple[Array, SparseVector]:
        """Return gradient + residual and the selected entries; in one pass if the compressor has a fused kernel."""
        if self.in_place and compressor.needs_gradient:
            raise TypeError(f"{compressor!r} needs the new gradient: expected ErrorFeedback(in_place=False)")
        if self.in_place or compressor.needs_gradient:
            return super().compress(gradient, compressor)
        self._stage(gradient)
        corrected = self._spare("residual")
        return corrected, compressor.compress_sum(self._arrays["residual"], gradient, corrected)

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
        removed = SparseVector(sent.indices, -sent.values, sent.length)
        return (removed, back) if back.nnz else (removed,)


def _is_small(values: Array) -> bool:
    """Return whether a finite number plus any of these is finite: they are below half the last place of the largest."""
    limits = np.finfo(values.dtype)
    return not values.size or bool(np.abs(values).max() < limits.max * limits.eps / 4)
