"""Command-line options of `mpicomp`: the parser, and the types of values."""

import argparse
import difflib
import math
import shutil
from collections.abc import Callable
from decimal import Decimal
from typing import Any

# Largest count: so many numbers of 8 bytes have an address each, if no memory.
MOST = 10**18
POWERS = {"K": 3, "M": 6, "G": 9, "B": 9, "T": 12}  # of ten, behind a number
WIDTH = 100  # columns of a help text


class Format(argparse.RawDescriptionHelpFormatter):
    """The help format: at most `WIDTH` columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(
            prog,
            max_help_position=26,
            width=min(WIDTH, shutil.get_terminal_size().columns),
        )


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that suggests the closest option for an unknown one.

    Its help has a line of description, the arguments, and unformatted examples and
    notes. The parsed namespace contains the subcommand's parser as `parser`.
    """

    def __init__(
        self, *arguments: Any, examples: str = "", notes: str = "", **settings: Any
    ) -> None:
        settings["formatter_class"] = Format
        if examples:
            lines = "".join(f"  {line}\n" for line in examples.strip().splitlines())
            settings["epilog"] = f"examples:\n{lines}" + (f"\n{notes}" if notes else "")
        super().__init__(*arguments, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; unknown arguments are an error of this parser, which knows the subcommand's options."""
        found, left = super().parse_known_args(args, namespace)
        if left:
            known = {
                option.strip("-"): option for option in self._option_string_actions
            }
            near = difflib.get_close_matches(
                left[0].partition("=")[0].strip("-"), known, 1
            )
            meant = f" (is {known[near[0]]} meant?)" if near else ""
            self.error(f"{left[0]} is not expected{meant}; see `{self.prog} --help`")
        found.parser = getattr(found, "parser", self)
        return found, left


def positive(text: str, most: int = MOST) -> int:
    """Return the whole number in a text, exactly: 25_000_000, 25e6 and 25M are the same."""
    power = POWERS.get(text[-1:].upper(), 0)
    try:
        number = Decimal(text[:-1] if power else text).scaleb(power)
        if not 1 <= number <= most or number != int(number):
            raise ValueError
    except (ValueError, ArithmeticError):
        raise argparse.ArgumentTypeError(
            f"got {text!r}: expected a whole number of at least 1 and at most {most}"
        ) from None
    return int(number)


def number(expected: str, is_one: Callable[[float], bool]) -> Callable[[str], float]:
    """Return the type of an option with a number. expected: the description in errors."""

    def parse(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not is_one(found):
            raise argparse.ArgumentTypeError(f"got {text!r}: expected {expected}")
        return found

    return parse


share = number("0 < density <= 1 (0.001 is a thousandth)", lambda found: 0 < found <= 1)
above_zero = number("a number above 0", lambda found: 0 < found < math.inf)
not_negative = number("a number of at least 0", lambda found: 0 <= found < math.inf)


class each_once(argparse.Action):  # noqa: N801
    """Store a list of values without duplicates."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: Any = None
    ) -> None:
        """Store the values."""
        setattr(namespace, self.dest, list(dict.fromkeys(values)))


def add_list(
    parser: Any, option: str, default: list[Any] | None, about: str, **how: Any
) -> None:
    """Add an option with several values; its help ends with the choices, if any, and the default."""
    choices = how.get("choices")
    known = f"{', '.join(choices)} " if choices else ""
    shown = (
        "all"
        if default in (None, choices)
        else " ".join(f"{value}" for value in default or ())
    )
    about += f"{known}({shown or 'not given'})"
    parser.add_argument(
        option,
        nargs="+",
        action=each_once,
        default=default,
        metavar="X",
        help=about,
        **how,
    )
