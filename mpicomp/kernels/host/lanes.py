"""Passes over consecutive values that compiled kernels do in whole vectors, each declared by its formula.

A formula is a Python function of vectors and numbers, with the operators of arrays. On
arrays NumPy computes it. In a kernel it is traced once, and LLVM gets the operations on
32 lanes (and one by one for the rest), which it divides into the vectors of the
processor: no loop has to be recognised as one that can be vectorised, and no function
is compiled by itself. A product is rounded before it is added.

A call is ``name(size, array, first, array, first, ..., number, ...)``: arrays that are
read, then those that are written, each with the position of its first value. An array
that is written may be one that is read, at the same position.
"""

from collections.abc import Callable
from functools import partialmethod
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from mpicomp.kernels.host.instructions import (
    in_all_places,
    in_kernels,
    reduced,
    vector_at,
)

LANES = 32


class Lanes:
    """A vector in LLVM's code, with the operators of arrays."""

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder = builder
        self.value = value

    @property
    def element(self) -> Any:
        """The type of a lane."""
        return self.value.type.element

    def new(self, name: str, *operands: Any) -> "Lanes":
        """Return the result of an instruction on this vector and others."""
        values = [self.value, *(self.like(operand) for operand in operands)]
        return Lanes(self.builder, getattr(self.builder, name)(*values))

    def like(self, other: Any) -> Any:
        """Return the value of another vector; of an integer, a vector of it."""
        if isinstance(other, Lanes):
            return other.value
        number = int(other) if isinstance(self.element, ir.IntType) else float(other)
        return ir.Constant(self.value.type, [number] * self.value.type.count)

    def constant(self, number: int) -> "Lanes":
        """Return a number in all lanes."""
        return Lanes(self.builder, self.like(number))

    def to(self, name: str, element: Any) -> "Lanes":
        """Return the lanes converted to another type."""
        kind = ir.VectorType(element, self.value.type.count)
        return Lanes(self.builder, getattr(self.builder, name)(self.value, kind))

    def compared(self, how: str, other: Any) -> "Lanes":
        """Return a comparison; False for NaN."""
        is_integer = isinstance(self.element, ir.IntType)
        compare = self.builder.icmp_signed if is_integer else self.builder.fcmp_ordered
        return Lanes(self.builder, compare(how, self.value, self.like(other)))

    __add__ = partialmethod(new, "fadd")
    __sub__ = partialmethod(new, "fsub")
    __mul__ = partialmethod(new, "fmul")
    __truediv__ = partialmethod(new, "fdiv")
    __neg__ = partialmethod(new, "fneg")
    __and__ = partialmethod(new, "and_")
    __or__ = partialmethod(new, "or_")
    __lshift__ = partialmethod(new, "shl")
    __rshift__ = partialmethod(new, "lshr")
    __lt__ = partialmethod(compared, "<")
    __gt__ = partialmethod(compared, ">")
    __le__ = partialmethod(compared, "<=")
    __ge__ = partialmethod(compared, ">=")


def where(condition: Any, one: Any, other: Any) -> Any:
    """Return ``numpy.where(condition, one, other)``."""
    if isinstance(condition, Lanes):
        return condition.new("select", one, other)
    return np.where(condition, one, other)


def to_bits(numbers: Any) -> Any:
    """Return the bits of numbers as signed integers."""
    if not isinstance(numbers, Lanes):
        return numbers.view(f"i{numbers.itemsize}")
    is_single = isinstance(numbers.element, ir.FloatType)
    return numbers.to("bitcast", ir.IntType(32 if is_single else 64))


def magnitude_bits(numbers: Any) -> Any:
    """Return the bits of numbers without the sign."""
    keys = to_bits(numbers)
    width = keys.element.width if isinstance(keys, Lanes) else 8 * keys.itemsize
    return keys & (1 << width - 1) - 1


def magnitude(numbers: Any) -> Any:
    """Return the magnitudes of numbers."""
    if not isinstance(numbers, Lanes):
        return np.abs(numbers)
    return magnitude_bits(numbers).to("bitcast", numbers.element)


def lowest_byte(integers: Any) -> Any:
    """Return the lowest 8 bits."""
    if not isinstance(integers, Lanes):
        return integers.astype(np.uint8)
    is_bool = integers.element.width == 1
    return integers.to("zext" if is_bool else "trunc", ir.IntType(8))


