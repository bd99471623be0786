"""Faults put into the CUDA source on purpose: what the emulator is there to find."""

import importlib
import re
import threading
from itertools import count

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


def with_barriers_to_delete(text):
    """Return the text of a CUDA file in which each barrier is left out when `deleted_barrier` is its number."""
    numbers = count()
    guarded = re.sub(
        re.escape(BARRIER),
        lambda _: f"if (deleted_barrier != {next(numbers)}) {BARRIER}",
        text,
    )
    return 'extern "C" { int deleted_barrier = -1; }\n' + guarded


def replaced(text, old, new):
    """Return a text with a piece of it replaced, which has to be there once."""
    assert text.count(old) == 1, f"{text.count(old)} times in the source: {old}"
    return text.replace(old, new)


def use(source, monkeypatch, deleted_barrier=None):
    """Make the device's kernels those of another source, until the test ends."""
    compiling, module = (
        importlib.import_module(name)
        for name in ("mpicomp.kernels.device.compiling", "cupy._module")
    )
    # a program of one fault runs once: -O0 compiles it three times faster
    optimised = [] if deleted_barrier is not None else ["-O0"]
    program = Program(source, [*compiling.OPTIONS, *optimised])
    assert program.path.exists()  # compiled
    if deleted_barrier is not None:
        program.set_integer("deleted_barrier", deleted_barrier)

    def function(device, name):
        return module.handle_of(program, name)

    monkeypatch.setattr(compiling, "_plans", threading.local())
    monkeypatch.setattr(compiling, "_function", function)
