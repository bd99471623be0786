"""The contract of a compressor: state that is loaded, snapshots, sums, wrappers, and what is no compressor."""

import copy
import re
import sys
from functools import cache, partial

import numpy as np
import pytest
import test_every_compressor
from numba.core.dispatcher import Dispatcher

import mpicomp
from mpicomp import (
    AggregationAware,
    Compressor,
    Quantised,
    SIDCo,
    SparseVector,
    TopK,
    WarmUp,
    Wrapper,
)
from mpicomp.compressors import check_compressor
from mpicomp.compressors.base import restore, snapshot
from mpicomp.correction import Correction

LENGTH = 1000
EVERY = {
    **{name: partial(make, 0.1) for name, make in test_every_compressor.EVERY.items()},
    "WarmUp of SIDCo": lambda: WarmUp(SIDCo(0.1), [0.9, 0.1], calls=2),
    "SIDCo as published": lambda: SIDCo(0.01, "pareto", 3, "published"),
    "SIDCo without adaptation": lambda: SIDCo(0.01, adaptation=None),
    "Quantised WarmUp": lambda: Quantised(WarmUp(SIDCo(0.01), [0.5, 0.01]), "bfloat16"),
    "Quantised AggregationAware": lambda: Quantised(AggregationAware(0.1), "float16"),
}
compressors = pytest.mark.parametrize("name", EVERY)


def gradient(step, length=LENGTH):
    return np.random.default_rng(step).standard_normal(length).astype(np.float32)


def take_step(compressor, step):
    dense = gradient(step)
    vector = compressor.compress(dense, gradient=dense)
    compressor.observe(vector)
    return vector


@cache
def _used(name, steps):
    compressor = EVERY[name]()
    for step in range(steps):
        take_step(compressor, step)
    return compressor


def used(name, steps=3):
    """Return a compressor after some steps, a copy for each test."""
    return copy.deepcopy(_used(name, steps))


def same(one, other):
    """Say whether two states, or the attributes of two chains, hold the same values."""
    return one.keys() == other.keys() and all(
        np.array_equal(np.asarray(one[k]), np.asarray(other[k])) for k in one
    )


def altered(value):
    """Yield values that are not what a saved state has there, or hardly so."""
    size = np.size(value)
    yield from (
        np.array("text"),
        np.array(None),
        np.array({}),
        np.array(True),
        np.array(1j),
        b"bytes",
        [[1], [2, 3]],
    )
    yield from (
        np.array(bad)
        for bad in (
            -1,
            -1.5,
            0.5,
            np.nan,
            np.inf,
            -np.inf,
            1e300,
            10**12,
            2**63,
            2**64 - 1,
        )
    )
    yield from (
        np.empty(0),
        np.empty((0, 3)),
        np.zeros(size + 1),
        np.ones(size + 7),
        np.ones((size, 1)),
        np.ones(5),
    )
    yield from (np.full(size, bad) for bad in (np.nan, -1.0, 1e300, 3))
    for dtype in (
        np.float16,
        np.float32,
        np.float64,
        np.int8,
        np.int64,
        np.uint64,
        np.complex64,
        str,
        object,
    ):
        yield np.asarray(value).astype(dtype)
        yield np.asarray(value).astype(dtype).reshape(1, -1)


def check_load(compressor, state):
    """Check that a state is refused and nothing changes, or that the next step works with it."""
    before, attributes = (
        compressor.state_dict(),
        copy.deepcopy([vars(part) for part in compressor.chain()]),
    )
    try:
        compressor.load_state_dict(state)
    except ValueError:
        assert same(compressor.state_dict(), before)
        assert repr([vars(part) for part in compressor.chain()]) == repr(attributes)
        return False
    try:
        with np.errstate(all="raise"):
            take_step(compressor, 9).validate()
    except ValueError as error:  # the length is known with the first gradient only
        return not re.match("corrected (has|is) .* the last aggregate", str(error))
    for key, array in compressor.state_dict().items():
        assert array.dtype == before.get(key, array).dtype, key
    return True


