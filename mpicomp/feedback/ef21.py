"""EF21: send the compressed change of what the ranks believe of each other's gradients.

Sources: P. Richtarik, I. Sokolov, I. Fatkhullin, "EF21: a new, simpler, theoretically better, and practically faster
error feedback", NeurIPS 2021 (arXiv 2106.05203); with momentum, EF21-SGDM: I. Fatkhullin, A. Tyurin, P. Richtarik,
"Momentum provably improves error feedback!", NeurIPS 2023 (arXiv 2305.15155).

    v_i = (1 - b) v_i + b g_i,   c_i = C(v_i - h_i),   h_i += c_i     on rank i
    h += mean c_i                                                    everywhere: the result

Differences from the papers: h_i starts at zero, so that the first step leaves h_i = C(g_i) as in EF21; EF21-SGDM sends
its first h_i = v_i in full. v_i starts as the first gradient, where EF21-SGDM takes the mean of a first large batch.
What the collective rejects is taken off h_i again. gTop-k may hand it to another rank than the one that sent it: then
the h_i are what the sum needs them to be, and not C of something on each rank.

Invariants: the sum of the h_i moves by exactly what arrived; so h = mean h_i, or the sum of the h_i where the exchange
does not average. On real numbers each h_i and h are rounded at every step and h drifts from the mean, as the rounding
errors of a sum do; nothing corrects it.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import kernels_for
from mpicomp.feedback.base import Feedback, Layout, check_range, wide
from mpicomp.vector import SparseVector, merge


class EF21(Feedback):
    """Keep h_i, what the others know of this rank's gradient, and h, what all know of the mean.

    momentum: b, 0 < b <= 1, else ValueError; 1 is EF21 without momentum. The smaller, the longer v_i remembers.

    The exchange hands out a copy of h, a gradient in full, though only the change was sent. There
    is no residual and `rescale` changes nothing. All arrays have the dtype of the gradients, or float32 for float16;
    means in float16 let h drift all the same: take float32 gradients.
    """

    has_dense_result = True
    _in_gradient_units = ()

    def __init__(self, momentum: float = 1.0) -> None:
        super().__init__()
        if not 0 < momentum <= 1:
            raise ValueError(f"momentum is {momentum!r}: expected 0 < momentum <= 1 (1 is EF21 without momentum)")
        self.momentum = float(momentum)

    @property
    def residual(self) -> None:
        """None: what was not sent is not kept, the next gradient asks for it anew."""
        return

    @property
    def local(self) -> NDArray[Any] | None:
        """h_i, shape (n,): a read-only view that holds until the next call; None before any."""
        return self._view("local")

    @property
    def aggregate(self) -> NDArray[Any] | None:
        """h, shape (n,), the same on every rank: a read-only view that holds until the next call; None before any."""
        return self._view("aggregate")

    def correct(self, gradient: NDArray[Any]) -> NDArray[Any]:
        """Return v_i - h_i for the new v_i; all that is kept stays as it is. Raises what `ErrorFeedback.correct` does.

        h and h_i of float32 take gradients of float16 and of float32.
        """
        self._stage(gradient)
        target = gradient if self.momentum == 1 else self._blended(gradient)
        corrected = self._spare("corrected", gradient.dtype)
        np.subtract(target, self._arrays["local"], out=corrected, casting="same_kind")
        return corrected

    def settle(
        self, corrected: NDArray[Any], sent: SparseVector, rejected: SparseVector | None, mean: SparseVector
    ) -> tuple[SparseVector, ...]:
        """Prepare to add sent - rejected to h_i, and the mean (or the sum) to h; see `Feedback.settle`.

        Raises OverflowError where h_i or h leaves the range of the gradients.
        """
        local, aggregate = self._arrays["local"], self._arrays["aggregate"]
        self._check_staged(local.size, sent, rejected, mean)
        moved = sent if rejected is None else merge(sent, SparseVector(rejected.indices, -rejected.values, local.size))
        for name, array, change in ("h_i", local, moved), ("h", aggregate, mean):
            values = kernels_for(array).gather(array, change.indices)
            values += change.values
            check_range(values.astype(mean.dtype, copy=False), f"{name} of EF21")
            self._writes.append((array, change.indices, values))
        self._settled = () if self.momentum == 1 else ("target",)
        return ()

    def result(self, mean: SparseVector) -> NDArray[Any]:
        """Return h, the gradient in full."""
        return self._arrays["aggregate"]

    def _blended(self, gradient: NDArray[Any]) -> NDArray[Any]:
        """Return (1 - b) v + b g, written as b ((1 - b) / b v + g), which needs no second buffer."""
        b = self.momentum if self._begun else 1.0
        target = np.multiply(self._arrays["target"], (1 - b) / b, out=self._spare("target"))
        target += gradient
        target *= b
        return target

    def _layout(self, dtype: np.dtype[Any]) -> Layout:
        names = ("local", "aggregate") if self.momentum == 1 else ("local", "aggregate", "target")
        return dict.fromkeys(names, wide(dtype))
