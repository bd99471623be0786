"""Momentum correction (Deep Gradient Compression): accumulate the velocity, not the gradient, and send what is large.

Source: Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally, "Deep gradient compression: reducing the communication bandwidth
for distributed training", ICLR 2018 (arXiv 1712.01887), sections 3.1 and 3.2.

    u = m u + g,    v = v + u             (Nesterov: u = m (u + g), v = v + u + g)
    send C(v); v loses what was sent; u is cleared where it was sent: momentum factor masking

The optimiser that takes the mean has no momentum of its own.

Masking keeps a velocity that has been waiting, and is stale, from moving an entry on after it was sent. An entry that
the collective gives back to this rank returns to v and keeps its momentum. Where everything was sent (an entry for
every position, or nothing left behind) nothing is stale and nothing is masked: with `Dense` the mean is the velocity of
plain momentum SGD.

Differences from the paper: masking is left out where everything was sent; a rounded value leaves its error in v;
zeros are never sent, so u stays where v is zero. gTop-k may give what one rank sent back to another rank: then the
first one masks and the second one takes it up.

Invariant: v after + sent - rejected = v before + u (Nesterov: + u + g), exactly where the additions are exact.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import kernels_for
from mpicomp.feedback.base import Feedback, Layout, wide
from mpicomp.vector import SparseVector

_BLOCK = 65536


class MomentumCorrection(Feedback):
    """Keep a velocity u, and the residual v.

    momentum: m, 0 <= m <= 1. nesterov: look ahead. masking: clear u where it was sent. clip: scale the gradient of a
    rank down to the norm clip / sqrt(ranks) where its own norm is larger, so that the norm of the ranks' mean is
    bounded much as clipping that to `clip` would do for independent gradients. ranks: their number, for `clip`.

    v has the dtype of the gradients; so has u, but for float16 it is float32. Both are in gradient units: `rescale`
    scales v. It leaves u, which acts at the new learning rate from now on, as the momentum buffers of the
    usual optimisers do.

    Raises ValueError for a setting out of range, and for `clip` without `ranks`.
    """

    def __init__(
        self,
        momentum: float = 0.9,
        *,
        nesterov: bool = False,
        masking: bool = True,
        clip: float | None = None,
        ranks: int | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum is {momentum!r}: expected 0 <= momentum <= 1")
        if clip is not None and not 0 < clip < math.inf:
            raise ValueError(f"clip is {clip!r}: expected a norm above 0, or None")
        if clip is not None and (ranks is None or ranks < 1):
            raise ValueError(f"ranks is {ranks!r}: clip needs the number of ranks, comm.size")
        self.momentum, self.nesterov, self.masking = float(momentum), nesterov, masking
        self.clip, self.ranks = clip, ranks

    @property
    def velocity(self) -> NDArray[Any] | None:
        """u, shape (n,): a read-only view that holds until the next call; None before any."""
        return self._view("velocity")

    def correct(self, gradient: NDArray[Any]) -> NDArray[Any]:
        """Return v + u for the new u; u and v stay as they are. See `ErrorFeedback.correct` for what is raised."""
        self._stage(gradient)
        before, residual = self._arrays["velocity"], self._arrays["residual"]
        velocity, corrected = self._spare("velocity"), self._spare("residual")
        gradient = self._clipped(gradient, corrected)
        if self.nesterov:
            np.add(before, gradient, out=velocity)
            velocity *= self.momentum
            residual = np.add(residual, gradient, out=corrected)
        else:
            np.multiply(before, self.momentum, out=velocity)
            velocity += gradient
        np.add(residual, velocity, out=corrected, casting="same_kind")
        return corrected

    def settle(
        self, corrected: NDArray[Any], sent: SparseVector, rejected: SparseVector | None, mean: SparseVector
    ) -> tuple[SparseVector, ...]:
        """Make corrected - sent + rejected the v to be kept, and mask u; see `Feedback.settle`."""
        self._subtract(corrected, sent, rejected)
        velocity = self._spares["velocity"]
        back = rejected.indices if rejected is not None else sent.indices[:0]
        if self.masking and (back.size or (sent.nnz < sent.length and _has_nonzero(corrected))):
            kept = kernels_for(velocity).gather(velocity, back)
            velocity[sent.indices] = 0
            velocity[back] = kept
        self._settled = "residual", "velocity"
        return ()

    def _clipped(self, gradient: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
        """Return the gradient, or it scaled down in `out`; one that is not finite as it is, for others to name."""
        if self.clip is None or self.ranks is None:
            return gradient
        limit = self.clip / math.sqrt(self.ranks)
        norm = _norm(gradient)
        return np.multiply(gradient, limit / norm, out=out) if limit < norm < math.inf else gradient

    def _layout(self, dtype: np.dtype[Any]) -> Layout:
        return {"residual": dtype, "velocity": wide(dtype)}


def _norm(gradient: NDArray[Any]) -> float:
    """Return the Euclidean norm, also of values whose squares overflow; NaN or infinity if a value is."""
    squares = kernels_for(gradient).survey(gradient).all().squares
    if squares != math.inf:
        return math.sqrt(squares)
    largest = float(np.abs(gradient).max())
    return largest * math.sqrt(float(np.square(gradient / largest).sum())) if largest < math.inf else math.inf


def _has_nonzero(values: NDArray[Any]) -> bool:
    """Return whether a value is not zero; it stops at the first block that has one, which any() does not."""
    return any(values[start : start + _BLOCK].any() for start in range(0, values.size, _BLOCK))
