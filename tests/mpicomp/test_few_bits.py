"""Few bits of many tensors at once: a block begins anew at each, and every value is passed over once."""

import os
import platform
import re
import subprocess
import sys
import weakref
from itertools import pairwise

import numpy as np
import pytest
from test_vectorised import loops

from mpicomp.arrays.memory import new_vector
from mpicomp.few_bits import BITS, SCALES, first_blocks
from mpicomp.kernels import host
from mpicomp.kernels.host.few_bits import (
    decoder,
    encoder,
)

SIZES = 1000, 0, 1, 32, 31, 3000, 257
BLOCK = 32
FLOAT = pytest.mark.parametrize("dtype", [np.float32, np.float64])
WIDTH = pytest.mark.parametrize("bits", BITS)


def room(size, bits, dtype, block=BLOCK):
    """Return codes and scales of that many values, filled with another pattern."""
    blocks = -(-size // block)
    scales = SCALES[np.dtype(dtype)]
    return (
        np.full(blocks * block * bits // 8, 85, np.uint8),
        np.full(blocks * (2 if bits == 2 else 1), 85, scales),
    )


def drawn(dtype, seed=0):
    """Return tensors of other magnitudes, each at another place of a cache line."""
    rng = np.random.default_rng(seed)
    powers = 10.0 ** rng.integers(-6, 2, len(SIZES))
    return [
        (power * rng.standard_normal(size + shift)).astype(dtype)[shift:]
        for shift, (size, power) in enumerate(zip(SIZES, powers, strict=True))
    ]


def alone(values, others, bits):
    """Return codes, scales and errors of one tensor."""
    codes, scales = room(values.size, bits, values.dtype)
    rejected = np.empty_like(values)
    encoder([values], None, bits, BLOCK, rejected)(codes, scales, others)
    return codes, scales, rejected


def joined(results):
    return [np.concatenate(each) for each in zip(*results, strict=True)]


def assert_same(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes())


@FLOAT
@WIDTH
@pytest.mark.parametrize("threads", [1, 3])
def test_tensors_together_are_those_of_each_alone(monkeypatch, dtype, bits, threads):
    monkeypatch.setattr("mpicomp.threads._LEAST", 256)
    parts = drawn(dtype)
    residual = np.concatenate(drawn(dtype, 1))
    bounds = np.append(0, np.cumsum(SIZES))
    for decay in (1, 0.75):
        sums = [
            dtype(decay) * residual[first:end] + part
            for (first, end), part in zip(pairwise(bounds), parts, strict=True)
        ]
        terms = [alone(each, [], bits)[:2] for each in drawn(dtype, 2)]
        others = [joined(terms)]
        for given, expected in (
            ([], joined(alone(each, [], bits) for each in sums)),
            (
                others,
                joined(
                    alone(each, [term], bits)
                    for each, term in zip(sums, terms, strict=True)
                ),
            ),
        ):
            rejected = residual.copy()  # in place
            codes = np.empty_like(expected[0])
            scales = np.empty_like(expected[1])
            encode = encoder(
                parts,
                rejected,
                bits,
                BLOCK,
                rejected,
                decay=decay,
                threads=threads,
            )
            encode(codes, scales, given)
            assert_same((codes, scales, rejected), expected)


@FLOAT
@WIDTH
def test_ranges_of_blocks_are_parts_of_the_whole(dtype, bits):
    """An owner codes its share; what is outside is left alone."""
    parts = drawn(dtype)
    codes, scales, rejected = joined(alone(each, [], bits) for each in parts)
    blocks = int(first_blocks(SIZES, BLOCK)[-1])
    cuts = 0, 1, 33, 40, blocks
    decoded = [np.full_like(part, 7) for part in parts]
    found = np.full_like(rejected, 7)
    encode = encoder(parts, None, bits, BLOCK, found)
    for first, last in pairwise(cuts):
        some = room((last - first) * BLOCK, bits, dtype)
        before = found.copy(), [each.copy() for each in decoded]
        encode(*some, [], (first, last))
        width, each = BLOCK * bits // 8, 2 if bits == 2 else 1
        own = codes[first * width : last * width], scales[first * each : last * each]
        assert_same(some, own)
        decoder([some], bits, BLOCK, decoded, first=first, long=0)()
        changed = (found != before[0]).sum()
        assert changed <= (last - first) * BLOCK
    assert_same([found], [rejected])
    whole = [np.empty_like(part) for part in parts]
    decoder([(codes, scales)], bits, BLOCK, whole)()
    assert_same(decoded, whole)


@FLOAT
@WIDTH
@pytest.mark.parametrize("divisor", [1, 2, 3, 7])
@pytest.mark.parametrize("long", [0, 1 << 30])
def test_decoding_over_a_divisor_is_a_division(dtype, bits, divisor, long):
    parts = drawn(dtype)
    codes, scales, _ = joined(alone(each, [], bits) for each in parts)
    decoded = [np.empty_like(part) for part in parts]
    decoder([(codes, scales)], bits, BLOCK, decoded)()
    means = drawn(dtype)  # each at another place of a cache line
    around = [each.base.copy() for each in means]
    decoder([(codes, scales)], bits, BLOCK, means, divisor=divisor, long=long)()
    assert_same(means, [each / dtype(divisor) for each in decoded])
    for each, before in zip(means, around, strict=True):
        start = before.size - each.size
        np.testing.assert_array_equal(each.base[:start], before[:start])


@FLOAT
@WIDTH
@pytest.mark.parametrize("start", [0, 3, 16])
def test_errors_that_bypass_the_cache_are_the_same(dtype, bits, start):
    """Wherever they are written: at a cache line, or not."""
    parts = drawn(dtype)
    codes, scales, rejected = joined(alone(each, [], bits) for each in parts)
    some = np.empty_like(codes), np.empty_like(scales)
    room = new_vector(np, start + rejected.size, dtype)
    room[:] = 7
    encoder(parts, None, bits, BLOCK, room[start:], long=0)(*some)
    assert_same((*some, room[start:]), (codes, scales, rejected))
    assert (room[:start] == 7).all()


@WIDTH
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6, 1e6])
def test_what_lies_beside_a_tensor_does_not_change_it(bits, size):
    rng = np.random.default_rng(3)
    bias = (1e-3 * rng.standard_normal(64)).astype(np.float32)
    weight = (size * rng.standard_normal(1000)).astype(np.float32)
    parts = weight, bias
    codes, scales = room(2048, bits, np.float32, 256)
    blocks = int(first_blocks((1000, 64), 256)[-1])
    width, each = 256 * bits // 8, 2 if bits == 2 else 1
    some = codes[: blocks * width], scales[: blocks * each]
    encoder(parts, None, bits, 256, np.empty(1064, np.float32))(*some)
    decoded = [np.empty_like(part) for part in parts]
    decoder([some], bits, 256, decoded)()
    only = room(64, bits, np.float32, 256)
    encoder([bias], None, bits, 256, np.empty_like(bias))(*only)
    expected = np.empty_like(bias)
    host.decoder([only], bits, 256, [expected])()
    assert_same([decoded[1]], [expected])
    assert np.abs(expected).max() > 0


