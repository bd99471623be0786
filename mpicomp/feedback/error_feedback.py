"""Error feedback (EF-SGD): p = g + decay e, send D = C(p), keep e = p - D + what the collective rejects.

Source: S. P. Karimireddy, Q. Rebjock, S. Stich, M. Jaggi, "Error feedback fixes SignSGD
and other gradient compression schemes", ICML 2019 (arXiv 1901.09847), where e is in
units of updates; the decay: "Communication efficient LLM pre-training with SparseLoCo",
2025 (arXiv 2508.15706). Invariant: docs/feedback.md, "What is conserved".
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from mpicomp.arrays import Array, kernels_for, negated
from mpicomp.compressors import Compressor
from mpicomp.compressors.base import write_sum
from mpicomp.feedback.base import Dtypes, Feedback, Gradient, check_range
from mpicomp.settings import to_bool, to_number
from mpicomp.tensors import Tensor
from mpicomp.vector import SparseVector, split, whole


class ErrorFeedback(Feedback):
    """Add to each gradient the entries of earlier ones that were not sent.

    The residual has the dtype, size and units of the gradients and is zero before the
    first; `rescale` scales it. It takes the memory of two gradients: the residual, and
    the one of the next step.

    in_place: keep the residual in the gradient's own array. After a step the array
    holds the entries that were not sent, and the next backward pass adds to it, so do
    not clear it between steps (in PyTorch: no `zero_grad`). This object has no state
    then: save, clear or rescale the gradient arrays yourself.

    decay: the factor by which the residual is multiplied before each gradient is added,
    0 < decay <= 1. Below 1 old entries fade, on purpose.

    Raises ValueError for a decay out of range, and for one below 1 with `in_place`.

    >>> ErrorFeedback(decay=0.95)
    ErrorFeedback(in_place=False, decay=0.95)
    """

    def __init__(self, *, in_place: bool = False, decay: float = 1.0) -> None:
        super().__init__()
        remedy = " (1 keeps all; to keep nothing take NoFeedback())"
        self.in_place = to_bool("in_place", in_place)
        self.decay = to_number("decay", decay, above=0, most=1, remedy=remedy)
        if in_place and decay < 1:
            raise ValueError(
                f"got in_place=True and decay={decay!r}: in place, the gradient's array holds the sum of residual and "
                "gradient, of which the residual cannot decay alone; expected ErrorFeedback(decay=...) without in_place"
            )
        self._homes: list[Array] = []  # in place: the gradient's arrays
        # in place: what `commit` adds to them
        self._changes: tuple[SparseVector, ...] = ()

    @property
    def has_gradient_units(self) -> bool:
        """Whether the residual is an array of its own, and not in the gradient's array."""
        return not self.in_place

    @property
    def view(self) -> Callable[[Tensor, Any], Array]:
        """The method of a tensor that returns a gradient as a vector; in place a writable one."""
        return Tensor.residual_in if self.in_place else Tensor.flatten

    def correct(self, gradient: Gradient, bounds: Sequence[int] | None = None) -> Array:
        """Return gradient + decay * residual in a separate buffer; in place, the gradient itself.

        Raises ValueError if the gradient has another size or dtype than the residual:
        use one object for each tensor.
        """
        self._stage(gradient, bounds)
        parts = gradient if isinstance(gradient, list) else [gradient]
        if self.in_place:
            self._homes = parts
            return self._joined(gradient)
        corrected = self._spare("residual")
        write_sum((self._arrays["residual"], self.decay, parts), corrected)
        return corrected

    def compress(
        self,
        gradient: Gradient,
        compressor: Compressor,
        bounds: Sequence[int] | None = None,
    ) -> tuple[Array, SparseVector]:
        """Return the result of `correct`, and the selected entries; in one pass, if the compressor has a kernel."""
        if self.in_place:
            return super().compress(gradient, compressor, bounds)
        self._stage(gradient, bounds)
        residual, corrected = self._arrays["residual"], self._spare("residual")
        if isinstance(gradient, list) and len(gradient) != len(self._bounds) - 1:
            gradient = self._joined(gradient)
        if not isinstance(gradient, list):
            gradient = [gradient[first:end] for first, end in pairwise(self._bounds)]
        return corrected, compressor.compress_segments(
            corrected, self._bounds, summands=(residual, self.decay, gradient)
        )

    def settle(
        self, corrected: Array, sent: SparseVector, rejected: SparseVector | None = None
    ) -> None:
        """Prepare corrected - sent + rejected as the residual; see `Feedback.settle`."""
        if self.in_place:
            self._changes = self._checked_changes(corrected, sent, rejected)
        else:
            self._subtract(corrected, sent, rejected)
            self._settled = ("residual",)

    def settle_all(self, corrected: Array, rejected: Array | None) -> None:
        """Prepare what was rejected as the residual; see `Feedback.settle_all`."""
        if self.in_place:
            before = np.concatenate(self._homes)
            self.settle(
                before, whole(before), None if rejected is None else whole(rejected)
            )
        else:
            super().settle_all(corrected, rejected)

    @property
    def written(self) -> list[Array]:
        """In place, the vectors of the gradients."""
        return self._homes

    def commit(self) -> None:
        """Swap in the residual; in place, subtract from the gradients what was sent, and add what was rejected."""
        super().commit()
        bounds = [0, *accumulate([home.size for home in self._homes])]
        for changes in self._changes:
            for home, part in zip(self._homes, split(changes, bounds), strict=True):
                kernels_for(home).scatter_add(home, part.indices, part.values)
        self._homes, self._changes = [], ()

    def discard(self) -> None:
        """Drop what a step that is not kept has prepared; in place, also the references to the gradients."""
        super().discard()
        self._homes, self._changes = [], ()

    def rescale(self, factor: float) -> None:
        """Multiply the residual by `factor`; raises RuntimeError in place: rescale the gradient's array instead."""
        if self.in_place:
            raise RuntimeError(
                "the residual is in the gradient's own array (in_place): multiply that by the factor"
            )
        super().rescale(factor)

    def dtypes(self, dtype: np.dtype[Any]) -> Dtypes:
        return {} if self.in_place else super().dtypes(dtype)

    def _checked_changes(
        self, gradient: Array, sent: SparseVector, rejected: SparseVector | None
    ) -> tuple[SparseVector, ...]:
        """Return the vectors to add to the gradient's array: -sent, then rejected."""
        self._check_staged(gradient.size, sent, rejected)
        back = (
            SparseVector.empty(sent.length, sent.dtype, beside=sent.values)
            if rejected is None
            else rejected
        )
        if not (_is_small(sent.values) and _is_small(back.values)):
            gather = kernels_for(gradient).gather
            left, base = (
                gather(gradient, sent.indices) - sent.values,
                gather(gradient, back.indices),
            )
            if sent.nnz and back.nnz:
                places = np.minimum(
                    np.searchsorted(sent.indices, back.indices), sent.nnz - 1
                )
                base = np.where(
                    sent.indices[places] == back.indices, left[places], base
                )
            check_range(left, "residual")
            check_range(base + back.values, "residual")
        removed = sent.with_values(negated(sent.values))
        return (removed, back) if back.nnz else (removed,)


def _is_small(values: Array) -> bool:
    """Return whether a finite number plus any of these is finite: they are below half the last place of the largest."""
    limits = np.finfo(values.dtype)
    return not values.size or bool(np.abs(values).max() < limits.max * limits.eps / 4)
