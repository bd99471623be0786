"""Ask for data before it is needed: a pass over it in chunks is then up to a quarter faster.

The processor sees by itself that memory is read in order, but stays inside a page, and is late where a chunk is short.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

CHUNK = 32  # values that are looked at together
_AHEAD = 1 << 14  # bytes: four pages; half and twice of it are as good
_LINE = 64  # bytes that come at once
_READ, _ONCE, _DATA = 0, 0, 1  # the arguments of llvm.prefetch: what for, how soon again, and into which cache


def prefetch(array, first):  # type: ignore[no-untyped-def]
    """Begin to read the chunk that stands a few pages behind the one at `first` of a contiguous array; for kernels.

    It changes no result, and does nothing behind the end of the array, nor where a kernel runs as Python.
    """


@overload(prefetch)
def _in_kernels(array, first):  # type: ignore[no-untyped-def]
    return lambda array, first: _prefetch(array, first)


@intrinsic
def _prefetch(typing: Any, array: Any, first: Any) -> Any:
    """Return the signature of the instructions that do so, and what makes them: one for each line of the chunk."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        itemsize, number = array.dtype.bitwidth // 8, ir.IntType(32)
        data = context.make_array(array)(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        shape = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
        instruction = builder.module.declare_intrinsic("llvm.prefetch", [place.type], shape)
        for offset in range(_AHEAD, _AHEAD + CHUNK * itemsize, _LINE):
            line = builder.gep(place, [ir.Constant(ir.IntType(64), offset)])
            builder.call(instruction, [line, *(ir.Constant(number, each) for each in (_READ, _ONCE, _DATA))])
        return context.get_dummy_value()

    return types.void(array, first), code
