"""Two-way compression: a root compresses the mean over the ranks again, with a residual of its own.

Sources: H. Tang, C. Yu, X. Lian, T. Zhang, J. Liu, "DoubleSqueeze: parallel stochastic gradient descent with
double-pass error-compensated compression", ICML 2019 (arXiv 1905.05957); with step-ahead error feedback: arXiv
2008.05823.

    q = s + mean D,   o = C(q),   s = q - o          on the root, which broadcasts o

The vectors are reduced to a root, which broadcasts the selected entries of the sum: `GradientExchange(..., downlink=)`.
So the root sends the bytes of o, not those of the denser sum.

Differences from the papers: the root is one of the ranks, and with several buckets another one for each.

Invariant: s after + o = s before + mean, exactly where the additions are exact.
"""

import numpy as np

from mpicomp.arrays import kernels_for, namespace, read_only
from mpicomp.compressors import Compressor
from mpicomp.compressors.base import check_selected
from mpicomp.feedback.base import Feedback
from mpicomp.vector import SparseVector


class TwoWay(Feedback):
    """Compress the mean over the ranks at the root, with a residual of its own.

    compressor: an object of its own, with the same settings on every rank (an exchange compares them), not the one that
    compresses the gradient. Only the root uses it, and only the root has a residual. `root`, its rank, is set by the
    exchange, and saved with the residual, so that they stay together.

    A step calls `compress_mean`, then `commit` once the result is certain to be used. The residual has the units of the
    vectors that the ranks send: `rescale` it if they send gradients, not if they send updates (`StepAhead`).

    >>> exchange = GradientExchange(comm, TopK(k=2), downlink=TwoWay(TopK(k=1)))
    >>> exchange(gradient).tolist()
    [0.0, -3.0, 0.0, 0.0]
    """

    _numbers = ("root",)

    def __init__(self, compressor: Compressor) -> None:
        super().__init__()
        self.compressor, self.root = compressor, 0

    def compress_mean(self, mean: SparseVector, compressor: Compressor | None = None) -> SparseVector:
        """Return the compressed mean; the residual does not change before `commit`.

        mean: of numbers, of the length and dtype of the calls before, else ValueError. compressor: in place of
        `self.compressor`, such as one of several segments. Raises the errors of the
        compressor, and TypeError or ValueError if its result is not a vector of this length and dtype. A second call
        without `commit` returns the same, if the compressor does.
        """
        xp = namespace(mean.values)
        self._stage(xp.broadcast_to(xp.zeros((), mean.dtype), (mean.length,)))
        total, fresh = self._spare("residual"), self._spare("aggregate", mean.dtype)
        np.copyto(total, self._arrays["residual"])
        kernels_for(total).scatter_add(total, mean.indices, mean.values)
        compressor = compressor or self.compressor
        result = compressor.compress(read_only(total), gradient=mean.to_dense(fresh))
        check_selected(result, total, compressor)
        self._subtract(total, result, None)
        self._settled = ("residual",)
        return result

    def commit(self) -> None:
        """Keep mean - result of the last `compress_mean`; raises RuntimeError without one."""
        if not self._settled:
            raise RuntimeError("commit without compress_mean: call compress_mean before each commit")
        super().commit()

    def __repr__(self) -> str:
        return f"TwoWay({self.compressor!r})"
