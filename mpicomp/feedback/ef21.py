"""EF21 and EControl: send the compressed difference of this rank's gradient and the other ranks' estimate of it.

Sources: P. Richtarik, I. Sokolov, I. Fatkhullin, "EF21: a new, simpler, theoretically better, and practically faster
error feedback", NeurIPS 2021 (arXiv 2106.05203); with momentum, EF21-SGDM: I. Fatkhullin, A. Tyurin, P. Richtarik,
"Momentum provably improves error feedback!", NeurIPS 2023 (arXiv 2305.15155); with an error, EControl: Y. Gao, R.
Islamov, S. U. Stich, "EControl: fast distributed optimization with compression and error control", ICLR 2024 (arXiv
2311.05645).

    v_i = (1 - b) v_i + b g_i,   c_i = C(v_i - h_i + eta e_i),   h_i += c_i,   e_i += v_i - h_i     on rank i
    h += mean c_i                                                             on every rank: the result

Differences from the papers: h_i starts at zero, so that the first step leaves h_i = C(g_i) as in EF21; EF21-SGDM sends
its first h_i = v_i in full. v_i starts as the first gradient, where EF21-SGDM uses the mean of a large first batch.
EControl is published without momentum. Entries that the collective rejects are subtracted from h_i again. gTop-k may
return an entry to another rank than its sender; the single h_i are then not those of the paper, but their sum is right.

Invariants: the sum of the h_i changes by exactly the received sum; so h = mean h_i, or the sum of the h_i if the
exchange does not average. On real numbers each h_i and h are rounded at every step, and h drifts from the mean as the
rounding errors of a sum do; nothing corrects this.
"""

import math
from typing import Any

import numpy as np

from mpicomp.arrays import Array, kernels_for
from mpicomp.feedback.base import Added, Feedback, Layout, check_range, wide
from mpicomp.settings import refuse_bools
from mpicomp.vector import SparseVector, merge


class EF21(Feedback):
    """Keep h_i, the other ranks' estimate of this rank's gradient, and h, the common estimate of the mean.

    momentum: b, 0 < b <= 1; 1 is EF21 without momentum. The smaller b, the longer v_i remembers. eta: how much of e_i,
    the sum of what h_i differed from v_i in all steps, is sent, 0 <= eta < infinity; 0 is EF21, above 0 EControl, which
    makes up for entries that h_i had late. ValueError for others.

    The exchange returns a copy of h, a dense gradient, though only its change was sent. There is no residual, and
    `rescale` changes nothing. All arrays have the dtype of the gradients, or float32 for float16; with means in float16
    h still drifts: use float32 gradients.

    >>> exchange = GradientExchange(comm, TopK(k=2), EF21())
    >>> [exchange(gradient).tolist() for step in range(2)]
    [[0.0, -3.0, 0.0, 2.0], [0.5, -3.0, 0.25, 2.0]]
    """

    has_dense_result = True
    _common = ("aggregate",)

    def __init__(self, momentum: float = 1.0, *, eta: float = 0.0) -> None:
        super().__init__()
        refuse_bools(momentum=momentum, eta=eta)
        if not 0 < momentum <= 1:
            raise ValueError(f"momentum is {momentum!r}: expected 0 < momentum <= 1 (1 is EF21 without momentum)")
        if not 0 <= eta < math.inf:
            raise ValueError(f"eta is {eta!r}: expected 0 <= eta < infinity (0 is EF21, above 0 EControl)")
        self.momentum, self.eta = float(momentum), float(eta)

    @property
    def local(self) -> Array | None:
        """h_i, shape (n,): a read-only view, valid until the next call; None before the first step."""
        return self._view("local")

    @property
    def aggregate(self) -> Array | None:
        """h, shape (n,), the same on every rank: a read-only view, valid until the next call; None at first."""
        return self._view("aggregate")

    def correct(self, gradient: Array) -> Array:
        """Return v_i - h_i + eta e_i for the new v_i; changes no array that is kept.

        Raises what `ErrorFeedback.correct` does. Arrays of float32 accept gradients of float16 and of float32.
        """
        self._stage(gradient)
        target = gradient
        if self.momentum != 1:  # (1 - b) v + b g, as b ((1 - b) / b v + g), which needs no second buffer
            b = self.momentum if self._begun else 1.0
            target = np.multiply(self._arrays["target"], (1 - b) / b, out=self._spare("target"))
            target += gradient
            target *= b
        corrected = self._spare("corrected", gradient.dtype)
        np.subtract(target, self._arrays["local"], out=corrected, casting="same_kind")
        if self.eta:
            np.add(self._arrays["error"], corrected, out=self._spare("error"))
            corrected += (self.eta * self._arrays["error"]).astype(corrected.dtype, copy=False)
        return corrected

    def settle(self, corrected: Array, sent: SparseVector, rejected: SparseVector | None, mean: SparseVector) -> Added:
        """Prepare to add sent - rejected to h_i, and the mean (or the sum) to h; see `Feedback.settle`.

        Raises OverflowError if h_i or h leaves the range of the gradients.
        """
        local, aggregate = self._arrays["local"], self._arrays["aggregate"]
        self._check_staged(local.size, sent, rejected, mean)
        moved = sent if rejected is None else merge(sent, SparseVector(rejected.indices, -rejected.values, local.size))
        for name, array, change in ("h_i", local, moved), ("h", aggregate, mean):
            values = kernels_for(array).gather(array, change.indices)
            values += change.values
            check_range(values.astype(mean.dtype, copy=False), f"{name} of EF21")
            self._writes.append((array, change.indices, values))
        if self.eta:
            kernels_for(local).scatter_add(self._spares["error"], moved.indices, -moved.values)
        self._settled = self._varying
        return ()

    def result(self, mean: SparseVector | Array) -> Array:
        """Return h, a dense gradient."""
        return self._arrays["aggregate"]

    def _layout(self, dtype: np.dtype[Any]) -> Layout:
        return dict.fromkeys(("local", "aggregate", *self._varying), wide(dtype))

    @property
    def _varying(self) -> tuple[str, ...]:
        """The arrays of which each step makes all values anew."""
        return ("target",) * (self.momentum != 1) + ("error",) * (self.eta != 0)