@compressors
def test_a_saved_state_continues_bit_for_bit(name):
    whole, first, second = used(name, 7), used(name, 3), EVERY[name]()
    second.load_state_dict(first.state_dict())
    for step in range(3, 7):
        vector = take_step(second, step)
    assert same(second.state_dict(), whole.state_dict())
    expected = take_step(whole, 7)
    vector = take_step(second, 7)
    assert vector.indices.tobytes() == expected.indices.tobytes()
    assert vector.values.tobytes() == expected.values.tobytes()


@compressors
@pytest.mark.parametrize("steps", [0, 3])
def test_an_altered_state_is_refused_or_works(name, steps):
    sound = used(name).state_dict()
    for key, value in sound.items():
        accepted = 0
        for bad in altered(value):
            accepted += check_load(used(name, steps), {**sound, key: bad})
        assert accepted <= 12, f"{accepted} altered values of {key} were accepted"
        check_load(
            used(name, steps), {other: sound[other] for other in sound if other != key}
        )
    for more in ("0.other", "9.step", "step", ""):
        assert not check_load(used(name, steps), {**sound, more: np.array(1)})


def test_the_error_names_the_value_and_what_was_expected():
    with pytest.raises(
        ValueError,
        match=re.escape(
            "the state has array(-1) as 0.step: expected an integer from 0 to"
        ),
    ):
        WarmUp(TopK(0.1)).load_state_dict({"0.step": np.array(-1)})
    with pytest.raises(
        ValueError, match=r"the state has nothing as 0.step: expected an integer"
    ):
        WarmUp(TopK(0.1)).load_state_dict({})
    published = SIDCo(0.1, adaptation="published")
    with pytest.raises(
        ValueError,
        match=r"array\(5\) as 0._calls: expected int64 of shape \(\) from 0 to 4",
    ):
        published.load_state_dict({**published.state_dict(), "0._calls": np.array(5)})


@compressors
def test_a_failed_step_is_undone_by_a_snapshot(name):
    compressor = used(name)
    before = compressor.state_dict()
    attributes, taken = (
        [dict(vars(part)) for part in compressor.chain()],
        snapshot(compressor.chain()),
    )
    take_step(compressor, 3)
    restore(taken)
    assert same(compressor.state_dict(), before)
    assert [vars(part) for part in compressor.chain()] == attributes


def compressed_sum(compressor, residual, gradient, out, scale=1.0):
    correction = Correction([gradient], out, residual, scale, shows_gradient=True)
    return compressor.select(correction, [0, out.size])


@compressors
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_sum_of_summands_is_compressed_like_any_vector(name, dtype):
    one, other = EVERY[name](), EVERY[name]()
    for step in range(3):
        residual, new = (gradient(10 * step + each).astype(dtype) for each in range(2))
        out = np.empty(LENGTH, dtype)
        vector = compressed_sum(one, residual, new, out)
        assert out.tobytes() == (residual + new).tobytes()
        expected = other.compress(out, gradient=new)
        assert vector.indices.tobytes() == expected.indices.tobytes()
        assert vector.values.tobytes() == expected.values.tobytes()


@cache
def long_vectors():
    return [np.random.default_rng(seed).standard_t(3, 3_000_000) for seed in range(2)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_one_pass_over_a_long_vector_selects_the_same(dtype, scale):
    """As long as the fused kernels want it; zeros, and what is not finite too."""
    residual, new = (each.astype(dtype) for each in long_vectors())
    for gradient in (new, -residual):
        one, other, out, total = (
            TopK(0.001),
            TopK(0.001),
            np.empty_like(new),
            dtype(scale) * residual + gradient,
        )
        found, expected = (
            compressed_sum(one, residual, gradient, out, scale),
            other.compress(total),
        )
        assert out.tobytes() == total.tobytes()
        assert found.indices.tobytes() == expected.indices.tobytes()
        assert found.values.tobytes() == expected.values.tobytes()
    new[[1_234_567, 2_000_000]] = np.nan
    with pytest.raises(
        ValueError, match=r"values\[1234567\] is nan: expected finite values"
    ):
        compressed_sum(TopK(0.001), residual, new, np.empty_like(new))


@compressors
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_in_a_sum_is_named_and_nothing_changes(name, bad):
    compressor = used(name)
    before, residual, new = compressor.state_dict(), gradient(5), gradient(6)
    new[[123, 777]] = bad
    with pytest.raises(
        ValueError, match=re.escape(f"values[123] is {bad}: expected finite values")
    ):
        compressed_sum(compressor, residual, new, np.empty(LENGTH, np.float32))
    assert same(compressor.state_dict(), before)


def compiled():
    """Return the number of signatures that each kernel was compiled for."""
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith("mpicomp.kernels.host.")
    ]
    kernels = {
        kernel
        for module in modules
        for kernel in vars(module).values()
        if isinstance(kernel, Dispatcher)
    }
    return {kernel: len(kernel.signatures) for kernel in kernels}


