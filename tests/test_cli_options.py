"""Every subcommand of `mpicomp` in one table: help with examples, errors that help, output that a program reads."""

import argparse
import json
import shlex

import pytest

from collectives.cli import bench, explain, info, main, parser, train, tune
from collectives.cli.bench import collective
from collectives.cli.files import look
from collectives.profiles import NETWORKS

WRONG = "???"
EXPECTED = ("expected", "choose from")


def leaves(found):
    """Yield the parsers of the subcommands."""
    inner = [action for action in found._actions if isinstance(action, argparse._SubParsersAction)]
    for action in inner:
        for each in action.choices.values():
            yield from leaves(each)
    if not inner:
        yield found


COMMANDS = {each.prog: each for each in leaves(parser([info, bench, train, tune, explain]))}
OPTIONS = [
    pytest.param(prog, action, id=f"{prog.removeprefix('mpicomp ')} {action.option_strings[0]}")
    for prog, each in COMMANDS.items()
    for action in each._actions
    if action.option_strings and action.nargs != 0
]
EVERY = pytest.mark.parametrize("prog", COMMANDS)


def left(arguments, capsys):
    """Return the status that a command line ends with, and what it printed."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


def test_all_subcommands_are_in_the_table():
    subjects = [*collective.COLLECTIVES, "kernels", "compressors", "exchange", "overlap", "step", "plot"]
    programs = {f"mpicomp bench {subject}" for subject in subjects}
    assert set(COMMANDS) == programs | {f"mpicomp {name}" for name in ("info", "train", "tune", "explain")}


@pytest.fixture
def beside_files(tmp_path, monkeypatch):
    """A folder with the files that the examples read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profile.json").write_text(NETWORKS["1gbit"].text())
    some = ["--lengths", "500", "--densities", "0.1", "--repeats", "1", "--baselines", "dense"]
    assert main(["bench", "allgather", *some, "--json", "p2.json"]) == 0
    for ranks in 4, 8:
        (tmp_path / f"p{ranks}.json").write_bytes((tmp_path / "p2.json").read_bytes())


@EVERY
def test_help_shows_examples_that_are_understood(prog, beside_files, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("COLUMNS", "200")
    status, shown, _ = left([*prog.split()[1:], "--help"], capsys)
    assert status == 0
    lines = [line.strip() for line in shown.partition("examples:\n")[2].splitlines()]
    assert lines
    for line in lines:
        command = line[line.index("mpicomp ") :]
        assert command.startswith(prog)
        look(COMMANDS[prog].parse_args(shlex.split(command)[len(prog.split()) :]))


@pytest.mark.parametrize(("prog", "action"), OPTIONS)
def test_a_value_that_is_none_is_told_what_is_expected(prog, action, capsys):
    value = "/missing/folder/file.png" if action.dest in ("json", "plot", "output", "markdown") else WRONG
    option = action.option_strings[0]
    status, _, error = left([*prog.split()[1:], *NEEDED.get(prog, []), f"{option}={value}"], capsys)
    assert status == 2
    last = error.splitlines()[-1]
    assert last.startswith(f"{prog}: error: argument {option}: ")
    assert any(word in last for word in EXPECTED) or "cannot be read" in last, last


NEEDED = {"mpicomp explain": ["--ranks=4", "--length=100", "--density=0.1"]}  # what must be given


@pytest.mark.parametrize("prog", sorted(set(COMMANDS) - {"mpicomp bench plot"}))  # that one has no options
def test_an_option_that_is_none_is_told_which_is_meant(prog, capsys):
    near = max((name for name in COMMANDS[prog]._option_string_actions if name != "--help"), key=len)
    status, _, error = left([*prog.split()[1:], *NEEDED.get(prog, []), f"{near}s"], capsys)
    assert status == 2
    assert f"{near}s is not expected (is {near} meant?); see `{prog} --help`" in error


@pytest.mark.parametrize(
    ("given", "said"),
    [("--nodes=2", " (is --per-node meant?)"), ("--zzz", ""), ("--network-of", " (is --network meant?)")],
)
def test_what_is_meant_may_be_a_word_of_an_option(given, said, capsys):
    error = left(["explain", *NEEDED["mpicomp explain"], given], capsys)[2]
    assert f"error: {given} is not expected{said}; see" in error


def test_a_command_that_is_none_is_told_which_there_are(capsys):
    for arguments, known in (["benhc"], "explain"), (["bench", "allredcue"], "allreduce"):
        status, _, error = left(arguments, capsys)
        assert status == 2
        assert "invalid choice" in error
        assert known in error


def test_info_and_explain_print_json(capsys):
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], found["warning"]) == ("1 on 1 host", None)
    assert main(["explain", "--ranks", "4", "--length", "1e4", "--density", "0.1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"]


@EVERY
def test_there_is_output_for_programs(prog):
    assert "--json" in COMMANDS[prog]._option_string_actions or prog == "mpicomp bench plot"
