"""The files that options name: looked at before anything is measured, and written whole or not at all.

Ranks on other nodes may not see the folder. So parsing, which all of them do, takes down paths alone; rank 0 looks at
what is there, reads, writes, and tells the others how that went.
"""

import argparse
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collectives import profiles
from collectives.profiles import Profile, ProfileError


@dataclass(frozen=True)
class FileType:
    """The type of an option that names a file: the path. found: what `look` makes of it, or an ArgumentTypeError."""

    found: Callable[[Path], Any]

    def __call__(self, text: str) -> Path:
        """Return the path, unseen."""
        return Path(text)


@FileType
def new_file(path: Path) -> Path:
    """Return the path of a file that can be made; a regular one that is there will be replaced."""
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    wrong = None
    if os.path.isdir(target):
        wrong = "it is a folder"
    elif not os.path.isdir(folder):
        wrong = f"there is no folder {folder!r}"
    elif os.path.lexists(target) and not os.path.isfile(target):
        wrong = "it is a device, a pipe or another file that holds nothing"
    elif not os.access(folder, os.W_OK | os.X_OK):
        wrong = f"the folder {folder!r} takes no new file"
    if wrong:
        raise argparse.ArgumentTypeError(
            f"got {str(path)!r}: {wrong}; expected the name of a file in a folder that exists"
        )
    return path


@FileType
def new_figure(path: Path) -> Path:
    """Return the path of a figure that can be drawn, in a format that matplotlib knows."""
    new_file.found(path)
    try:
        figure: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise argparse.ArgumentTypeError("a plot needs matplotlib: pip install matplotlib, or use --json") from None
    known = figure.Figure().canvas.get_supported_filetypes()
    if path.suffix[1:] not in known:
        raise argparse.ArgumentTypeError(f"got {str(path)!r}: expected a name that ends in .{', .'.join(known)}")
    return path


@FileType
def a_profile(path: Path) -> Profile:
    """Return the profile in a file."""
    try:
        return profiles.load(path)
    except ProfileError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@FileType
def rows_file(path: Path) -> list[dict[str, Any]]:
    """Return the rows that a benchmark of a collective wrote to a file."""
    from collectives.cli.bench import chart

    try:
        return chart.read(path)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"got {str(path)!r}: {error}") from None


def look(options: argparse.Namespace, comm: Any = None) -> None:
    """Put what the files are in place of their paths, as rank 0 sees them; where one is wrong, all ranks leave.

    comm: None where there is no MPI.
    """
    seen = _seen(options) if comm is None or comm.rank == 0 else None
    if comm is not None:
        seen = comm.bcast(seen)
    if seen is None:
        raise SystemExit(2)
    vars(options).update(seen)


def _seen(options: argparse.Namespace) -> dict[str, Any] | None:
    """Return what there is in the files by option; None where one is wrong, after the parser's error."""
    try:
        return {name: _found(action, getattr(options, name)) for name, action in _named(options).items()}
    except argparse.ArgumentError as error:
        options.parser.print_usage(sys.stderr)
        sys.stderr.write(f"{options.parser.prog}: error: {error}\n")
        return None


def _found(action: argparse.Action, paths: Path | list[Path] | None) -> Any:
    kind: Any = action.type
    try:
        if not isinstance(paths, list):
            return paths and kind.found(paths)
        for place, path in enumerate(paths):
            if os.path.realpath(path) in map(os.path.realpath, paths[:place]):
                raise argparse.ArgumentTypeError(f"got {str(path)!r} twice: expected each file once")
        return [kind.found(path) for path in paths]
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentError(action, str(error)) from None


def _named(options: argparse.Namespace) -> dict[str, argparse.Action]:
    """Return the options that name files."""
    return {action.dest: action for action in options.parser._actions if isinstance(action.type, FileType)}


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options by name but those that name files: what can be told of a run."""
    left_out = {*_named(options), "parser", "command"}
    return {name: value for name, value in vars(options).items() if name not in left_out}


def write(options: argparse.Namespace, comm: Any = None, **makers: Callable[[Path], Any]) -> int:
    """Write the files that are asked for on rank 0, by option, each by a call with a path; all ranks call.

    Where one cannot be written the command says why, goes on with the next, and this returns 1 on all ranks. comm: None
    where one rank is alone with it.
    """
    if comm is None:
        return _written(options, makers)
    failed: int = comm.bcast(0 if comm.rank else _written(options, makers))
    return failed


def _written(options: argparse.Namespace, makers: Mapping[str, Callable[[Path], Any]]) -> int:
    failed = 0
    for name, make in makers.items():
        path = getattr(options, name)
        try:
            if path:
                _replace(path, make)
        except OSError as error:
            failed, action = 1, _named(options)[name]
            other = "/".join(action.option_strings) or action.metavar
            reason = error.strerror or error
            sys.stderr.write(f"{options.parser.prog}: cannot write {path}: {reason}; name another file with {other}\n")
    return failed


def _replace(path: Path, make: Callable[[Path], Any]) -> None:
    """Have a file made beside the one that it then replaces: of a link, the one that it points to."""
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".mpicomp-", dir=target.parent) as folder:
        whole = Path(folder, path.name)  # its end says in which format a figure is drawn
        make(whole)
        with whole.open("r+b") as file:
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, whole)
        whole.replace(target)
