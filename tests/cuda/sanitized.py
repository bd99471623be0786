"""Run under AddressSanitizer, in a process of its own: every comparison, each array in memory of exactly its size.

LD_PRELOAD=$(g++ -print-file-name=libasan.so) python sanitized.py [one piece of the
source, and what to put there]
"""

import ctypes
import importlib
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
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


def function(program, module, name):
    """Return a kernel that works on copies of its arrays."""

    def launch(grid, block, args):
        copies = {
            i: Copy(arg._hidden)
            for i, arg in enumerate(args)
            if hasattr(arg, "_hidden")
        }
        sent = [
            copies[i].exact if i in copies else module._argument(arg)
            for i, arg in enumerate(args)
        ]
        offset = module.arena.base - module.arena.shown
        program.launch(name, grid, block, sent, offset=offset)
        for copy in copies.values():
            copy.back()

    return launch


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
    device.compiling._function = lambda _, name: function(program, module, name)
    for comparison in comparisons.ALL:
        comparison(device, cupy)
    print("all is well")


if __name__ == "__main__":
    main(*sys.argv[1:])
