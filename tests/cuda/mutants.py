"""Faults put into the CUDA source on purpose: what the emulator is there to find."""

import importlib
import re
from itertools import islice

from emulator import Program

BARRIER = "__syncthreads();"


def barriers(text):
    """Return the names of the functions of a CUDA file that its barriers are in, one for each."""
    names, name = [], ""
    for line in text.splitlines():
        defined = re.match(r"(?:__device__|KERNEL).*?(\w+)\(", line)
        name = defined.group(1) if defined else name
        names += [name] * line.count(BARRIER)
    return names


def without_barrier(text, number):
    """Return the text of a CUDA file without one of its barriers."""
    found = next(islice(re.finditer(re.escape(BARRIER), text), number, None))
    return text[: found.start()] + text[found.end() :]


def replaced(text, old, new):
    """Return a text with a piece of it replaced, which has to be there once."""
    assert text.count(old) == 1, f"{text.count(old)} times in the source: {old}"
    return text.replace(old, new)


def use(source, monkeypatch, **how):
    """Make the device's kernels those of another source, until the test ends."""
    compiling, module = (importlib.import_module(name) for name in ("mpicomp.kernels.device.compiling", "cupy._module"))
    program = Program(source, compiling.OPTIONS, **how)
    assert program.path.exists()  # compiled

    def function(device, name):
        return lambda grid, block, args: program.launch(name, grid, block, [module._argument(arg) for arg in args])

    monkeypatch.setattr(compiling, "_function", function)
