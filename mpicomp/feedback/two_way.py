"""Two-way compression: the mean over the ranks is compressed again, with a residual of its own.

Sources: H. Tang, C. Yu, X. Lian, T. Zhang, J. Liu, "DoubleSqueeze: parallel stochastic gradient descent with
double-pass error-compensated compression", ICML 2019 (arXiv 1905.05957); with step-ahead error feedback: arXiv
2008.05823.

    q = s + mean D,   o = C(q),   s = q - o

Differences from the papers: there is no server. Every rank has the same mean, so every rank computes the same bits of o
and s, and nothing is sent. If one rank acts as a server, only that rank needs the object.

Invariant: s after + o = s before + mean, exactly where the additions are exact.
"""

import numpy as np

from mpicomp.arrays import kernels_for, namespace, read_only
from mpicomp.compressors import Compressor
from mpicomp.feedback.base import Feedback
from mpicomp.vector import SparseVector


class TwoWay(Feedback):
    """Compress the mean over the ranks, with a residual of its own.

    compressor: an object of its own on every rank, with the same settings (an exchange compares them), not the one that
    compresses the gradient.

    A step calls `compress_mean`, then `commit` once the result is certain to be used. The residual has the units of the
    vectors that the ranks send: `rescale` it if they send gradients, not if they send updates (`StepAhead`).
    """

    def __init__(self, compressor: Compressor) -> None:
        super().__init__()
        self.compressor = compressor

    def compress_mean(self, mean: SparseVector) -> SparseVector:
        """Return the compressed mean; the residual does not change before `commit`.

        mean: of numbers, of the length and dtype of the calls before, else ValueError. Raises what the compressor
        raises. A second call without `commit` returns the same, if the compressor does.
        """
        xp = namespace(mean.values)
        self._stage(xp.broadcast_to(xp.zeros((), mean.dtype), (mean.length,)))
        total, fresh = self._spare("residual"), self._spare("aggregate", mean.dtype)
        np.copyto(total, self._arrays["residual"])
        kernels_for(total).scatter_add(total, mean.indices, mean.values)
        result = self.compressor.compress(read_only(total), gradient=mean.to_dense(fresh))
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
