"""`mpicomp.digests`: one text for the same bits, another one for any other."""

import numpy as np
import pytest
from devices import cupy_for_tests
from hypothesis import given
from hypothesis import strategies as st

from mpicomp.digests import digest, joint_digest
from mpicomp.kernels import host
from mpicomp.kernels.host import statistics
from mpicomp.kernels.host.statistics import STEP

M = 2**64


def by_integers(words):
    total = 0
    for number, word in enumerate(words.tolist(), 1):
        mixed = (word + number * int(STEP)) % M
        total += (mixed & 0xFFFFFFFF) * (mixed >> 32)
    return total % M


@pytest.mark.parametrize("compiled", [True, False])
def test_the_checksum_is_that_of_integers_of_any_length(compiled, monkeypatch):
    words = np.random.default_rng(0).integers(0, M, 300, dtype=np.uint64)
    if not compiled:
        monkeypatch.setattr(statistics, "_checksum", statistics._checksum.py_func)
    with np.errstate(over="ignore"):  # products modulo 2^64 are meant
        for size in 0, 1, 7, 300:
            assert host.checksum(words[:size]) == by_integers(words[:size])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_checksum_does_not_depend_on_threads(monkeypatch, threads):
    monkeypatch.setattr("mpicomp.threads._LEAST", 1 << 6)
    words = np.arange(1000, dtype=np.uint64)
    assert host.checksum(words, threads=threads) == by_integers(words)


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=40),
    st.integers(0, 39),
    st.integers(0, 31),
)
def test_one_bit_changes_the_digest(values, at, bit):
    array = np.array(values, np.float32)
    other = array.copy()
    other.view(np.uint32)[at % array.size] ^= np.uint32(1 << bit)
    assert digest(array) == digest(array.copy())
    assert digest(array) != digest(other)


def test_signs_places_and_halves_count():
    values = np.random.default_rng(0).standard_normal((8, 64))
    others = [-values, values[::-1], values[:, ::-1], np.roll(values, 1), values.T]
    signs = values.copy()
    signs[:2, 0] *= -1
    digests = [*map(digest, [values, signs, *others])]
    assert len({*digests}) == len(digests)


@pytest.mark.parametrize("dtype", [np.float16, np.int8, np.bool_, np.complex64])
def test_layout_and_alignment_do_not_count(dtype):
    values = np.arange(30).astype(dtype).reshape(5, 6)
    assert digest(np.asfortranarray(values)) == digest(values)
    shifted = np.empty(values.nbytes + 1, np.uint8)[1:].view(dtype).reshape(5, 6)
    shifted[...] = values
    assert digest(shifted) == digest(values)
    assert digest(values) != digest(values.reshape(6, 5))


def test_numbers_and_empty_arrays_have_digests():
    assert digest(np.array(1.0)) != digest(np.array(2.0))
    assert digest(np.float32(1) + np.zeros(1)) != digest(np.zeros(1))
    assert digest(np.empty((0, 3))) != digest(np.empty((3, 0)))


def test_the_order_of_several_arrays_counts():
    one = np.ones(3), np.zeros(3)
    assert joint_digest(one) == joint_digest(one)
    assert joint_digest(one) != joint_digest(one[::-1])


@pytest.mark.parametrize("size", [0, 1, 3, 1000])
def test_arrays_on_a_device_have_the_digests_of_the_host(monkeypatch, size):
    cupy = cupy_for_tests()
    monkeypatch.setattr("mpicomp.kernels.device.statistics._WORDS", 64)
    values = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    assert digest(cupy.asarray(values)) == digest(values)
    assert digest(cupy.asarray(values)[1:]) == digest(values[1:])
