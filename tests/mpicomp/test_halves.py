"""float16 in vectors: each conversion, and each sum, has the bits of NumPy's."""

import numpy as np
import pytest

from mpicomp.arrays.values import converted
from mpicomp.kernels.host import add_scaled, halves, multiply

HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)


def same_bits(found, expected):
    """Return whether two arrays have the same bits, but for those of NaN."""
    bits = f"u{expected.itemsize}"
    are_nan = np.isnan(expected)
    numbers = found[~are_nan].view(bits), expected[~are_nan].view(bits)
    return np.isnan(found[are_nan]).all() and np.array_equal(*numbers)


def singles():
    """Return float32 numbers at and beside all at which the rounding to float16 changes, and others."""
    exact = HALVES.astype(np.float32).view(np.uint32)
    beside = [exact + np.uint32(step) for step in (0, 0xFFF, 0x1000, 0x1001)]
    limits = [0x477FEFFF, 0x477FF000, 0x477FF001, 0x33000000, 0x33000001, 1]
    drawn = np.random.default_rng(0).integers(0, 2**32, 10**6, np.uint64)
    bits = [*beside, np.array(limits, np.uint32), drawn.astype(np.uint32)]
    return np.concatenate(bits).view(np.float32)


def compiled_and_not(name):
    kernel = getattr(halves, name)
    return [kernel, kernel.py_func]


@pytest.mark.parametrize("widen", compiled_and_not("_widen"))
def test_all_numbers_are_widened(widen):
    out = np.empty(HALVES.size, np.float32)
    widen(HALVES.view(np.int16), out)
    assert same_bits(out, HALVES.astype(np.float32))


@pytest.mark.parametrize("narrow", compiled_and_not("_narrow"))
def test_numbers_are_rounded_to_nearest_ties_to_even(narrow):
    values = singles()
    out = np.empty(values.size, np.float16)
    narrow(values, out.view(np.int16))
    with np.errstate(all="ignore"):
        assert same_bits(out, values.astype(np.float16))


@pytest.mark.parametrize("add", compiled_and_not("_add"))
@pytest.mark.parametrize("factor", [1, 0.95, -3])
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_are_rounded_as_those_of_numpy_are(add, factor, sign):
    rng = np.random.default_rng(1)
    a, b = (rng.permutation(np.tile(HALVES, 4)) for _ in range(2))
    out = np.empty_like(a)
    numbers = np.float32(np.float16(factor)), np.float32(sign)
    with np.errstate(all="ignore"):
        add(a.view(np.int16), b.view(np.int16), out.view(np.int16), *numbers)
        expected = np.float16(factor) * a
        expected = expected + b if sign == 1 else expected - b
    assert same_bits(out, expected)


@pytest.mark.parametrize("shape", [(70_000,), (300, 300), (300, 600)])
def test_arrays_of_any_shape_are_converted_and_added(shape):
    """Also those with gaps, and read-only ones."""
    wide = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    wide.flags.writeable = False
    short = wide.astype(np.float16)
    columns = short[..., ::2]
    assert same_bits(converted(wide, np.float16), short)
    assert same_bits(converted(short, np.float32), short.astype(np.float32))
    assert same_bits(converted(columns, np.float32), columns.astype(np.float32))
    for array in short, columns:
        out = np.empty_like(array)
        add_scaled(array, 0.5, array, out)
        total = np.float16(0.5) * array + array
        assert same_bits(out, total)
        multiply(out, 1, out)
        add_scaled(out, 1, array, out, sign=-1)
        assert same_bits(out, total - array)


def test_other_arrays_are_left_to_numpy():
    short = np.ones(1 << 15, np.float16)
    assert not halves.convert(short, np.empty(short.size))
    assert not halves.convert(short[:100], np.empty(100, np.float32))
    assert not halves.add_halves(short, 1, short, np.empty(short.size), sign=1)
