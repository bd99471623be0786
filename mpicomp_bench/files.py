"""Files named by options: checked before anything is measured, written whole or not at all.

Ranks on other nodes may have no access to the folder. So parsing, on all ranks, only
stores paths; rank 0 checks, reads and writes, and broadcasts the result.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class FileType:
    """The type of an option that names a file: its path. convert: converts the path in `check_files`."""

    convert: Callable[[Path], Any]

    def __call__(self, text: str) -> Path:
        """Return the path, unchecked."""
        return Path(text)


@FileType
def new_file(path: Path) -> Path:
    """Return the path of a file that can be created; an existing regular file will be replaced."""
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    wrong = None
    if os.path.isdir(target):
        wrong = "it is a folder"
    elif not os.path.isdir(folder):
        wrong = f"there is no folder {folder!r}"
    elif os.path.lexists(target) and not os.path.isfile(target):
        wrong = "it is a device, a pipe or another special file"
    elif not os.access(folder, os.W_OK | os.X_OK):
        wrong = f"the folder {folder!r} is not writable"
    if wrong:
        raise argparse.ArgumentTypeError(
            f"got {str(path)!r}: {wrong}; expected the name of a file in a folder that exists"
        )
    return path


def check_files(options: argparse.Namespace, comm: Any = None) -> None:
    """Replace the paths by rank 0's results of `convert`; if one is wrong, all ranks exit with status 2.

    comm: None without MPI.
    """
    converted: dict[str, Any] | None = {}
    if comm is None or comm.rank == 0:
        try:
            named = _file_options(options).items()
            converted = {
                name: _converted(action, getattr(options, name))
                for name, action in named
            }
        except argparse.ArgumentError as error:
            options.parser.print_usage(sys.stderr)
            sys.stderr.write(f"{options.parser.prog}: error: {error}\n")
            converted = None
    if comm is not None:
        converted = comm.bcast(converted)
    if converted is None:
        raise SystemExit(2)
    vars(options).update(converted)


def _converted(action: argparse.Action, path: Path | None) -> Any:
    kind: Any = action.type
    try:
        return path and kind.convert(path)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentError(action, str(error)) from None


def _file_options(options: argparse.Namespace) -> dict[str, argparse.Action]:
    """Return the options that name files."""
    return {
        action.dest: action
        for action in options.parser._actions
        if isinstance(action.type, FileType)
    }


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options by name, without those that name files."""
    left_out = {*_file_options(options), "parser", "command"}
    return {
        name: value for name, value in vars(options).items() if name not in left_out
    }


def write(
    options: argparse.Namespace, comm: Any = None, **makers: Callable[[Path], Any]
) -> int:
    """Write the requested files on rank 0, each by a call with a path; all ranks call.

    If one cannot be written, rank 0 prints the reason and continues with the next;
    returns 1 on all ranks then, else 0. comm: None for a single rank.
    """
    failed = _written(options, makers) if comm is None or comm.rank == 0 else 0
    return failed if comm is None else int(comm.bcast(failed))


def _written(
    options: argparse.Namespace, makers: Mapping[str, Callable[[Path], Any]]
) -> int:
    failed = 0
    for name, make in makers.items():
        path = getattr(options, name)
        try:
            if path:
                _replace(path, make)
        except OSError as error:
            failed = 1
            reason = error.strerror or error
            sys.stderr.write(
                f"{options.parser.prog}: cannot write {path}: {reason}; name another file with --{name}\n"
            )
    return failed


def _replace(path: Path, make: Callable[[Path], Any]) -> None:
    """Write a file beside the target, then rename it; follows a symbolic link."""
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".mpicomp-", dir=target.parent) as folder:
        # The name keeps its suffix, by which the format of a figure is chosen.
        whole = Path(folder, path.name)
        make(whole)
        with whole.open("r+b") as file:
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, whole)
        whole.replace(target)
