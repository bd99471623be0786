"""Statistics of the steps of `GradientExchange` on this rank."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Statistics:
    """Statistics of one step or several on this rank. Times in seconds.

    length: values in the gradient. sent: entries contributed by this rank; received: entries of the sum, or of all
    parts. nbytes: bytes of the indices and values that this rank contributed; wire_nbytes: bytes of the messages it
    sent in the step, as counted by `collectives.traffic`. residual_norm: Euclidean norm of this rank's residuals; None
    unless the exchange has a `log`.
    """

    length: int
    sent: int
    received: int
    rejected: int
    nbytes: int
    compress_seconds: float
    communicate_seconds: float
    restore_seconds: float
    wire_nbytes: int
    residual_norm: float | None = None

    @classmethod
    def of(cls, flights: Sequence[Any], wire_nbytes: int, residual_norm: float | None) -> "Statistics":
        """Return the statistics of a step, summed over its messages."""
        names = [field.name for field in fields(cls)][:-2]
        sums = {name: sum(vars(flight)[name] for flight in flights) for name in names}
        return cls(**sums, wire_nbytes=wire_nbytes, residual_norm=residual_norm)

    @property
    def density(self) -> float:
        """Entries contributed by this rank, over the length."""
        return self.sent / self.length if self.length else 0.0

    def plus(self, other: "Statistics | None") -> "Statistics":
        """Return the sum of both."""
        if other is None:
            return self
        names = [field.name for field in fields(self)][:-1]
        return Statistics(*[vars(self)[name] + vars(other)[name] for name in names])


def report(total: Statistics | None, steps: int, skipped: int, ranks: int, itemsize: int) -> str:
    """Return lines to print: the averages of steps on this rank, compared with a dense allreduce.

    total: of the steps that were kept, None without any; skipped: the number of skipped steps. itemsize: bytes of a
    value. Dense: 2 (P-1)/P n v bytes for n values of v bytes.
    """
    more = f" ({skipped} more skipped)" if skipped else ""
    if total is None:
        return f"no step yet{more}"
    dense = 2 * (ranks - 1) * total.length * itemsize // ranks
    share = f" ({total.wire_nbytes / dense:.3%})" if dense else ""
    times = total.compress_seconds, total.communicate_seconds, total.restore_seconds
    compress, communicate, restore = (f"{1e3 * seconds / steps:.3f}" for seconds in times)
    return "\n".join(
        [
            f"{steps} steps{more} on {ranks} ranks, {total.length // steps} values, density {total.density:.4g}",
            f"bytes sent by this rank a step: {total.wire_nbytes // steps}, a dense allreduce {dense // steps}{share}",
            f"milliseconds a step: compress {compress}, communicate {communicate}, restore {restore}",
        ]
    )
