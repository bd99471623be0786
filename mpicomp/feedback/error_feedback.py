"""Error feedback (EF-SGD): p = g + e, send D = C(p), keep e = p - D.

Source: S. P. Karimireddy, Q. Rebjock, S. Stich, M. Jaggi, "Error feedback fixes SignSGD and other gradient compression
schemes", ICML 2019 (arXiv 1901.09847).

Differences from the paper: the residual is kept in gradient units (the paper scales by the learning rate first), and it
also takes up what the collective rejects.

Invariant: residual after + sent - rejected = residual before + gradient, exactly where the additions are exact.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import kernels_for
from mpicomp.vector import SparseVector


class ErrorFeedback:
    """Add to each gradient what earlier ones left behind.

    The residual has the dtype and size of the gradients and starts at zero with the first of them.
    """

    def __init__(self) -> None:
        self._residual: NDArray[Any] | None = None
        self._spare: NDArray[Any] | None = None  # the buffer that the next corrected gradient is written to

    @property
    def residual(self) -> NDArray[Any] | None:
        """What this rank still owes, shape (n,): a read-only view that holds until the next call; None before any."""
        if self._residual is None:
            return None
        view = self._residual.view()
        view.flags.writeable = False
        return view

    def correct(self, gradient: NDArray[Any]) -> NDArray[Any]:
        """Return gradient + residual in a buffer of its own; the residual stays as it is.

        Raises ValueError when the gradient has another size or dtype than the residual: use one object a tensor.
        """
        if self._residual is None:
            return gradient.copy()
        if gradient.shape != self._residual.shape or gradient.dtype != self._residual.dtype:
            raise ValueError(
                f"the gradient is {gradient.dtype} of shape {gradient.shape}: expected {self._residual.dtype} of shape "
                f"{self._residual.shape} as in the calls before; use one ErrorFeedback for each tensor"
            )
        if self._spare is None:
            self._spare = np.empty_like(self._residual)
        np.add(self._residual, gradient, out=self._spare)
        return self._spare

    def keep(self, corrected: NDArray[Any], sent: SparseVector, rejected: SparseVector | None) -> None:
        """Make corrected - sent + rejected the new residual; see `Feedback.keep`."""
        kernels = kernels_for(corrected)
        kernels.scatter_add(corrected, sent.indices, -sent.values)
        if rejected is not None:
            kernels.scatter_add(corrected, rejected.indices, rejected.values)
        self._spare, self._residual = self._residual, corrected

    def result(self, mean: SparseVector) -> NDArray[Any]:
        """Return the mean as a dense vector, shape (n,)."""
        return mean.to_dense()

    def reset(self) -> None:
        """Forget the residual: its mass is lost, as after a change of the model."""
        self._residual = self._spare = None
