"""Statistics of the steps of `GradientExchange` on this rank."""

from collections.abc import Sequence
from operator import add
from typing import NamedTuple


class Statistics(NamedTuple):
    """Statistics of one bucket or step on this rank, or the sums of several.

    Args:
        length: values in the gradient.
        sent: entries that this rank contributed.
        received: entries of the sum.
        rejected: entries that the collective rejected on this rank.
        nbytes: bytes of the indices and values that this rank contributed.
        compress_seconds: for the selection, with the addition of the residual.
        communicate_seconds: in messages, and in waits for other ranks.
        restore_seconds: for the mean and the next residual.
        wire_nbytes: bytes of the messages that this rank sent, as `collectives.traffic` counts.
        steps: the number of steps in the sums.
        residual_norm: Euclidean norm of this rank's residuals; None without a `log`.
        algorithms: that summed the buckets of the last step, by collective.
    """

    length: int = 0
    sent: int = 0
    received: int = 0
    rejected: int = 0
    nbytes: int = 0
    compress_seconds: float = 0.0
    communicate_seconds: float = 0.0
    restore_seconds: float = 0.0
    wire_nbytes: int = 0
    steps: int = 0
    residual_norm: float | None = None
    algorithms: str = ""

    @property
    def density(self) -> float:
        """Entries that this rank contributed, over the length."""
        return self.sent / self.length if self.length else 0.0

    def plus(self, other: "Statistics") -> "Statistics":
        """Return the sum of both; algorithms: of this one."""
        sums = map(add, self[:-2], other[:-2])
        return Statistics._make([*sums, None, self.algorithms])


def report(
    totals: Sequence[Statistics],
    skipped: int,
    ranks: int,
    size: int,
    *,
    is_on_one_node: bool,
) -> str:
    """Return lines to print: the averages of exchanges on this rank, compared with a dense allreduce.

    Calls nothing of MPI, which may be finalized.

    Args:
        totals: of the exchange that includes compilation and connections, which is left
            out unless it is the only one, and of all others.
        skipped: the number of exchanges that were skipped.
        ranks: the number of ranks P. Dense: 2 (P-1)/P n v bytes for n values of v bytes.
        size: bytes of a value.
        is_on_one_node: all ranks share memory.
    """
    more = f" ({skipped} more skipped)" if skipped else ""
    if not totals:
        return f"no exchange yet{more}"
    total = totals[-1]
    kept = total.steps
    what = "the first exchange"
    if len(totals) > 1:
        what = f"{kept} exchange{'s' * (kept > 1)} after the first"
    dense = 2 * (ranks - 1) * total.length * size // ranks
    share = f" ({total.wire_nbytes / dense:.3%})" if dense else ""
    fewer = ""
    if is_on_one_node and ranks > 1 and total.density < 1:
        fewer = "; between nodes entries are coded in fewer"
    times = total.compress_seconds, total.communicate_seconds, total.restore_seconds
    compress, communicate, restore = (
        f"{1e3 * seconds / kept:.3f}" for seconds in times
    )
    by = f", by {total.algorithms}" if total.algorithms else ""
    sent = (
        f"{total.wire_nbytes // kept}, a dense allreduce {dense // kept}{share}{fewer}"
    )
    return (
        f"{what}{more} on {ranks} ranks, {total.length // kept} values, density {total.density:.4g}{by}\n"
        f"bytes sent by this rank each time: {sent}\n"
        f"milliseconds each time: compress {compress}, communicate {communicate}, restore {restore}"
    )
