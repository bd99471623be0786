"""Momentum correction (Deep Gradient Compression): accumulate the velocity, not the gradient, and send its largest.

Source: Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally, "Deep gradient compression:
reducing the communication bandwidth for distributed training", ICLR 2018 (arXiv
1712.01887), sections 3.1 and 3.2. The rule: docs/feedback.md.

Masking, u = 0 where it was sent, prevents a stale velocity from moving an entry
further. An entry that the collective rejects on this rank is added to v again and keeps
its momentum. If everything was sent (an entry for every position, or a v of zeros
afterwards) no velocity is stale and nothing is masked: with `Dense` the mean is the
velocity of plain momentum SGD.

Differences from the paper: no Nesterov momentum; gradients are not clipped
(`collectives.torch.attach` clips those of a model); the rounding error of a quantised
value stays in v; zeros are never sent, so u is kept where v is zero. gTop-k may return
an entry to another rank than its sender: the sender then masks u, and the other rank
adds the entry to its v.

Invariant: v after + sent - rejected = v before + u, exactly where the additions are
exact.
"""

from collections.abc import Iterator
from itertools import pairwise

from mpicomp.arrays import Array, Dtype, Write
from mpicomp.arrays.device import kernels_for
from mpicomp.arrays.values import has_nonzero
from mpicomp.bases import Basis
from mpicomp.correction import Correction
from mpicomp.feedback.base import Dtypes, Feedback, accumulation_dtype
from mpicomp.settings import to_bool, to_number
from mpicomp.vector import SparseVector, places_of


class MomentumCorrection(Feedback):
    """Keep a velocity u, and the residual v; the optimiser that applies the mean has no momentum of its own.

    v has the dtype of the gradients; so has u, but for float16 it is float32. `rescale` scales
    v, not u: the optimiser applies the new learning rate to it, as to any momentum buffer.

    Args:
        momentum: m, 0 <= m <= 1.
        masking: clear u where it was sent.

    Raises:
        ValueError: `momentum` is out of range.

    Source: Y. Lin et al., Deep Gradient Compression, ICLR 2018 (arXiv 1712.01887).

    >>> exchange = GradientExchange(comm, TopK(k=2), MomentumCorrection(momentum=0.9))
    >>> exchange(gradient).tolist()
    [0.0, -3.0, 0.0, 2.0]
    """

    def __init__(self, momentum: float = 0.9, *, masking: bool = True) -> None:
        super().__init__()
        self.momentum = to_number("momentum", momentum, least=0, most=1)
        self.masking = to_bool("masking", masking)

    @property
    def velocity(self) -> Array | None:
        """The velocity u, shape (n,): a read-only view, valid until the next call; None before the first step."""
        return self._view("velocity")

    def correct(self, *gradient: Array, basis: Basis | None = None) -> Correction:
        """Return v + u for the new u; changes no array that is kept. Raises what `ErrorFeedback.correct` does."""
        parts = self._stage(gradient, basis)
        before = self._arrays["velocity"]
        velocity = self._spare("velocity")
        corrected = self._spare("residual")
        kernels = kernels_for(velocity)
        kernels.add_scaled(before, self.momentum, self._joined(parts), velocity)
        kernels.add_scaled(self._arrays["residual"], 1, velocity, corrected)
        return self._corrected(corrected)

    def prepare_residual(
        self,
        correction: Correction,
        sent: SparseVector,
        rejected: SparseVector | None = None,
    ) -> Write:
        """Prepare the correction - sent + rejected as v, and mask u; see `Feedback.prepare_residual`."""
        write = super().prepare_residual(correction, sent, rejected)
        if self.masking:
            back = sent.indices[:0] if rejected is None else rejected.indices
            velocity = self._spares["velocity"]
            kept = kernels_for(velocity).gather(velocity, back)
            for sent_indices in self._stale(correction.out, sent, rejected):
                velocity[sent_indices] = 0
            velocity[back] = kept
        return write

    def _stale(
        self, corrected: Array, sent: SparseVector, rejected: SparseVector | None
    ) -> Iterator[Array]:
        """Yield the sent indices of each segment that has non-zero entries which were not sent."""
        places = places_of(sent, self._bounds)
        returned = [0] * len(places)
        if rejected is not None:
            returned = places_of(rejected, self._bounds)
        for span, (first, end), (low, high) in zip(
            *map(pairwise, (self._bounds, places, returned)), strict=True
        ):
            is_partial = end - first < span[1] - span[0]
            if high > low or (is_partial and has_nonzero(corrected[slice(*span)])):
                yield sent.indices[first:end]

    def dtypes(self, dtype: Dtype) -> Dtypes:
        return {"residual": dtype, "velocity": accumulation_dtype(dtype)}
