"""Functions for kernels that processors execute in a few instructions, and that Numba does not expose.

Each is a Python function that compiled kernels replace by LLVM's intrinsics; LLVM
selects the instructions of the processor.
"""

import ctypes
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import lower_builtin, type_callable
from numba.np.arrayobj import populate_array

WORD = 64  # values, or bits, that are processed together
LINE = 64  # bytes of a cache line
SUMMED = 128  # lanes of the sum of a block
STRIDES = 1, 2, 4, 8, 16, 32  # of the butterflies of 64 values
# The 8 bytes of up to 64 values have these weights; they are odd, so that each word
# changes a sum.
WEIGHTS = np.random.RandomState(1).randint(1 << 63, size=WORD, dtype=np.uint64) * 2 + 1


def reaching(bits, first, mask, floor):  # type: ignore[no-untyped-def]
    """Return, as the bits of a uint64, which of the 64 integers from `first` on are at least `floor` under `mask`.

    bits: a contiguous array of signed integers, or of numbers whose bits are meant,
    with at least 64 from `first` on. mask, floor: signed integers of that width.
    """
    return _as_word(bits[first : first + WORD].view(mask.dtype) & mask >= floor)


def nonzero(words, first):  # type: ignore[no-untyped-def]
    """Return, as the bits of a uint64, which of the 64 values from `first` on of a contiguous array have a bit set."""
    return _as_word(words[first : first + WORD].view(f"i{words.itemsize}") != 0)


def differing(one, other, first):  # type: ignore[no-untyped-def]
    """Return, as the bits of a uint64, in which of the 64 values from `first` on two arrays of integers differ."""
    end = first + WORD
    return _as_word(one[first:end] != other[first:end])


def word_sum(bits, first):  # type: ignore[no-untyped-def]
    """Return a sum, modulo 2^64, over the 64 values from `first` on of a contiguous array of unsigned integers.

    Of each 8 bytes, as a uint64 whose lower half is xored with the upper one, times an
    odd constant of their position (`WEIGHTS`).
    """
    words = bits[first : first + WORD].copy().view(np.uint64)
    folded = words ^ words >> np.uint64(32)
    return (folded * WEIGHTS[: words.size]).sum()


def store_sum(a, factor, b, sign, out, first):  # type: ignore[no-untyped-def]
    """Write a cache line of ``factor * a + sign * b`` to `out` from `first` on, where one begins, bypassing the cache.

    a, b, out: contiguous arrays of one dtype, float32 or float64, with a line of values
    from `first` on. factor, sign: of that dtype; sign is 1 or -1. The product is
    rounded before it is added.
    """
    end = first + LINE // out.itemsize
    out[first:end] = factor * a[first:end] + sign * b[first:end]


def store_line(values, place, out, first):  # type: ignore[no-untyped-def]
    """Write values from `place` on to the cache line of `out` from `first` on, bypassing the cache.

    values, out: of one dtype, float32 or float64.
    """
    count = LINE // out.itemsize
    out[first : first + count] = values[place : place + count]


def store_sum_reaching(a, factor, b, out, first, mask, floor):  # type: ignore[no-untyped-def]
    """Write 64 values of ``factor * a + b`` as `store_sum` does, and return which are at least `floor` under `mask`.

    mask, floor: signed integers of the width of the values. The result is that of
    `reaching` on the bits of the sums.
    """
    end = first + WORD
    out[first:end] = factor * a[first:end] + b[first:end]
    return _as_word(out[first:end].view(f"i{out.itemsize}") & mask >= floor)


def largest_sum(a, factor, b, keep, first, count):  # type: ignore[no-untyped-def]
    """Return the bits of the largest magnitude of ``factor * a + (b & keep)``, of up to 64 values from `first` on.

    a, b: contiguous arrays of float32 or float64, with at least 64 values from `first`
    on. keep: -1, or 0 for a alone; the bits and keep are signed integers of their
    width. The product is rounded before it is added.
    """
    return np.abs(_sums(a, factor, b, keep, first)[:count]).max().view(keep.dtype)


def sums_reaching(a, factor, b, keep, first, floor):  # type: ignore[no-untyped-def]
    """Return which magnitudes of 64 sums are at least `floor` with b added again, which sums are negative, and a flag.

    The first two as bits of uint64; sums that are zero reach no floor. The flag, also a
    uint64, is not 0 if one of the magnitudes may be equal to the floor. floor: the bits
    of a magnitude; the others as for `largest_sum`.
    """
    sums = _sums(a, factor, b, keep, first)
    again = np.where(sums == 0, 0, np.abs(sums + b[first : first + WORD])).view(
        keep.dtype
    ) - (sums == 0)
    return (
        _as_word(again >= floor),
        _as_word(sums < 0),
        np.uint64((again == floor).any()),
    )


