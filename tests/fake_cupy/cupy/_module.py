"""RawModule: the unmodified CUDA source, executed as host C++ by tests/cuda/emulator.py."""

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np

from cupy._array import ndarray, ran
from cupy._memory import arena


class RawModule:
    """Compile at the first use, as CuPy does."""

    def __init__(
        self,
        *,
        code: str,
        options: Sequence[str] = (),
        backend: str = "nvrtc",
        **more: Any,
    ) -> None:
        self._code, self._options = code, tuple(options)
        self._program: Any = None

    def get_function(self, name: str) -> Callable[..., None]:
        if self._program is None:
            self._program = _emulator().Program(self._code, self._options)

        def launch(
            grid: Sequence[int],
            block: Sequence[int],
            args: Sequence[Any],
            *,
            shared_mem: int = 0,
        ) -> None:
            ran(name)
            self._program.launch(
                name,
                tuple(grid),
                tuple(block),
                [_argument(arg) for arg in args],
                shared_mem,
                offset=arena.base - arena.shown,
            )

        return launch


@cache
def _emulator() -> Any:
    spec = spec_from_file_location(
        "emulator", Path(__file__).parents[2] / "cuda" / "emulator.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["emulator"] = module
    spec.loader.exec_module(module)
    return module


def _argument(arg: Any) -> Any:
    """Return an argument of a kernel as ctypes has it; Python's numbers have no size of their own, so none is taken."""
    if isinstance(arg, ndarray):
        return ctypes.c_void_p(arena.hidden(arg.data.ptr))
    if isinstance(arg, np.generic):
        return np.ctypeslib.as_ctypes_type(arg.dtype)(arg.item())
    raise TypeError(
        f"got {arg!r}: CuPy takes int and float as 64 bits; say which with a NumPy scalar"
    )
