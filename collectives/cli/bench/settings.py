"""What the options of a benchmark mean: a value, or an error that says what is expected before anything is measured."""

import argparse
from collections.abc import Callable
from decimal import Decimal
from typing import Any

MOST = 10**18  # so many numbers of 8 bytes have an address each, if no memory


def positive(text: str, most: int = MOST) -> int:
    """Return the whole number that a text says, to the last digit: 25_000_000 and 25e6 are one."""
    try:
        number = Decimal(text)
        if not 1 <= number <= most or number != int(number):
            raise ValueError
    except (ValueError, ArithmeticError):
        raise argparse.ArgumentTypeError(
            f"got {text!r}: expected a whole number of at least 1 and at most {most}"
        ) from None
    return int(number)


def share(text: str) -> float:
    """Return the density that a text says."""
    try:
        density = float(text)
        if not 0 < density <= 1:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}: expected 0 < density <= 1 (0.001 is a thousandth)") from None
    return density


def above_zero(text: str) -> float:
    """Return the finite number above 0 that a text says."""
    return _finite(text, "above 0", lambda number: number > 0)


def not_negative(text: str) -> float:
    """Return the finite number that a text says; 0 is one."""
    return _finite(text, "of at least 0", lambda number: number >= 0)


def _finite(text: str, kind: str, is_one: Callable[[float], bool]) -> float:
    try:
        number = float(text)
        if not is_one(number) or number == float("inf"):
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}: expected a number {kind}") from None
    return number


class each_once(argparse.Action):  # noqa: N801
    """Store a list of values without its repetitions."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Store the values."""
        setattr(namespace, self.dest, list(dict.fromkeys(values)))