@FLOAT
@WIDTH
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_keeps_the_corrected_values(dtype, bits, bad):
    part, residual = np.ones((2, 100), dtype)
    part[40] = bad
    codes, scales = room(100, bits, dtype)
    expected = dtype(0.5) * residual + part
    with np.errstate(invalid="ignore"):
        encode = encoder([part], residual, bits, BLOCK, residual, decay=0.5)
        encode(codes, scales)
    np.testing.assert_array_equal(residual[32:64], expected[32:64])
    assert np.isfinite(residual[:32]).all()
    infinity = np.array([np.inf], dtype).view(f"u{part.itemsize}") >> 4 * part.itemsize
    assert infinity[0] in scales


@FLOAT
@WIDTH
@pytest.mark.parametrize("size", [9, 33])
def test_the_largest_numbers_decode_to_finite_ones(dtype, bits, size):
    """So the check of a mean for its range is one of scales."""
    codes, scales, _ = alone(np.full(size, np.finfo(dtype).max), [], bits)
    decoded = np.empty(size, dtype)
    host.decoder([(codes, scales)], bits, BLOCK, [decoded])()
    assert np.isfinite(decoded).all()


@FLOAT
@WIDTH
@pytest.mark.parametrize("long", [0, 1 << 30])
def test_decoding_onto_vectors_is_decoding_and_an_addition(dtype, bits, long):
    """Of each share's blocks only."""
    parts = drawn(dtype)
    codes, scales, _ = joined(alone(each, [], bits) for each in parts)
    bases = [np.roll(part, 1) for part in parts]
    means = [np.empty_like(part) for part in parts]
    decoder([(codes, scales)], bits, BLOCK, means, divisor=3)()
    pairs = zip(means, bases, strict=True)
    expected = [dtype(-0.7) * mean + base for mean, base in pairs]
    sums = drawn(dtype)
    width, magnitudes = BLOCK * bits // 8, 2 if bits == 2 else 1
    cuts = 0, 1, 33, 33, 40, int(first_blocks(SIZES, BLOCK)[-1])
    shares = [
        (
            codes[first * width : last * width],
            scales[first * magnitudes : last * magnitudes],
        )
        for first, last in pairwise(cuts)
    ]
    onto = bases, -0.7
    decoder(shares, bits, BLOCK, sums, divisor=3, onto=onto, long=long)()
    assert_same(sums, expected)
    assert_same(bases, expected)


