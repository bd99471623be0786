"""The parser of the `mpicomp` command: an option that is none is told which one may be meant."""

import argparse
import difflib
from typing import Any

NEAR = 0.7  # of 1: how much two words must have in common for the one to be meant by the other


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that knows what it was not given, and shows examples as they are written.

    What it parses holds, as `parser`, the parser of the subcommand.
    """

    def __init__(self, *arguments: Any, examples: str = "", **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        if examples:
            settings["epilog"] = "examples:\n" + "".join(f"  {line}\n" for line in examples.strip().splitlines())
        super().__init__(*arguments, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; what is left over is an error here, where it is known what was expected."""
        found, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"{left[0]} is not expected{self._meant(left[0])}; see `{self.prog} --help`")
        found.parser = getattr(found, "parser", self)
        return found, left

    def _meant(self, word: str) -> str:
        name = word.partition("=")[0].strip("-")
        (score, _), near = max((_likeness(name, option), option) for option in self._option_string_actions)
        return f" (is {near} meant?)" if score >= NEAR else ""


def _likeness(name: str, option: str) -> tuple[float, float]:
    """Return how like a name is to an option, or to a word of it, and to all of it."""
    whole, *words = [option.strip("-"), *option.strip("-").split("-")]
    of_whole, *of_words = [difflib.SequenceMatcher(None, name, each).ratio() for each in (whole, *words)]
    return max(of_whole, *of_words), of_whole
