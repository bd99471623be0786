"""Compile unmodified CUDA source as host C++, and run its kernels: see emulation.h.

A program is compiled once: the shared object is cached by a hash of everything that
went into it.
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

SCHEDULES = (
    "round_robin",
    "reversed",
    "warp_eager",
    "last_warp_eager",
    "random:1",
    "starving:1",
)
VARIABLE = "MPICOMP_CUDA_SCHEDULE"

_HEADER = Path(__file__).with_name("emulation.h")
_FLAGS = [
    "-std=c++17",
    "-O1",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fPIC",
    "-shared",
]
_FLAGS += ["-Wall", "-Wno-unused-function", "-Wno-unknown-pragmas"]
_CHECKED = [
    "-g",
    "-fsanitize=address",
    "-fsanitize=alignment,shift,bounds,null",
    "-fsanitize-undefined-trap-on-error",
]
_MOST = 24  # arguments of a kernel


class EmulationError(RuntimeError):
    """A kernel broke a rule of CUDA's."""


class Program:
    """Kernels by name; `sources` is the text of a .cu file, or of several by their names, in order."""

    def __init__(
        self,
        sources: Mapping[str, str] | str,
        options: Sequence[str] = (),
        sanitize: bool = False,
    ) -> None:
        parts = {"kernels.cu": sources} if isinstance(sources, str) else dict(sources)
        self._source = "".join(
            f'#line 1 "{name}"\n{text}\n' for name, text in parts.items()
        )
        self._flags = [
            *_FLAGS,
            *(_CHECKED if sanitize else ()),
            *_understood(options),
        ]

    def launch(
        self,
        name: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        shared_mem: int = 0,
        schedule: str | None = None,
        offset: int = 0,
    ) -> None:
        """Run a kernel to its end. args: integers of ctypes, and addresses; EmulationError says what went wrong.

        offset: what is added to addresses in the device's memory.
        """
        assert not shared_mem, (
            "the kernels say themselves how much shared memory they take"
        )
        assert len(args) <= _MOST
        assert {*grid[1:], *block[1:]} <= {1}, "one dimension"
        values = (ctypes.c_uint64 * _MOST)(*(_word(arg) for arg in args))
        chosen = schedule or os.environ.get(VARIABLE) or SCHEDULES[0]
        kernel = ctypes.cast(getattr(self._library, name), ctypes.c_void_p)
        error = self._library.emulate(
            kernel, grid[0], block[0], values, offset, chosen.encode()
        )
        if error:
            raise EmulationError(f"{name}, schedule {chosen}: {error.decode()}")

    def set_integer(self, name: str, value: int) -> None:
        """Set a global variable of the program."""
        ctypes.c_int.in_dll(self._library, name).value = value

    @cached_property
    def _library(self) -> ctypes.CDLL:
        library = ctypes.CDLL(str(self.path))
        library.emulate.restype = ctypes.c_char_p
        library.emulate.argtypes = [
            ctypes.c_void_p,
            ctypes.c_uint,
            ctypes.c_uint,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_char_p,
        ]
        return library

    @cached_property
    def path(self) -> Path:
        """The shared object; compiled when it is asked for first."""
        digest = hashlib.sha256()
        for part in (self._source, _HEADER.read_text(), *self._flags):
            digest.update(part.encode() + b"\0")
        folder = Path(tempfile.gettempdir()) / f"mpicomp-emulated-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / f"{digest.hexdigest()[:32]}.so"
        if not path.exists():
            # one process compiles, the others wait
            with path.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    self._compile(path)
        return path

    def _compile(self, path: Path) -> None:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            source, built = Path(folder) / "kernels.cpp", Path(folder) / "kernels.so"
            source.write_text(self._source)
            command = [
                compiler(),
                *self._flags,
                "-include",
                str(_HEADER),
                "-o",
                str(built),
                str(source),
            ]
            if not shutil.which(compiler()):
                raise EmulationError(
                    "the CUDA source runs as host C++ here: install g++, or name a compiler in CXX"
                )
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=300, check=False
            )
            if done.returncode:
                raise EmulationError(f"{' '.join(command)}\n{done.stderr}")
            built.rename(path)  # whole or not at all


def compiler() -> str:
    """Return the C++ compiler that programs are compiled with."""
    return os.environ.get("CXX") or shutil.which("g++") or "c++"


def _understood(options: Sequence[str]) -> list[str]:
    """Return the options that apply, but for those that leave out kernels: g++ is quick, and a program more is not."""
    found = [option for option in options if option.startswith(("-D", "-O"))]
    return [option for option in found if "ITEMSIZE" not in option]


def _word(arg: Any) -> int:
    value = getattr(arg, "value", arg)
    assert value is None or isinstance(value, int), (
        f"{arg!r}: kernels take integers and pointers"
    )
    return (value or 0) & (1 << 64) - 1