def test_what_is_decoded_to_lives_until_it_is_written():
    """The caller may drop it: it is written by its address."""
    codes, scales, _ = alone(np.ones(512, np.float32), [], 4)
    part = np.ones(512, np.float32)
    base = part.copy()
    memory = weakref.ref(part), weakref.ref(base)
    decode = decoder([(codes, scales)], 4, BLOCK, [part], onto=([base], 1.0))
    del part, base
    assert all(array() is not None for array in memory)
    decode()


LOOPS = """
import numpy as np
from mpicomp.kernels.host import few_bits
part, codes, scales = np.ones(512, np.float32), np.empty(256, np.uint8), np.empty(2, np.uint16)
few_bits.encoder([part], part.copy(), 4, 256, part.copy())(codes, scales)
few_bits.decoder([(codes, scales)], 4, 256, [part])()
for kernel in few_bits._quantise, few_bits._dequantise:
    print(*kernel.inspect_asm().values())
"""
X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86-64")
FEATURES = "+avx,+avx2,+fma,+bmi,+bmi2,+f16c,+popcnt,+lzcnt,+movbe,+sse4.2"


@X86
@pytest.mark.slow
def test_the_loops_over_values_are_vectors_of_full_width_on_avx2(tmp_path):
    """Not on the features of this processor: of x86-64-v3."""
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "x86-64-v3",
        "NUMBA_CPU_FEATURES": FEATURES,
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", LOOPS],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
        env=environment,
    )
    found = list(loops(done.stdout))
    for name, needed in {
        "add, and the largest magnitude": ("vaddps", "vpmaxsd"),
        "codes and errors": ("vmaxps", "vminps", "vsubps", "vpackuswb"),
        "decode": ("vcvtdq2ps", "vmulps"),
        "divide": ("vdivps",),
        "write past the cache": ("vmovntps",),
    }.items():
        own = [
            loop
            for loop in found
            if all(re.search(rf"{each}\s.*%ymm", loop) for each in needed)
        ]
        assert own, name
        for loop in own:
            assert "call" not in loop
            assert not re.search(r"\tv(add|sub|mul|div|max|min)ss\s", loop), loop
