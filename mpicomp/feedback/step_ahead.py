"""Step-ahead error feedback: evaluate the gradient at the model after this rank's residual is applied.

Source: A. Xu, Z. Huo, H. Huang, "Step-ahead error feedback for distributed training with compressed gradient", AAAI
2021 (arXiv 2008.05823), with its error averaging.

    y = x - e                  the point of the next gradient g: `ahead(x)`
    m = mu m + g
    p = eta m + e,  D = C(p),  e = p - D
    x -= mean D                the exchange returns mean D: an update

The model is evaluated at x, not at y. Every `averaging_period` steps the residuals are replaced by their mean over the
ranks.

Differences from the paper: the residual starts at zero (a published baseline starts at C(-x)), and entries that the
collective rejects are added to it. Its two-way compression is `downlink=` of an exchange: the server's residual is part
of the residuals of the ranks, each in the share of the sum that it owns, and so part of e at `ahead(x)` as well.

Invariants: residual after + sent - rejected = residual before + eta m; averaging does not change the sum over the
ranks. So the virtual iterate xbar = x - mean e obeys xbar' = xbar - eta mean m.
"""

import math
from typing import Any

import numpy as np

from mpicomp.arrays import Array, beside, like, to_values
from mpicomp.feedback.base import Added, Feedback, Layout, wide
from mpicomp.settings import refuse_bools
from mpicomp.vector import SparseVector


class StepAhead(Feedback):
    """Keep the residual of the update, and a momentum of the gradients.

    rate: eta, above 0; it may be changed between steps. momentum: mu, 0 <= mu <= 1. averaging_period: steps from one
    error averaging to the next, at least 1; None for no averaging.

    The exchange returns an update: subtract it from the model as it is. The residual is in update units and independent
    of the rate: `rescale` changes nothing. It has the dtype of the gradients; so has the momentum, but for float16 it
    is float32. Updates are small: in float16 those below 6e-8 vanish.

    Raises ValueError for a setting out of range.

    >>> exchange = GradientExchange(comm, TopK(k=2), StepAhead(rate=0.5))
    >>> update = exchange(gradient)  # parameters -= update
    >>> exchange.ahead(np.zeros(4, np.float32)).tolist()
    [-0.25, 0.0, -0.125, 0.0]
    """

    sends_gradients = False
    _numbers = "rate", "since_averaging"

    def __init__(self, rate: float, momentum: float = 0.0, averaging_period: int | None = None) -> None:
        super().__init__()
        refuse_bools(momentum=momentum, averaging_period=averaging_period)
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum is {momentum!r}: expected 0 <= momentum <= 1")
        if averaging_period is not None and averaging_period < 1:
            raise ValueError(f"averaging_period is {averaging_period!r}: expected at least 1, or None")
        self.rate, self.momentum, self.averaging_period = rate, float(momentum), averaging_period
        self.since_averaging = 0
        self._averaged = False  # the residual of the settled step is the mean over the ranks

    @property
    def rate(self) -> float:
        """The learning rate eta of the next step."""
        return self._rate

    @rate.setter
    def rate(self, rate: float) -> None:
        refuse_bools(rate=rate)
        if not 0 < rate < math.inf:
            raise ValueError(f"rate is {rate!r}: expected a learning rate above 0")
        self._rate = float(rate)  # with a NumPy scalar float32 would be multiplied in float64

    def ahead(self, x: Any) -> Any:
        """Return x - e, the point for the next gradient: a new array of the shape, dtype and kind of x.

        x: the model, n values in an array of any shape; raises ValueError for another number of values.
        """
        values = to_values(x)
        if not self._begun:
            return like(values.copy(), x)
        residual = beside(self._arrays["residual"], values)
        if values.size != residual.size:
            raise ValueError(f"x has {values.size} values: expected {residual.size} as in the gradients")
        return like((values - residual.reshape(values.shape)).astype(values.dtype, copy=False), x)

    def correct(self, gradient: Array) -> Array:
        """Return eta m + e for the new m; changes no array that is kept. Raises what `ErrorFeedback.correct` does."""
        self._stage(gradient)
        corrected, velocity = self._spare("residual"), gradient
        if self.momentum:
            velocity = np.multiply(self._arrays["velocity"], self.momentum, out=self._spare("velocity"))
            velocity += gradient
        np.multiply(velocity, self.rate, out=corrected, casting="same_kind")
        corrected += self._arrays["residual"]
        return corrected

    def settle(self, corrected: Array, sent: SparseVector, rejected: SparseVector | None, mean: SparseVector) -> Added:
        """Prepare corrected - sent + rejected as the residual; see `Feedback.settle`."""
        self._subtract(corrected, sent, rejected)
        self._settled = ("residual", "velocity") if self.momentum else ("residual",)
        self._averaged = False
        return ()

    def commit(self) -> None:
        """Swap in the arrays that `settle` prepared, and count the steps to the next averaging."""
        super().commit()
        self.since_averaging = 0 if self._averaged else self.since_averaging + 1

    @property
    def averaging_due(self) -> bool:
        """Whether this step ends by averaging the residuals over the ranks; the same on all ranks."""
        return self.averaging_period is not None and self.since_averaging + 1 >= self.averaging_period

    def average(self, mean_residual: Array) -> None:
        """Replace the settled residual by a copy of the mean over the ranks; see `Feedback.average`.

        mean_residual: shape (n,), finite, the same bits on every rank. Raises RuntimeError unless a step is settled,
        ValueError for another shape or values that are not finite.
        """
        if not self._settled:
            raise RuntimeError("average without settle: call settle before")
        residual = self._spares["residual"]
        if mean_residual.shape != residual.shape or not np.isfinite(mean_residual).all():
            raise ValueError(f"got a mean of shape {mean_residual.shape}: expected shape {residual.shape}, all finite")
        np.copyto(residual, mean_residual, casting="same_kind")
        self._averaged = True

    def reset(self) -> None:
        """Clear residual and momentum, and restart the averaging period; the rate is kept."""
        super().reset()
        self.since_averaging = 0

    def _settings(self) -> dict[str, Any]:
        """Return the settings that states are compared by: all but the rate, which is part of the state."""
        return {name: value for name, value in super()._settings().items() if name != "rate"}

    def _layout(self, dtype: np.dtype[Any]) -> Layout:
        return {"residual": dtype} | ({"velocity": wide(dtype)} if self.momentum else {})