def _sums(a: Any, factor: Any, b: Any, keep: Any, first: int) -> Any:
    own = slice(first, first + WORD)
    return factor * a[own] + (b[own].view(keep.dtype) & keep).view(b.dtype)


def butterflies(values, out, first, scale):  # type: ignore[no-untyped-def]
    """Write `scale` times the Walsh-Hadamard matrix of the 64 values from `first` on to the same place of `out`.

    values, out: contiguous arrays of one dtype, float32 or float64; they may be the
    same. scale: of that dtype. The strides of the butterflies are 1, 2, ... 32.
    """
    word = values[first : first + WORD].copy()
    for stride in STRIDES:
        pairs = word.reshape(-1, 2, stride)
        pairs[:] = np.stack(
            [pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1
        )
    out[first : first + WORD] = word * scale


def sum_up_to(values, first, size, threshold, share):  # type: ignore[no-untyped-def]
    """Return the sum of a share of each magnitude up to a threshold, in a fixed order, and the number above it.

    values: contiguous float32 or float64; size: a multiple of 128. threshold, share: of
    their dtype; each product is rounded. Lane j of 128 adds the values j, j + 128, ...
    in order; the lanes are folded by halves, an order that also serves warps.
    """
    sizes = np.abs(values[first : first + size])
    shares = np.where(sizes <= threshold, sizes * share, 0).reshape(-1, SUMMED)
    lanes = shares[0]
    for row in shares[1:]:
        lanes = lanes + row
    while lanes.size > 1:
        low, high = np.split(lanes, 2)
        lanes = low + high
    return lanes[0], np.count_nonzero(sizes > threshold)


def bits_of(number):  # type: ignore[no-untyped-def]
    """Return the bits of a float32 or float64, as a signed integer of its width."""
    return number.view(f"i{number.itemsize}")


def number_of(bits, other):  # type: ignore[no-untyped-def]
    """Return the number with the lowest bits of an integer, of the dtype of the array `other`."""
    return np.int64(bits).astype(f"i{other.itemsize}").view(other.dtype)


def lowest(word):  # type: ignore[no-untyped-def]
    """Return the number of the lowest bit set in a uint64 that is not 0, as a uint64."""
    return np.uint64((int(word) & -int(word)).bit_length() - 1)


def ones(word):  # type: ignore[no-untyped-def]
    """Return the number of bits set in a uint64, as a uint64."""
    return np.uint64(int(word).bit_count())


def bit_length(word):  # type: ignore[no-untyped-def]
    """Return the number of bits of a uint64 up to its highest one set, as a uint64; 0 for 0."""
    return np.uint64(int(word).bit_length())


def array_at(other, address, size):  # type: ignore[no-untyped-def]
    """Return the 1-d contiguous array of that many values, of the dtype of `other`, at an address of host memory."""
    memory = (ctypes.c_char * (int(size) * other.itemsize)).from_address(int(address))
    return np.frombuffer(memory, other.dtype)


def view(values, first, end):  # type: ignore[no-untyped-def]
    """Return the values from `first` to `end` - 1 of a 1-d contiguous array, which has them.

    A slice, which counts from the end and may be out of range, takes four times as long
    to compile.
    """
    return values[first:end]


def prefetch(values, first):  # type: ignore[no-untyped-def]
    """Load the cache line of a value into the cache, while other code runs; no error where there is no value."""


def smaller(one, other):  # type: ignore[no-untyped-def]
    """Return ``min(one, other)``, of a type that holds both; Numba compiles `min` anew for each pair of types."""
    return min(one, other)


def larger(one, other):  # type: ignore[no-untyped-def]
    """Return ``max(one, other)``, of a type that holds both."""
    return max(one, other)


def in_kernels(function: Any) -> Callable[[Any], Any]:
    """Return a decorator: compiled kernels replace calls of `function` by what the decorated one generates.

    It takes a typing context and types, of contiguous arrays, and returns a signature
    and a generator of code, as for `numba.extending.intrinsic`. An overload, which is a
    compiled function of its own, takes ten times as long to compile.
    """

    def declare(definition: Any) -> Any:
        @type_callable(function)
        def typed(context: Any) -> Any:
            def signature_of(*arguments: Any) -> Any:
                if not all([getattr(each, "is_contig", True) for each in arguments]):
                    return None
                places = [
                    Parameter(f"argument_{place}", Parameter.POSITIONAL_ONLY)
                    for place in range(len(arguments))
                ]
                signature_of.pysig = Signature(places)  # type: ignore[attr-defined]
                return definition(context, *arguments)[0]

            return signature_of

        @lower_builtin(function, types.VarArg(types.Any))
        def lower(context: Any, builder: Any, called: Any, arguments: Any) -> Any:
            _, code = definition(context.typing_context, *called.args)
            return code(context, builder, called, arguments)

        return definition

    return declare


def _as_word(flags: Any) -> Any:
    return np.uint64(sum(1 << place for place in np.flatnonzero(flags).tolist()))


@in_kernels(reaching)
def _reaching(typing: Any, bits: Any, first: Any, mask: Any, floor: Any) -> Any:
    def flags(builder: Any, values: Any, arguments: Any) -> Any:
        mask, floor = arguments[2:]
        keys = builder.bitcast(values, ir.VectorType(mask.type, WORD))
        masked = builder.and_(keys, in_all_places(builder, mask, keys.type))
        return builder.icmp_signed(
            ">=", masked, in_all_places(builder, floor, keys.type)
        )

    key = types.Integer.from_bitwidth(bits.dtype.bitwidth)
    return types.uint64(bits, types.intp, key, key), _compared(flags)


@in_kernels(nonzero)
def _nonzero(typing: Any, words: Any, first: Any) -> Any:
    def flags(builder: Any, values: Any, arguments: Any) -> Any:
        keys = ir.VectorType(ir.IntType(words.dtype.bitwidth), WORD)
        bits = builder.bitcast(values, keys)
        return builder.icmp_unsigned("!=", bits, ir.Constant(keys, None))

    return types.uint64(words, types.intp), _compared(flags)


@in_kernels(differing)
def _differing(typing: Any, one: Any, other: Any, first: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        load, _ = _accesses(context, builder, signature, arguments, WORD)
        flags = builder.icmp_unsigned("!=", load(0), load(1))
        return builder.bitcast(flags, ir.IntType(WORD))

    return types.uint64(one, other, types.intp), code


@in_kernels(word_sum)
def _word_sum(typing: Any, bits: Any, first: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        load, _ = _accesses(context, builder, signature, arguments, WORD)
        count = WORD * bits.dtype.bitwidth // 64
        kind = ir.VectorType(ir.IntType(64), count)
        words = builder.bitcast(load(0), kind)
        upper = builder.lshr(words, ir.Constant(kind, [32] * count))
        weights = ir.Constant(kind, WEIGHTS[:count].tolist())
        products = builder.mul(builder.xor(words, upper), weights)
        return reduced(builder, "add", products)

    return types.uint64(bits, types.intp), code


@in_kernels(store_sum)
def _store_sum(
    typing: Any, a: Any, factor: Any, b: Any, sign: Any, out: Any, first: Any
) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        load, stream = _accesses(
            context, builder, signature, arguments, LINE * 8 // out.dtype.bitwidth
        )
        one, other = (
            _scaled(builder, arguments[place + 1], load(place)) for place in (0, 2)
        )
        stream(builder.fadd(one, other), 4)
        return context.get_dummy_value()

    return types.void(a, out.dtype, b, out.dtype, out, types.intp), code


@in_kernels(store_line)
def _store_line(typing: Any, values: Any, place: Any, out: Any, first: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        count = LINE * 8 // out.dtype.bitwidth
        load, _ = _accesses(context, builder, signature, arguments, count, first=1)
        _, stream = _accesses(context, builder, signature, arguments, count, first=3)
        stream(load(0), 2)
        return context.get_dummy_value()

    return types.void(values, types.intp, out, types.intp), code


@in_kernels(prefetch)
def _prefetch(typing: Any, values: Any, first: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        name = "llvm.prefetch.p0i8"
        fetch = cgutils.get_or_insert_function(builder.module, kind, name)
        array, place = arguments
        line = vector_at(context, builder, values, array, place, 1)
        # The arguments mean: for reading, into the nearest cache, of data.
        builder.call(fetch, [builder.bitcast(line, byte), word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(values, types.intp), code


@in_kernels(store_sum_reaching)
def _store_sum_reaching(
    typing: Any,
    a: Any,
    factor: Any,
    b: Any,
    out: Any,
    first: Any,
    mask: Any,
    floor: Any,
) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        load, stream = _accesses(context, builder, signature, arguments, WORD, first=4)
        total = builder.fadd(_scaled(builder, arguments[1], load(0)), load(2))
        stream(total, 3)
        bits = builder.bitcast(
            total, ir.VectorType(context.get_value_type(signature.args[5]), WORD)
        )
        mask, floor = (
            in_all_places(builder, each, bits.type) for each in arguments[5:]
        )
        return builder.bitcast(
            builder.icmp_signed(">=", builder.and_(bits, mask), floor), ir.IntType(WORD)
        )

    key = types.Integer.from_bitwidth(out.dtype.bitwidth)
    return types.uint64(a, out.dtype, b, out, types.intp, key, key), code


@in_kernels(largest_sum)
def _largest_sum(
    typing: Any, a: Any, factor: Any, b: Any, keep: Any, first: Any, count: Any
) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, _, keys, mask = _sums_of(context, builder, signature, arguments)
        places = ir.Constant(ir.VectorType(ir.IntType(8), WORD), list(range(WORD)))
        most = in_all_places(
            builder, builder.trunc(arguments[5], ir.IntType(8)), places.type
        )
        magnitudes = builder.and_(builder.bitcast(sums, keys), mask)
        counted = builder.select(
            builder.icmp_unsigned("<", places, most),
            magnitudes,
            ir.Constant(keys, None),
        )
        return reduced(builder, "smax", counted)

    key = types.Integer.from_bitwidth(a.dtype.bitwidth)
    given = a, a.dtype, b, key, types.intp, types.intp
    return key(*given), code


@in_kernels(sums_reaching)
def _sums_reaching(
    typing: Any, a: Any, factor: Any, b: Any, keep: Any, first: Any, floor: Any
) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, b, keys, mask = _sums_of(context, builder, signature, arguments)
        again, sums = (
            builder.bitcast(each, keys) for each in (builder.fadd(sums, b), sums)
        )
        # The sign becomes that of |sum| - 1, which is negative for zero: fewer
        # instructions than another comparison.
        less = builder.add(builder.and_(sums, mask), ir.Constant(keys, [-1] * WORD))
        again = builder.or_(
            builder.and_(again, mask), builder.and_(less, builder.not_(mask))
        )
        floor, half = in_all_places(builder, arguments[5], keys), WORD
        words = [
            builder.icmp_signed(">=", again, floor),
            builder.icmp_signed("<", sums, ir.Constant(keys, None)),
        ]
        differ = builder.xor(again, floor)
        # Each word is folded to the width of a line: it is 0 if one of the words folded
        # into it is.
        while half * keys.element.width > LINE * 8:
            half //= 2
            low, high = (
                _shuffled(builder, differ, differ, [*range(at, at + half)])
                for at in (0, half)
            )
            differ = builder.select(builder.icmp_unsigned("<", low, high), low, high)
        ties = builder.bitcast(
            builder.icmp_signed("==", differ, ir.Constant(differ.type, None)),
            ir.IntType(half),
        )
        found = [
            *(builder.bitcast(each, ir.IntType(WORD)) for each in words),
            builder.zext(ties, ir.IntType(WORD)),
        ]
        return context.make_tuple(builder, signature.return_type, found)

    key = types.Integer.from_bitwidth(a.dtype.bitwidth)
    given = a, a.dtype, b, key, types.intp, key
    return types.UniTuple(types.uint64, 3)(*given), code


@in_kernels(array_at)
def _array_at(typing: Any, other: Any, address: Any, size: Any) -> Any:
    kind = types.Array(other.dtype, 1, "C")

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = context.get_value_type(other.dtype).as_pointer()
        data = builder.inttoptr(arguments[1], pointer)
        return _array(context, builder, kind, data, arguments[2])

    return kind(other, types.intp, types.intp), code


@in_kernels(view)
def _view(typing: Any, values: Any, first: Any, end: Any) -> Any:
    kind = types.Array(values.dtype, 1, "C")

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        given = context.make_array(values)(context, builder, arguments[0])
        data = builder.gep(given.data, [arguments[1]])
        size = builder.sub(arguments[2], arguments[1])
        return _array(context, builder, kind, data, size)

    return kind(values, types.intp, types.intp), code


@in_kernels(smaller)
def _smaller(typing: Any, one: Any, other: Any) -> Any:
    return _chosen(typing, "<", one, other)


@in_kernels(larger)
def _larger(typing: Any, one: Any, other: Any) -> Any:
    return _chosen(typing, ">", one, other)


@in_kernels(butterflies)
def _butterflies(typing: Any, values: Any, out: Any, first: Any, scale: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        load, _ = _accesses(context, builder, signature, arguments, WORD, first=2)
        word = load(0)
        for stride in STRIDES:
            partners = _shuffled(
                builder, word, word, [place ^ stride for place in range(WORD)]
            )
            sums, differences = (
                builder.fadd(word, partners),
                builder.fsub(partners, word),
            )
            word = _shuffled(
                builder,
                sums,
                differences,
                [place + WORD * bool(place & stride) for place in range(WORD)],
            )
        place = vector_at(context, builder, out, arguments[1], arguments[2], WORD)
        word = _scaled(builder, arguments[3], word)
        builder.store(word, place, align=out.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(values, out, types.intp, out.dtype), code


@in_kernels(sum_up_to)
def _sum_up_to(
    typing: Any, values: Any, first: Any, size: Any, threshold: Any, share: Any
) -> Any:
    key = types.Integer.from_bitwidth(values.dtype.bitwidth)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        size, threshold, share = arguments[2:]
        kind = ir.VectorType(context.get_value_type(values.dtype), SUMMED)
        keys = ir.VectorType(context.get_value_type(key), SUMMED)
        mask = ir.Constant(keys, [(1 << key.bitwidth - 1) - 1] * SUMMED)
        limit, factor = (
            in_all_places(builder, each, kind) for each in (threshold, share)
        )
        nothing = ir.Constant(kind, None)
        lanes = cgutils.alloca_once_value(builder, nothing)
        above = cgutils.alloca_once_value(builder, ir.Constant(size.type, 0))
        zero, step = (ir.Constant(size.type, number) for number in (0, SUMMED))
        with cgutils.for_range_slice(builder, zero, size, step) as (index, _):
            start = builder.add(arguments[1], index)
            place = vector_at(context, builder, values, arguments[0], start, SUMMED)
            own = builder.load(place, align=key.bitwidth // 8)
            own = builder.bitcast(builder.and_(builder.bitcast(own, keys), mask), kind)
            is_below = builder.fcmp_ordered("<=", own, limit)
            added = builder.select(is_below, builder.fmul(own, factor), nothing)
            builder.store(builder.fadd(builder.load(lanes), added), lanes)
            flags = builder.fcmp_ordered(">", own, limit)
            for half in range(0, SUMMED, WORD):
                some = _shuffled(builder, flags, flags, [*range(half, half + WORD)])
                number = builder.ctpop(builder.bitcast(some, ir.IntType(WORD)))
                builder.store(builder.add(builder.load(above), number), above)
        total, half = builder.load(lanes), SUMMED
        while half > 1:
            half //= 2
            low, high = (
                _shuffled(builder, total, total, [*range(at, at + half)])
                for at in (0, half)
            )
            total = builder.fadd(low, high)
        sums = [builder.extract_element(total, ir.Constant(ir.IntType(32), 0))]
        return context.make_tuple(
            builder, signature.return_type, [*sums, builder.load(above)]
        )

    given = values, types.intp, types.intp, values.dtype, values.dtype
    return types.Tuple((values.dtype, types.int64))(*given), code


@in_kernels(bits_of)
def _bits_of(typing: Any, number: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(
            arguments[0], context.get_value_type(signature.return_type)
        )

    return types.Integer.from_bitwidth(number.bitwidth)(number), code


@in_kernels(number_of)
def _number_of(typing: Any, bits: Any, other: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lowest = builder.trunc(arguments[0], ir.IntType(other.dtype.bitwidth))
        return builder.bitcast(lowest, context.get_value_type(other.dtype))

    return other.dtype(types.int64, other), code


@in_kernels(lowest)
def _lowest(typing: Any, word: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # With 1 the result for 0 is undefined; no word is 0.
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), code


@in_kernels(bit_length)
def _bit_length(typing: Any, word: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # With 0 the result for 0 is defined.
        zeros = builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))
        return builder.sub(ir.Constant(zeros.type, WORD), zeros)

    return types.uint64(types.uint64), code


@in_kernels(ones)
def _ones(typing: Any, word: Any) -> Any:
    return types.uint64(
        types.uint64
    ), lambda context, builder, signature, arguments: builder.ctpop(arguments[0])


def _compared(flags: Callable[[Any, Any, Any], Any]) -> Any:
    """Return the code generator that loads 64 values at once, and packs the result of a comparison into a word."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        load, _ = _accesses(context, builder, signature, arguments, WORD, first=1)
        return builder.bitcast(flags(builder, load(0), arguments), ir.IntType(WORD))

    return code


def _accesses(
    context: Any,
    builder: Any,
    signature: Any,
    arguments: Any,
    size: int,
    first: int = -1,
) -> tuple[Callable[[int], Any], Callable[[Any, int], None]]:
    """Return functions for that many values of the array that is an argument, as one vector: load, and stream.

    first: the place among the arguments of the first value's position. `stream` stores
    bypassing the cache.
    """

    def place_of(argument: int) -> Any:
        return vector_at(
            context,
            builder,
            signature.args[argument],
            arguments[argument],
            arguments[first],
            size,
        )

    def load(argument: int) -> Any:
        return builder.load(
            place_of(argument), align=signature.args[argument].dtype.bitwidth // 8
        )

    def stream(values: Any, argument: int) -> None:
        store = builder.store(values, place_of(argument), align=LINE)
        store.set_metadata(
            "nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        )

    return load, stream


def _scaled(builder: Any, factor: Any, values: Any) -> Any:
    """Return a vector of products; LLVM would join them with a sum only if both were marked for it."""
    return builder.fmul(in_all_places(builder, factor, values.type), values)


def _sums_of(
    context: Any, builder: Any, signature: Any, arguments: Any
) -> tuple[Any, Any, Any, Any]:
    """Return vectors of the sums of `largest_sum`, and of b; the type of their bits, and the mask of magnitudes."""
    load, _ = _accesses(context, builder, signature, arguments, WORD, first=4)
    a, b = load(0), load(2)
    keys = ir.VectorType(context.get_value_type(signature.args[3]), WORD)
    kept = builder.and_(
        builder.bitcast(b, keys), in_all_places(builder, arguments[3], keys)
    )
    mask = ir.Constant(keys, [(1 << (keys.element.width - 1)) - 1] * WORD)
    return (
        builder.fadd(_scaled(builder, arguments[1], a), builder.bitcast(kept, b.type)),
        b,
        keys,
        mask,
    )


def _chosen(typing: Any, how: str, one: Any, other: Any) -> Any:
    """Return signature and code of a choice between two numbers: the second if it compares so with the first."""
    kind = typing.unify_types(one, other)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first, second = arguments
        is_real = isinstance(kind, types.Float)
        is_signed = getattr(kind, "signed", False)
        compare = builder.icmp_signed if is_signed else builder.icmp_unsigned
        compare = builder.fcmp_ordered if is_real else compare
        return builder.select(compare(how, second, first), second, first)

    return kind(kind, kind), code


def _array(context: Any, builder: Any, kind: Any, data: Any, size: Any) -> Any:
    """Return a 1-d contiguous array."""
    made = context.make_array(kind)(context, builder)
    step = ir.Constant(size.type, kind.dtype.bitwidth // 8)
    populate_array(made, data, [size], [step], step, meminfo=None)
    return made._getvalue()


def vector_at(
    context: Any, builder: Any, array: Any, given: Any, first: Any, size: int
) -> Any:
    """Return the address of that many values of an array from `first` on, as one vector."""
    vector = ir.VectorType(context.get_value_type(array.dtype), size)
    data = context.make_array(array)(context, builder, given).data
    return builder.bitcast(builder.gep(data, [first]), vector.as_pointer())


def _shuffled(builder: Any, one: Any, other: Any, places: list[int]) -> Any:
    """Return a vector of the values at these places of two concatenated vectors."""
    index = ir.IntType(32)
    wanted = ir.Constant(
        ir.VectorType(index, len(places)),
        [ir.Constant(index, place) for place in places],
    )
    return builder.shuffle_vector(one, other, wanted)


def reduced(builder: Any, how: str, vector: Any) -> Any:
    """Return what LLVM reduces a vector of integers to: "add", or "smax", the largest."""
    kind = vector.type
    name = f"llvm.vector.reduce.{how}.v{kind.count}i{kind.element.width}"
    function = ir.FunctionType(kind.element, [kind])
    reduce = cgutils.get_or_insert_function(builder.module, function, name)
    return builder.call(reduce, [vector])


def in_all_places(builder: Any, value: Any, vector: Any) -> Any:
    """Return a vector of copies of a value."""
    alone = builder.insert_element(
        ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0)
    )
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None)
    return builder.shuffle_vector(alone, ir.Constant(vector, ir.Undefined), zeros)
