"""The `mpicomp` command in tests."""

import argparse
import json

import pytest

from mpicomp_bench import COMMANDS, main, parser


def leaves(found):
    """Yield the parsers of the subcommands."""
    inner = [
        action
        for action in found._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    for action in inner:
        for each in action.choices.values():
            yield from leaves(each)
    if not inner:
        yield found


PARSER = parser(COMMANDS.values())
SUBCOMMANDS = {each.prog: each for each in leaves(PARSER)}


def left(arguments, capsys):
    """Return the status that a command line ends with in its parser, and its last line on stderr."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code, capsys.readouterr().err.splitlines()[-1]


def written(file, *arguments):
    """Return what a command writes with --json."""
    assert main([*arguments, "--json", str(file)]) == 0
    return json.loads(file.read_text())
