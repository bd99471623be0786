"""Error feedback (EF-SGD): p = g + e, send D = C(p), keep e = p - D.

Source: S. P. Karimireddy, Q. Rebjock, S. Stich, M. Jaggi, "Error feedback fixes SignSGD and other gradient compression
schemes", ICML 2019 (arXiv 1901.09847).

Differences from the paper: the residual is kept in gradient units (the paper scales by the learning rate first), and it
also takes up what the collective rejects. `in_place` is the same arithmetic, with the same bits, without a copy.

Invariant: residual after + sent - rejected = residual before + gradient, exactly where the additions are exact.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import kernels_for
from mpicomp.compressors import Compressor
from mpicomp.feedback.base import Feedback, check_range
from mpicomp.vector import SparseVector


class ErrorFeedback(Feedback):
    """Add to each gradient what earlier ones left behind.

    The residual has the dtype and size of the gradients and starts at zero with the first of them. It is in gradient
    units: `rescale` scales it. It takes memory for two gradients: the residual, and the one of the next step.

    in_place: keep the residual in the gradient's own array. After a step the array holds what was not sent, and the
    next backward pass adds to it, so do not clear it between steps (in PyTorch: no `zero_grad`). A step then reads the
    gradient once and writes the entries that were sent or came back; nothing is kept here, so there is nothing to
    save, reset or rescale: save the arrays, clear them, or multiply them yourself.
    """

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = bool(in_place)

    def correct(self, gradient: NDArray[Any]) -> NDArray[Any]:
        """Return gradient + residual in a buffer of its own, in place the gradient itself.

        Raises ValueError when the gradient has another size or dtype than the residual: use one object a tensor.
        """
        self._stage(gradient)
        if self.in_place:
            return gradient
        corrected = self._spare("residual")
        kernels_for(corrected).add(self._arrays["residual"], gradient, corrected)
        return corrected

    def compress(self, gradient: NDArray[Any], compressor: Compressor) -> tuple[NDArray[Any], SparseVector]:
        """Return gradient + residual, and what is selected of it: in one pass where the compressor can."""
        if self.in_place or compressor.needs_gradient:
            return super().compress(gradient, compressor)
        self._stage(gradient)
        corrected = self._spare("residual")
        return corrected, compressor.compress_sum(self._arrays["residual"], gradient, corrected)

    def settle(
        self, corrected: NDArray[Any], sent: SparseVector, rejected: SparseVector | None, mean: SparseVector
    ) -> tuple[SparseVector, ...]:
        """Make corrected - sent + rejected the residual to be kept; see `Feedback.settle`."""
        if self.in_place:
            return self._changes(corrected, sent, rejected)
        self._subtract(corrected, sent, rejected)
        self._settled = ("residual",)
        return ()

    def rescale(self, factor: float) -> None:
        """Multiply the residual by `factor`; RuntimeError in place, where it is in the gradient's array."""
        if self.in_place:
            raise RuntimeError("the residual is in the gradient's own array (in_place): multiply that by the factor")
        super().rescale(factor)

    def _added(self, gradient: NDArray[Any], corrected: NDArray[Any]) -> NDArray[Any]:
        if self.in_place:
            raise TypeError("this compressor looks at the new gradient alone: expected ErrorFeedback(in_place=False)")
        return super()._added(gradient, corrected)

    def _layout(self, dtype: np.dtype[Any]) -> dict[str, np.dtype[Any]]:
        return {} if self.in_place else super()._layout(dtype)

    def _changes(
        self, gradient: NDArray[Any], sent: SparseVector, rejected: SparseVector | None
    ) -> tuple[SparseVector, ...]:
        """Return what is to be added where an entry was sent, then where one came back."""
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


def _is_small(values: NDArray[Any]) -> bool:
    """Return whether adding such values to a finite one gives a finite one: less than half its last place is added."""
    limits = np.finfo(values.dtype)
    return not values.size or bool(np.abs(values).max() < limits.max * limits.eps / 4)
