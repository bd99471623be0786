"""Run under AddressSanitizer, in a process of its own: every comparison, each array in memory of exactly its size.

LD_PRELOAD=$(g++ -print-file-name=libasan.so) python sanitized.py [one piece of the
source, and what to put there]
"""

import ctypes
import importlib
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
LIBC = ctypes.CDLL(None)
LIBC.malloc.restype = ctypes.c_void_p
LIBC.malloc.argtypes = [ctypes.c_size_t]
LIBC.free.argtypes = [ctypes.c_void_p]


class Copy:
    """An array's bytes in memory that ends where they do; they go back afterwards."""

    def __init__(self, hidden):
        self.address, self.size = hidden.ctypes.data, hidden.nbytes
        self.exact = LIBC.malloc(self.size)
        ctypes.memmove(self.exact, self.address, self.size)

    def back(self):
        ctypes.memmove(self.address, self.exact, self.size)
        LIBC.free(self.exact)


def plan(program, module, name):
    """Return what starts a kernel on copies of its arrays."""
    arena = module.arena

    def own(word):
        """Return a number, or where the memory is that it is the address of: parts of what one operation clears."""
        return arena.hidden(word) if arena.has(word) else word

    def start(blocks, threads, args):
        copies = [Copy(arg._hidden) for arg in args if hasattr(arg, "_hidden")]
        exact = iter(copies)
        sent = [
            next(exact).exact if hasattr(arg, "_hidden") else own(int(arg or 0))
            for arg in args
        ]
        offset = arena.base - arena.shown
        program.launch(name, (blocks,), (threads,), sent, offset=offset)
        for copy in copies:
            copy.back()

    return start


def main(*replacement):
    os.environ.pop("LD_PRELOAD", None)  # the compiler needs no sanitizer
    from devices import cupy_for_tests

    cupy = cupy_for_tests()
    import comparisons

    # tiles and alignment depend on a value's size
    comparisons.DTYPES[:] = comparisons.DTYPES[::2]
    from emulator import Program
    from mutants import replaced

    device = importlib.import_module("mpicomp.kernels.device")
    module, source = importlib.import_module("cupy._module"), device.compiling.source()
    program = Program(
        replaced(source, *replacement) if replacement else source, sanitize=True
    )
    device.compiling._plan = lambda _, name, arguments: plan(program, module, name)
    for comparison in comparisons.ALL:
        comparison(device, cupy)
    print("all is well")


if __name__ == "__main__":
    main(*sys.argv[1:])