@compressors
def test_what_is_compressed_may_be_read_only_and_nothing_is_compiled_for_it(name):
    dense = gradient(0)
    expected, before = EVERY[name]().compress(dense, gradient=dense), compiled()
    dense.flags.writeable = False
    assert (
        EVERY[name]().compress(dense, gradient=dense).indices.tolist()
        == expected.indices.tolist()
    )
    assert compiled() == before


@compressors
def test_the_repr_is_complete_and_does_not_change(name):
    settings = repr(EVERY[name]())
    assert repr(used(name)) == settings
    assert repr(copy.deepcopy(used(name))) == settings
    assert same(eval(settings, vars(mpicomp)).state_dict(), EVERY[name]().state_dict())


def test_a_wrapper_is_as_its_innermost():
    outer = Quantised(Wrapper(inner := TopK(0.1)), "float16")
    assert outer.chain() == [outer, outer.compressor, inner]
    outer = Quantised(AggregationAware(0.1), "float16")
    outer.observe(SparseVector([3], [1.0], 9))
    assert outer.state_dict()["1._history"].tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0]
    outer.reset()
    assert outer.state_dict() == {}


def test_a_warm_up_leaves_the_density_as_it_was():
    warm = WarmUp(TopK(0.1), [1.0, 0.5], calls=1)
    assert [warm.compress(np.ones(10)).nnz for _ in range(3)] == [10, 5, 5]
    assert warm.compressor.density == 0.1
    with pytest.raises(ValueError, match="finite"):
        warm.compress(np.full(3, np.nan))
    assert (warm.compressor.density, warm.step) == (0.1, 3)


class Decaying(Compressor):
    """A compressor as a user writes one."""

    state = {"threshold": (0, 1)}

    def __init__(self, threshold, *options, **more):
        self.threshold = threshold

    def compress(self, corrected, *, gradient=None):
        vector = SparseVector.from_dense(
            np.where(np.abs(corrected) >= self.threshold, corrected, 0)
        )
        self.threshold *= 0.5
        return vector


def test_a_compressor_of_ones_own():
    own = Quantised(Decaying(1.0), "float16")
    assert compressed_sum(
        own, np.ones(3), np.array([0.0, -2, -0.4]), np.empty(3)
    ).indices.tolist() == [0, 1]
    assert {name: array.tolist() for name, array in own.state_dict().items()} == {
        "1.threshold": 0.5
    }
    for bad in (2, -1, np.nan, "x", [0.5]):
        with pytest.raises(
            ValueError, match=r"as 1\.threshold: expected a number from 0 to 1"
        ):
            own.load_state_dict({"1.threshold": np.array(bad)})
    own.load_state_dict({"1.threshold": np.array(0.25)})
    assert own.compressor.threshold == 0.25
    assert repr(own) == "Quantised(compressor=Decaying(threshold=0.25), form='float16')"
    with pytest.raises(
        NotImplementedError, match=r"Compressor has no compress\(corrected"
    ):
        Compressor().compress(np.ones(3))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            TopK,
            r"compressor is the class TopK: expected an object such as TopK\(",
        ),
        (
            lambda dense: dense,
            "compressor is <function .*: expected .* a class of your own that derives from mpicomp",
        ),
        (
            None,
            r"compressor is None: expected an object such as TopK\(density=0.01\)",
        ),
        (0.1, "compressor is 0.1: expected an object such as"),
    ],
)
def test_what_is_no_compressor_is_refused_with_the_remedy(bad, message):
    for call in (check_compressor, Wrapper, lambda bad: Quantised(bad, "sign"), WarmUp):
        with pytest.raises(TypeError, match=message):
            call(bad)