def number_of_byte(integers: Any, other: Any) -> Any:
    """Return unsigned bytes as numbers of the type of another vector."""
    if not isinstance(integers, Lanes):
        return integers.astype(other.dtype)
    return integers.to("uitofp", other.element)


def lanewise(reads: int, writes: int, *, reduce: bool = False) -> Callable[[Any], Any]:
    """Return a decorator of formulas that makes them passes.

    reads, writes: the number of arrays that are read and written. reduce: the formula
    returns one more vector, of integers that are not negative, and the pass its
    maximum.
    """
    arrays = reads + writes

    def declare(formula: Any) -> Any:
        def run(size, *arguments):  # type: ignore[no-untyped-def]
            spans = [
                slice(int(first), int(first + size))
                for first in arguments[1 : 2 * arrays : 2]
            ]
            views = [arguments[2 * i][spans[i]] for i in range(arrays)]
            results = formula(*views[:reads], *arguments[2 * arrays :])
            for view, result in zip(views[reads:], results, strict=False):
                view[...] = result
            return results[-1].max(initial=0) if reduce else None

        run.__name__ = formula.__name__
        run.__doc__ = formula.__doc__

        def definition(typing: Any, *arguments: Any) -> Any:
            key = types.Integer.from_bitwidth(arguments[1].dtype.bitwidth)
            taken = [types.intp]
            for array in arguments[1 : 2 * arrays : 2]:
                taken += [array, types.intp]
            taken += arguments[2 * arrays + 1 :]
            result = key if reduce else types.void
            return result(*taken), _code_of(formula, reads, arrays, reduce)

        in_kernels(run)(definition)
        return run

    return declare


def _code_of(formula: Any, reads: int, arrays: int, reduce: bool) -> Any:
    """Return the generator of the code of a pass: a loop over 32 lanes, and one over single values."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        size = arguments[0]
        zero = ir.Constant(size.type, 0)
        vectorised = builder.and_(size, ir.Constant(size.type, -LANES))
        maxima = []
        for lanes, start, end in ((LANES, zero, vectorised), (1, vectorised, size)):
            if reduce:
                key = context.get_value_type(signature.return_type)
                none = ir.Constant(ir.VectorType(key, lanes), None)
                maxima.append(cgutils.alloca_once_value(builder, none))
            step = ir.Constant(size.type, lanes)
            with cgutils.for_range_slice(builder, start, end, step) as (index, _):
                addresses = [
                    _address_of(
                        context, builder, signature, arguments, at, index, lanes
                    )
                    for at in range(1, 2 * arrays, 2)
                ]
                vectors = [
                    Lanes(builder, builder.load(*address))
                    for address in addresses[:reads]
                ]
                for number in arguments[2 * arrays + 1 :]:
                    vector = ir.VectorType(number.type, lanes)
                    vectors.append(
                        Lanes(builder, in_all_places(builder, number, vector))
                    )
                results = formula(*vectors)
                for result, address in zip(results, addresses[reads:], strict=False):
                    place, _, align = address
                    builder.store(result.value, place, align=align)
                if reduce:
                    before = Lanes(builder, builder.load(maxima[-1]))
                    largest = where(results[-1] > before, results[-1], before)
                    builder.store(largest.value, maxima[-1])
        if not reduce:
            return context.get_dummy_value()
        return _maximum(builder, *(builder.load(maximum) for maximum in maxima))

    return code


def _address_of(
    context: Any,
    builder: Any,
    signature: Any,
    arguments: Any,
    at: int,
    index: Any,
    lanes: int,
) -> tuple[Any, str, int]:
    """Return the address, a name and the alignment of the lanes of an array that is argument `at`."""
    array = signature.args[at]
    first = builder.add(arguments[at + 1], index)
    address = vector_at(context, builder, array, arguments[at], first, lanes)
    return address, "", array.dtype.bitwidth // 8


def _maximum(builder: Any, many: Any, one: Any) -> Any:
    """Return the largest lane of two vectors, the second of one lane."""
    first = reduced(builder, "smax", many)
    other = builder.extract_element(one, ir.Constant(ir.IntType(32), 0))
    larger = builder.icmp_signed(">", first, other)
    return builder.select(larger, first, other)
