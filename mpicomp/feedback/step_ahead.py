"""Step-ahead error feedback: evaluate the gradient at the model after this rank's residual is applied.

Source: A. Xu, Z. Huo, H. Huang, "Step-ahead error feedback for distributed training
with compressed gradient", AAAI 2021 (arXiv 2008.05823), with its error averaging
(`collectives.average_residuals`). The rule: docs/feedback.md.

Differences from the paper: the residual starts at zero (a published baseline starts at
C(-x)), and entries that the collective rejects are added to it. Its two-way compression
is `compressed_allreduce`: the server's residual is part of the residuals of the ranks,
each in the share of the sum that it owns, and so part of e at `ahead(x)` as well.

Invariants: residual after + sent - rejected = residual before + eta m; averaging does
not change the sum over the ranks. So the virtual iterate xbar = x - mean e obeys xbar'
= xbar - eta mean m.
"""

from typing import Any

import numpy as np

from mpicomp.arrays import Array, Dtype
from mpicomp.arrays.device import kernels_for, to_device_of
from mpicomp.arrays.frameworks import like, to_values
from mpicomp.bases import Basis
from mpicomp.correction import Correction
from mpicomp.feedback.base import Dtypes, Feedback, accumulation_dtype
from mpicomp.settings import to_number


class StepAhead(Feedback):
    """Keep the residual of the update, and a momentum of the gradients.

    The exchange returns an update: subtract it from the model as it is, and evaluate the model
    at x less the residual (`GradientExchange.ahead`). The residual is in update units:
    `rescale` changes nothing. It has the dtype of the gradients; so has the momentum, but for
    float16 it is float32. Updates are small: in float16 those below 6e-8 vanish.

    Args:
        rate: the learning rate eta, above 0; it may be changed between steps.
        momentum: mu, 0 <= mu <= 1.

    Raises:
        ValueError: an argument is out of range.

    Source: A. Xu et al., AAAI 2021 (arXiv 2008.05823).

    >>> exchange = GradientExchange(comm, TopK(k=2), StepAhead(rate=0.5))
    >>> update = exchange(gradient)  # parameters -= update
    >>> exchange.ahead(np.zeros(4, np.float32)).tolist()
    [-0.25, 0.0, -0.125, 0.0]
    """

    # The residual has the units of an update of the model.
    has_gradient_units = False
    state = {"rate": (0, np.inf)}

    def __init__(self, rate: float, momentum: float = 0.0) -> None:
        super().__init__()
        self.rate = rate
        self.momentum = to_number("momentum", momentum, least=0, most=1)

    @property
    def rate(self) -> float:
        """The learning rate eta of the next step."""
        return self._rate

    @rate.setter
    def rate(self, rate: float) -> None:
        # A NumPy scalar would multiply float32 in float64.
        self._rate = to_number("rate", rate, above=0)

    def ahead(self, x: Any) -> Any:
        """Return x - e, the point for the next gradient: a new array of the shape, dtype and kind of x.

        x: the model, n values in an array of any shape; raises ValueError for another
        number of values.
        """
        point = to_values(x).copy()
        if self._begun:
            residual = to_device_of(self._arrays["residual"], point)
            if point.size != residual.size:
                raise ValueError(
                    f"x has {point.size} values: expected {residual.size} as in the gradients"
                )
            kernels_for(point).add_scaled(
                point, 1, residual.reshape(point.shape), point, sign=-1
            )
        return like(point, x)

    def correct(self, *gradient: Array, basis: Basis | None = None) -> Correction:
        """Return eta m + e for the new m; changes no array that is kept. Raises what `ErrorFeedback.correct` does."""
        parts = self._stage(gradient, basis)
        corrected = self._spare("residual")
        velocity = self._joined(parts)
        kernels = kernels_for(corrected)
        if self.momentum:
            summand = velocity
            velocity = self._spare("velocity")
            before = self._arrays["velocity"]
            kernels.add_scaled(before, self.momentum, summand, velocity)
        kernels.add_scaled(velocity, self.rate, self._arrays["residual"], corrected)
        return self._corrected(corrected)

    def _settings(self) -> dict[str, Any]:
        """Return the settings that states are compared by: all but the rate, which is part of the state."""
        return {
            name: value for name, value in super()._settings().items() if name != "rate"
        }

    def dtypes(self, dtype: Dtype) -> Dtypes:
        dtypes = {"residual": dtype}
        if self.momentum:
            dtypes["velocity"] = accumulation_dtype(dtype)
        return dtypes
