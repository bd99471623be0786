"""What a call of the exchange did on this rank, as plain numbers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Statistics:
    """What one call did on this rank. Times in seconds; entries as counts (received: of the sum, or of all parts).

    nbytes: of the indices and values that this rank brought; what travelled for it is in `collectives.traffic`.
    residual_norm: Euclidean, over all that this rank keeps; None unless the exchange has a `log`.
    """

    length: int
    sent: int
    received: int
    rejected: int
    nbytes: int
    compress_seconds: float
    communicate_seconds: float
    restore_seconds: float
    residual_norm: float | None = None

    @property
    def density(self) -> float:
        """Entries that this rank brought over the length."""
        return self.sent / self.length if self.length else 0.0
