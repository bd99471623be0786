"""How far the trainings are: one line that is written over."""

from time import monotonic
from typing import TextIO

_WIDTH = 24  # of the bar
_PAUSE = 0.5  # seconds between two writes


class Progress:
    """A bar over the steps of all trainings. total: those steps; out: None on ranks that say nothing."""

    def __init__(self, total: int, out: TextIO | None) -> None:
        self.total, self.out = total, out
        self._began = self._written = monotonic()
        self._label, self._before, self._end = "", 0, 0

    def begin(self, label: str, steps: int) -> None:
        """Begin a training of so many steps; what an earlier one left out, as it diverged, counts as done."""
        self._label, self._before, self._end = label, self._end, self._end + steps

    def tell(self, step: int, figure: float) -> None:
        """Take note that a step of this training is done, and of the last figure."""
        now = monotonic()
        if self.out and now - self._written >= _PAUSE:
            self._written, share = now, (self._before + step) / self.total
            left = (now - self._began) * (1 - share) / share if share else 0
            bar = f"{'#' * round(_WIDTH * share):{_WIDTH}}"
            minutes, seconds = divmod(round(left), 60)
            line = f"[{bar}] {share:4.0%} {minutes}:{seconds:02} left  {self._label}: {figure:.2f}"
            self.out.write(f"\r{line:100.100}")
            self.out.flush()

    def clear(self) -> None:
        """Make room for another line."""
        if self.out:
            self.out.write(f"\r{'':100}\r")
            self.out.flush()
