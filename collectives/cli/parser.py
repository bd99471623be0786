"""The parser of the `mpicomp` command: an option that is none is told which one may be meant."""

import argparse
import difflib
from typing import Any


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that knows what it was not given, and shows examples as they are written."""

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
        return found, left

    def _meant(self, word: str) -> str:
        name = word.partition("=")[0]
        near = difflib.get_close_matches(name, self._option_string_actions, n=1)
        return f" (is {near[0]} meant?)" if near else ""
