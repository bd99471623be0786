"""Error feedback (EF-SGD): p = g + decay e, send D = C(p), keep e = p - D + what the collective rejects.

Source: S. P. Karimireddy, Q. Rebjock, S. Stich, M. Jaggi, "Error feedback fixes SignSGD
and other gradient compression schemes", ICML 2019 (arXiv 1901.09847), where e is in
units of updates; the decay: "Communication efficient LLM pre-training with SparseLoCo",
2025 (arXiv 2508.15706). Invariant: docs/feedback.md, "What is conserved".
"""

from typing import Any

import numpy as np

from mpicomp.arrays import Array, Dtype, Write
from mpicomp.arrays.device import kernels_for
from mpicomp.bases import Basis
from mpicomp.correction import Correction
from mpicomp.feedback.base import Dtypes, Feedback
from mpicomp.settings import to_bool, to_number
from mpicomp.vector import SparseVector, check_range, merge, split


class _InPlaceOrNot(Feedback):
    """Base class whose constructor returns the kind of `ErrorFeedback` that `in_place` asks for."""

    def __new__(cls, *args: Any, **settings: Any) -> Any:
        """Return a feedback that keeps the residual in an array of its own, or in the gradient's."""
        if settings.get("in_place") and not issubclass(cls, InPlaceErrorFeedback):
            if cls is not ErrorFeedback:
                raise TypeError(
                    f"{cls.__name__} has in_place=True: derive it from InPlaceErrorFeedback "
                    "of mpicomp.feedback"
                )
            cls = InPlaceErrorFeedback
        return super().__new__(cls, *args, **settings)


class ErrorFeedback(_InPlaceOrNot):
    """Add to each gradient the entries of earlier ones that were not sent.

    The residual has the dtype, size and units of the gradients and is zero before the first;
    `rescale` scales it. It takes the memory of two gradients: the residual, and that of the
    next step.

    Args:
        in_place: keep the residual in the gradient's own array. After a step the array holds
            the entries that were not sent, and the next backward pass adds to it, so do not
            clear it between steps (in PyTorch: no `zero_grad`). This object has no state then:
            save, clear or rescale the gradient arrays yourself.
        decay: the factor by which the residual is multiplied before each gradient is added,
            0 < decay <= 1. Below 1 old entries fade, on purpose.

    Raises:
        ValueError: `decay` is out of range, or below 1 with `in_place`.

    Source: S. P. Karimireddy et al., ICML 2019 (arXiv 1901.09847).

    >>> ErrorFeedback(decay=0.95)
    ErrorFeedback(in_place=False, decay=0.95)
    """

    def __init__(self, *, in_place: bool = False, decay: float = 1.0) -> None:
        super().__init__()
        remedy = " (1 keeps all; to keep nothing take NoFeedback())"
        self.in_place = to_bool("in_place", in_place)
        self.decay = to_number("decay", decay, above=0, most=1, remedy=remedy)

    def correct(self, *gradient: Array, basis: Basis | None = None) -> Correction:
        """Return decay * residual + gradient, to be added in the buffer of the next residual; see `Feedback`."""
        self._stage(gradient)
        residual = self._arrays["residual"]
        out = self._spare("residual")
        return Correction(
            gradient, out, residual, self.decay, basis, shows_gradient=True
        )


class InPlaceErrorFeedback(ErrorFeedback):
    """Keep the residual in the gradient's own array: what `ErrorFeedback(in_place=True)` returns."""

    # The gradient's array holds the residual.
    has_gradient_units = False

    def __init__(self, *, in_place: bool = True, decay: float = 1.0) -> None:
        super().__init__(in_place=in_place, decay=decay)
        if self.decay < 1:
            raise ValueError(
                f"got in_place=True and decay={decay!r}: in place, the gradient's array holds the sum of residual and "
                "gradient, of which the residual cannot decay alone; expected ErrorFeedback(decay=...) without in_place"
            )

    def correct(self, *gradient: Array, basis: Basis | None = None) -> Correction:
        """Return the gradient, which holds the residual."""
        parts = self._stage(gradient, basis)
        return Correction(parts, self._joined(parts))

    def prepare_residual(
        self,
        correction: Correction,
        sent: SparseVector,
        rejected: SparseVector | None = None,
    ) -> Write:
        """Prepare to subtract from the gradients what was sent, and to add what was rejected."""
        if rejected is None:
            rejected = SparseVector.empty(sent.length, sent.dtype, like=sent.values)
        self._check_changes(correction.out, sent, rejected)
        changes = [
            (vector, part, sign)
            for change, sign in ((sent, -1), (rejected, 1))
            for vector, part in zip(
                correction.parts, split(change, self._bounds), strict=True
            )
            if part.nnz
        ]

        def write() -> None:
            for vector, part, sign in changes:
                add = kernels_for(vector).scatter_add
                add(vector, part.indices, part.values, sign=sign)

        return write

    def prepare_rejected(self, correction: Correction, rejected: Array | None) -> Write:
        """Prepare to write what was rejected to the gradients; see `Feedback.prepare_rejected`."""
        gradients = correction.parts
        self._check_staged(correction.out.size)

        def write() -> None:
            start = 0
            for vector in gradients:
                if rejected is None:
                    vector[...] = 0
                else:
                    vector[...] = rejected[start : start + vector.size]
                start += vector.size

        return write

    def rescale(self, factor: float) -> None:
        """Raise RuntimeError: rescale the gradient's array instead."""
        raise RuntimeError(
            "the residual is in the gradient's own array (in_place): multiply that by the factor"
        )

    def dtypes(self, dtype: Dtype) -> Dtypes:
        return {}

    def _check_changes(
        self, gradient: Array, sent: SparseVector, rejected: SparseVector
    ) -> None:
        """Raise an error unless gradient - sent + rejected can be written."""
        self._check_staged(gradient.size, sent, rejected)
        if not (_is_small(sent.values) and _is_small(rejected.values)):
            indices = merge(sent, rejected).indices
            after = kernels_for(gradient).gather(gradient, indices)
            after[np.searchsorted(indices, sent.indices)] -= sent.values
            after[np.searchsorted(indices, rejected.indices)] += rejected.values
            check_range(after, "residual")


def _is_small(values: Array) -> bool:
    """Return whether a finite number plus any of these is finite: all are below half an ulp of the largest number."""
    limits, keys = np.finfo(values.dtype), np.dtype(f"u{values.itemsize}")
    limit = (limits.max * limits.eps / 4).view(keys)
    magnitude = (1 << (8 * values.itemsize - 1)) - 1
    are_small: bool = kernels_for(values).all_below(
        values.view(keys), int(limit), magnitude
    )
    return are_small
