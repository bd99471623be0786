"""Steps that are skipped in a row: a warning on all ranks, as parameters that are not finite never end it."""

from mpicomp.errors import warn
from mpicomp.settings import to_integer


class Skips:
    """The skipped steps since the last one that was kept. most_skips: those after which it warns, once."""

    def __init__(self, most_skips: int) -> None:
        self._most = to_integer("most_skips", most_skips)
        self._in_a_row = 0

    def end(self) -> None:
        """Count from 0 again, as a step was kept."""
        self._in_a_row = 0

    def count(self, why: str) -> None:
        """Count a step. why: the error that skipped it, which names the ranks and the values."""
        self._in_a_row += 1
        if self._in_a_row == self._most:
            warn(
                f"{self._most} steps in a row were skipped on all ranks, and others will be until gradients are "
                f"finite. The last one: {why}",
                depth=5,
            )
