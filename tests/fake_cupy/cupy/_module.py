"""RawModule: the unmodified CUDA source, executed as host C++ by tests/cuda/emulator.py."""

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cupy import cuda
from cupy._array import ran
from cupy._memory import arena

_MOST = 24  # arguments of a kernel


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

    def get_function(self, name: str) -> "RawKernel":
        if self._program is None:
            self._program = _emulator().Program(self._code, self._options)
        return RawKernel(handle_of(self._program, name))


class RawKernel:
    """A kernel; the driver knows it by its handle."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    @property
    def kernel(self) -> Any:
        return SimpleNamespace(ptr=self._handle)


def handle_of(program: Any, name: str) -> int:
    """Return the handle of a kernel of a program of tests/cuda/emulator.py."""

    def run(blocks: int, threads: int, params: int) -> None:
        ran(name)
        places = (ctypes.c_uint64 * _MOST).from_address(params)
        words = [ctypes.c_uint64.from_address(place).value for place in places]
        own = [arena.hidden(word) if arena.has(word) else word for word in words]
        offset = arena.base - arena.shown
        program.launch(name, (blocks,), (threads,), own, offset=offset)

    cuda._kernels.append(run)
    return len(cuda._kernels)


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
