"""What the options of the `mpicomp` command have in common: the parser, and the types of values."""

import argparse
import difflib
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

MOST = 10**18  # so many numbers of 8 bytes have an address each, if no memory


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that suggests the option that was meant, and shows examples as they are written.

    What it parses holds, as `parser`, the parser of the subcommand.
    """

    def __init__(self, *arguments: Any, examples: str = "", **settings: Any) -> None:
        settings["formatter_class"] = argparse.RawDescriptionHelpFormatter
        if examples:
            settings["epilog"] = "examples:\n" + "".join(f"  {line}\n" for line in examples.strip().splitlines())
        super().__init__(*arguments, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; what is left over is an error here, where it is known what was expected."""
        found, left = super().parse_known_args(args, namespace)
        if left:
            known = {option.strip("-"): option for option in self._option_string_actions}
            near = difflib.get_close_matches(left[0].partition("=")[0].strip("-"), known, 1)
            meant = f" (is {known[near[0]]} meant?)" if near else ""
            self.error(f"{left[0]} is not expected{meant}; see `{self.prog} --help`")
        found.parser = getattr(found, "parser", self)
        return found, left


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


def number(expected: str, is_one: Callable[[float], bool]) -> Callable[[str], float]:
    """Return the type of an option whose value is a number; expected: what an error says of it."""

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
    """Store a list of values without its repetitions."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Store the values."""
        setattr(namespace, self.dest, list(dict.fromkeys(values)))


def add_list(parser: Any, option: str, default: list[Any] | None, about: str, **how: Any) -> None:
    """Add an option with several values; its help ends with the default, and with the choices where it has some."""
    choices = how.get("choices")
    known = f"{', '.join(choices)} " if choices else ""
    shown = "all" if default in (None, choices) else " ".join(f"{value}" for value in default or ())
    parser.add_argument(
        option, nargs="+", action=each_once, default=default, metavar="X", help=f"{about}{known}({shown})", **how
    )
