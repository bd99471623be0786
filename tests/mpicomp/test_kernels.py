"""Every kernel against NumPy, compiled and as the Python function that it was compiled from."""

import contextlib
import math
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from few_bits_cases import decode as decode_values
from few_bits_cases import quantised
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    draw_sparse,
    expected_in_chunks,
    expected_top_k,
    families,
    magnitude_keys,
    plans_of,
)
from strategies import DTYPES, finite_values

from mpicomp import SparseVector, codec
from mpicomp.codec.indices import BITMAP
from mpicomp.codec.values import offsets_of
from mpicomp.correction import Correction
from mpicomp.few_bits import BITS, coder
from mpicomp.kernels import Summands, host
from mpicomp.kernels.host import (
    bits,
    coding,
    few_bits,
    fitting,
    fused,
    merging,
    patches,
    segments,
    selection,
    statistics,
    streaming,
    transforms,
)
from mpicomp.kernels.host.statistics import by_lloyd

MODULES = [
    bits,
    coding,
    few_bits,
    fitting,
    fused,
    merging,
    patches,
    segments,
    selection,
    statistics,
    streaming,
    transforms,
]
KERNELS = [
    (module, name)
    for module in MODULES
    for name, kernel in vars(module).items()
    if hasattr(kernel, "py_func")
]
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
INDEX_DTYPE = pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
FAMILY = pytest.mark.parametrize("family", families(np.float32))
NOT_FINITE = pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])


@contextlib.contextmanager
def interpreted(monkeypatch):
    # products modulo 2^64 are meant
    with monkeypatch.context() as patch, np.errstate(over="ignore", invalid="ignore"):
        for module, name in KERNELS:
            patch.setattr(module, name, getattr(module, name).py_func)
        yield


@pytest.fixture(params=["compiled", "interpreted"])
def mode(request, monkeypatch):
    with (
        interpreted(monkeypatch)
        if request.param == "interpreted"
        else contextlib.nullcontext()
    ):
        yield request.param


def assert_same(ours, expected):
    """Fail unless arrays have the same dtypes and bits."""
    for one, other in zip(ours, expected, strict=True):
        assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes())


@DTYPE
@pytest.mark.parametrize("size", [0, 1, 7, 15, 16, 17, 64, 333])
def test_long_sums_are_numpys_wherever_the_arrays_begin(mode, dtype, size):
    given = np.random.default_rng(5).standard_normal((3, size + 20)).astype(dtype)
    for first in 0, 1, 3, 16:
        for step in 1, 2:
            a, b, room = (each[first : first + size : step] for each in given.copy())
            around = room.base.copy()
            host.add(a, b, room, long=0)
            np.testing.assert_array_equal(room, a + b)
            around[2, first : first + size : step] = a + b
            # nothing beside it was written
            np.testing.assert_array_equal(room.base, around)


@DTYPE
@FAMILY
def test_divide_largest_parts_what_top_k_finds_from_the_rest(mode, dtype, family):
    values = families(dtype)[family].astype(dtype)
    indices = 7 * np.arange(values.size, dtype=np.int32)
    for k in (1, 37, 1500, 2999) if mode == "compiled" else (37,):
        positions = expected_top_k(values, k)
        parts = (
            indices[positions],
            values[positions],
            np.delete(indices, positions),
            np.delete(values, positions),
        )
        assert_same(host.divide_largest(indices, values, k), parts)


@DTYPE
@pytest.mark.parametrize(
    "scales",
    [(0, 0.5**24, 1e-3, 1, 1e3, np.inf, np.nan), (0.8, 0.9, 1), (1e-3, 1, 1, 1, 1, 1)],
)
def test_chunks_of_any_scale_after_each_other(dtype, scales):
    """The floor that a chunk leaves for the next is far too high, a little too high, far too low, or that of zeros."""
    rng = np.random.default_rng(0)
    scales = rng.choice(
        [
            np.finfo(dtype).smallest_subnormal if each == 0.5**24 else each
            for each in scales
        ],
        80,
    )
    values = (rng.standard_normal((80, 50)) * scales[:, None]).astype(dtype).reshape(-1)
    for k in 1, 7, 49, 50:
        positions = host.largest_in_segments(
            values, [0, values.size], [k], [50], [1]
        ).indices
        magnitudes = np.where(
            np.isnan(values), np.inf, np.abs(values).astype(np.float64)
        )
        np.testing.assert_array_equal(
            positions, expected_in_chunks(magnitudes, k, 50, 1)
        )


SEGMENTS = [0, 0, 1, 30, 30, 1400, 20_000, 40_000, 40_000]


@DTYPE
@FAMILY
def test_the_largest_of_segments_are_those_of_each_alone(mode, dtype, family):
    """Of other scales, some of them empty, as a whole and in chunks; compiled ones long enough for a sample."""
    bounds = SEGMENTS if mode == "compiled" else SEGMENTS[:5]
    scales = np.repeat(
        np.array([1, 1, 8, 0, 0.5, 4, 0.25, 1], dtype)[: len(bounds) - 1],
        np.diff(bounds),
    )
    with np.errstate(all="ignore"):
        values = np.resize(families(dtype)[family], bounds[-1]).astype(dtype) * scales
    sizes = np.diff(bounds).tolist()
    for each in [max(1, size) for size in sizes], [64] * len(sizes):
        counts = [
            max(1, min(size, chunk) // 50)
            for size, chunk in zip(sizes, each, strict=True)
        ]
        last = [
            max(1, count // 2) if chunk == 64 else count
            for count, chunk in zip(counts, each, strict=True)
        ]
        rows = (
            [
                min(count, max(1, size))
                for count, size in zip(counts, sizes, strict=True)
            ],
            each,
            last,
        )
        found = host.largest_in_segments(values, bounds, *rows)
        positions = found.indices
        assert found.places == np.searchsorted(positions, bounds).tolist()
        alone = [
            expected_in_chunks(values[first:end], *row) + first
            for (first, end), row in zip(
                pairwise(bounds), zip(*rows, strict=True), strict=True
            )
            if end > first
        ]
        np.testing.assert_array_equal(positions, np.concatenate(alone))
        assert found.values.tobytes() == values[positions].tobytes()


@DTYPE
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_the_largest_of_a_sum_of_segments_are_those_of_the_written_sum(
    mode, dtype, scale
):
    """Parts of another vector, each in memory of its own, at any place of a cache line."""
    rng, bounds = (
        np.random.default_rng(1),
        SEGMENTS if mode == "compiled" else SEGMENTS[:5],
    )
    vector, room = (
        rng.standard_normal(bounds[-1]).astype(dtype),
        np.full(bounds[-1] + 3, 7, dtype),
    )
    parts = [
        rng.standard_normal(end - first + 1).astype(dtype)[1:]
        for first, end in pairwise(bounds)
    ]
    sizes = np.diff(bounds).tolist()
    for offset, chunk in (1, 64), (3, 10**6):
        out = room[offset : offset + bounds[-1]]
        k = [min(size, max(1, min(size, chunk) // 50)) for size in sizes]
        rows = k, [chunk] * len(sizes), [1] * len(sizes)
        found = host.largest_in_segments(
            out, bounds, *rows, summands=Summands(vector, scale, parts)
        )
        expected = vector * dtype.type(scale) + np.concatenate(parts)
        assert out.tobytes() == expected.tobytes()
        alone = host.largest_in_segments(expected, bounds, *rows)
        assert_same(found[:2], alone[:2])


@DTYPE
@pytest.mark.parametrize("two", [False, True])
def test_the_magnitudes_of_segments_are_those_of_each_alone(mode, dtype, two):
    """Bitwise: sums have the order of `sides`."""
    bounds = (
        [0, 0, 1, 257, 600, 600 + 16384, 40_000]
        if mode == "compiled"
        else [0, 1, 300, 900]
    )
    values = (np.random.default_rng(2).standard_t(3, bounds[-1]) * 3).astype(dtype)
    found = statistics.magnitudes_in_segments(values, bounds, two=two)
    for row, (first, end) in zip(found.tolist(), pairwise(bounds), strict=True):
        sums = host.sides(values[first:end], np.inf)
        mean = min(sums.sum_below / max(1, end - first), sums.largest)
        magnitudes = (
            by_lloyd(partial(host.sides, values[first:end]), mean, sums.largest)
            if two
            else (mean, mean, mean)
        )
        assert row == [mean, sums.largest, *magnitudes]


@NOT_FINITE
def test_a_segment_that_is_not_finite_has_no_finite_mean(mode, bad):
    values = np.ones(20, np.float32)
    values[7] = bad
    found = statistics.magnitudes_in_segments(values, [0, 5, 20], two=True)
    assert np.isfinite(found).all(axis=1).tolist() == [True, False]


@DTYPE
@pytest.mark.parametrize("two", [False, True])
def test_values_get_the_magnitudes_of_their_segments_and_keep_their_signs(
    mode, dtype, two
):
    values, bounds = (
        families(dtype, 300)["negative zeros"].astype(dtype),
        [0, 7, 7, 100, 300],
    )
    signed, levels = host.with_magnitudes(values, bounds, two=two)
    expected = statistics.magnitudes_in_segments(values, bounds, two=two)
    assert levels.tobytes() == expected.tobytes()
    rows = np.repeat(levels, np.diff(bounds), axis=0)
    low, high = rows[:, 2:4].T.astype(dtype)
    is_low = np.abs(values).astype(np.float64) <= rows[:, 4]
    expected = np.copysign(np.where(is_low, low, high), values)
    assert signed.tobytes() == expected.tobytes()


@DTYPE
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("scale", [1, 0.3, -2])
def test_a_sum_with_parts_is_rounded_twice_wherever_they_begin(
    mode, dtype, sign, scale
):
    rng = np.random.default_rng(3)
    bounds = [0, 0, 5, 21, 400, 400, 1000]
    a, b, room = (rng.standard_normal(1007).astype(dtype) for _ in range(3))
    for long, step in ((0, 1), (1 << 20, 1), (0, 2)):
        parts = [
            np.empty((high - low, step), dtype)[:, 0] for low, high in pairwise(bounds)
        ]
        for part, (low, high) in zip(parts, pairwise(bounds), strict=True):
            part[:] = b[low:high]
        out = room[3:1003]
        around = room.copy()
        host.add_parts(a[:1000], scale, parts, out, sign=sign, long=long)
        around[3:1003] = a[:1000] * dtype.type(scale) + sign * b[:1000]
        assert room.tobytes() == around.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=str)
def test_no_kernel_fuses_a_product_and_a_sum(mode, dtype):
    size, eps = 300, np.finfo(dtype).eps
    a, b, factor = (
        np.full(size, 1 + eps, dtype),
        np.full(size, eps - 1, dtype),
        float(1 - eps),
    )
    # 1 - eps^2 is rounded to 1
    parts, expected = [b[:200], b[200:]], np.full(size, eps, dtype)
    assert eps - eps * eps < eps  # the sum if the product was not rounded
    summed, selected = np.empty(size, dtype), np.empty(size, dtype)
    host.add_parts(a, factor, parts, summed, long=0)
    rows = [0, 200, size], [3, 3], [50, 50], [1, 1]
    positions, values, *_ = host.largest_in_segments(
        selected, *rows, summands=Summands(a, factor, parts)
    )
    assert summed.tobytes() == selected.tobytes() == expected.tobytes()
    assert values.tobytes() == expected[positions].tobytes()


@pytest.mark.parametrize(
    "family",
    ["normal", "laplace", "cauchy", "sorted", "quantised", "all equal", "zeros"],
)
def test_a_sample_serves_ordinary_data_on_any_number_of_threads(monkeypatch, family):
    monkeypatch.setattr("mpicomp.threads._LEAST", 1 << 10)
    monkeypatch.setattr(selection, "_by_histogram", None)
    if family not in ("quantised", "all equal"):
        monkeypatch.setattr(fused, "largest", None)
    values = families(np.float32, 200_003)[family].astype(np.float32)
    for k in 1, 200, 2000, 150_000:
        for threads in 1, 2, 3:
            assert_finds_the_largest(values, k, threads)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("seen", [9.0, 0.5])
def test_the_largest_are_exact_when_the_sample_misleads(
    mode, monkeypatch, dtype, seen, threads
):
    monkeypatch.setattr("mpicomp.threads._LEAST", 1 << 10)
    monkeypatch.setattr(selection, "_SAMPLE", 64)
    places = selection.take_sample(np.arange(3000, dtype=np.int32), np.int32(-1))
    values = (1 + np.arange(3000)[::-1] / 3000).astype(dtype)
    values[places] = seen
    for k in 5, 100, 1000:
        assert_finds_the_largest(values, k, threads)


@DTYPE
@NOT_FINITE
def test_values_that_are_not_finite_count_as_the_largest(mode, dtype, bad):
    values = np.arange(100).astype(dtype)
    values[[42, 77]] = bad
    assert host.largest(values, 1)[0].tolist() == [42]
    assert host.largest(values, 3)[0].tolist() == [42, 77, 99]
    assert not np.isfinite(host.sides(values, np.inf).sum_below)
    with pytest.raises(
        ValueError, match=rf"values\[42\] is {bad}: expected finite values"
    ):
        host.raise_not_finite(values)
    host.raise_not_finite(values[:42])


THRESHOLDS = (
    0,
    1e-320,
    0.1,
    1,
    3.0,
    np.nextafter(3, 0),
    np.nextafter(3, 9),
    65504.0,
    np.nextafter(65504, 0),
    np.inf,
)


@DTYPE
@FAMILY
def test_a_threshold_is_not_rounded(dtype, family):
    values = families(dtype)[family].astype(dtype)
    keys, magnitudes = magnitude_keys(values)[0], np.abs(values.astype(np.float64))
    for threshold, least in zip(
        THRESHOLDS,
        fitting.keys_above(np.array(THRESHOLDS), dtype).tolist(),
        strict=True,
    ):
        np.testing.assert_array_equal(
            keys >= least, (magnitudes > threshold) | np.isinf(magnitudes)
        )


@pytest.mark.parametrize("pattern", [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000])
def test_every_nan_is_a_largest(monkeypatch, pattern):
    monkeypatch.setattr(selection, "_SAMPLE", 64)
    values = np.full(3000, pattern, np.uint32).view(np.float32)
    assert host.largest(values, 7)[0].tolist() == list(range(7))


def halves(values, seed=1):
    """Return two vectors whose sum is `values`, and which have the signs of its zeros."""
    first = np.random.default_rng(seed).random(values.size) < 0.5
    zeros = np.copysign(values.dtype.type(0), values)
    return np.where(first, values, zeros), np.where(first, zeros, values)


def assert_adds_and_finds_the_largest(a, b, k, first=0, threads=None):
    scale = a.dtype.type(1 if first % 2 else 0.7)
    with np.errstate(all="ignore"):
        total, room = scale * a + b, np.full(a.size + first, 7, a.dtype)
        positions, found = host.add_largest(
            a, b, room[first:], k, scale=scale, threads=threads, long=0
        )
    assert room[first:].tobytes() == total.tobytes()
    assert (room[:first] == 7).all()
    np.testing.assert_array_equal(positions, expected_top_k(total, k), strict=True)
    assert_same([found], [total[positions]])


def assert_finds_the_largest(values, k, threads=None):
    """Check a vector, and a sum whose result it is."""
    np.testing.assert_array_equal(
        host.largest(values, k, threads=threads)[0], expected_top_k(values, k)
    )
    if k:
        out, sent = np.empty_like(values), halves(values)
        positions, found = host.add_largest(*sent, out, k, threads=threads, long=0)
        np.testing.assert_array_equal(positions, expected_top_k(values, k), strict=True)
        assert_same([out, found], [values, values[positions]])


@DTYPE
@FAMILY
@pytest.mark.parametrize("sample", [64, 512, 10**6])
def test_the_largest_are_exact_with_ties_to_the_lowest_position(
    mode, monkeypatch, dtype, family, sample
):
    monkeypatch.setattr(selection, "_SAMPLE", sample)
    drawn = families(dtype)
    values = drawn[family].astype(dtype)
    for k in (1, 2, 37, 1500, 2999, 3000, 10**6) if mode == "compiled" else (37,):
        assert_finds_the_largest(values, k)
        assert_adds_and_finds_the_largest(
            drawn["laplace"].astype(dtype), values, k, first=k % 5
        )


@settings(max_examples=200)
@given(st.data())
def test_the_largest_of_any_values(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    a = data.draw(finite_values(dtype, st.integers(0, 200)))
    b = a[data.draw(st.integers(0, 200)) % max(1, a.size) :]
    k, first = data.draw(st.integers(1, 210)), data.draw(st.integers(0, 17))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "_SAMPLE", data.draw(st.sampled_from([16, 10**6])))
        assert_finds_the_largest(a, k)
        assert_adds_and_finds_the_largest(a[: b.size], b, k, first)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_that_are_nan_come_as_they_were_written(mode, dtype):
    a, b = np.random.default_rng(0).standard_normal((2, 300)).astype(dtype)
    keys = f"u{a.itemsize}"
    a[5:250:7], b[5:250:7] = np.nan, -np.nan
    b.view(keys)[5:250:7] += 77
    a[6], b[6], a[8] = np.inf, -np.inf, np.nan
    out = np.empty_like(a)
    with np.errstate(all="ignore"):
        positions, found = host.add_largest(a, b, out, 41, long=0)
        np.testing.assert_array_equal(out, a + b)
    assert {5, 6, 8, 12, 19} <= set(positions.tolist())
    assert found.tobytes() == out[positions].tobytes()


@DTYPE
def test_the_sums_on_both_sides_of_a_threshold(mode, dtype):
    for family in (
        set(families(dtype)) - {"infinite", "largest"}
        if mode == "compiled"
        else ["denormal"]
    ):
        values = families(dtype, 40_000 if mode == "compiled" else 300)[family].astype(
            dtype
        )
        magnitudes = np.abs(values.astype(np.float64))
        for threshold in (0.0, 0.125, float(magnitudes.mean()), np.inf):
            found, above = host.sides(values, threshold), magnitudes > threshold
            assert (found.below, found.above) == (
                np.count_nonzero(~above),
                np.count_nonzero(above),
            )
            assert found.sum_below == pytest.approx(
                math.fsum(magnitudes[~above]), rel=1e-13
            )
            assert found.sum_above == pytest.approx(
                math.fsum(magnitudes[above]), rel=1e-13
            )
            assert found.largest == magnitudes.max()
    assert host.sides(values[:0], 1.0) == (0, 0, 0, 0, 0)


@DTYPE
@pytest.mark.parametrize("threshold", [0, 0.125, 2.0])
def test_the_excess_over_a_threshold_has_a_total(mode, dtype, threshold):
    for family in (
        set(families(dtype)) - {"largest"}
        if mode == "compiled"
        else ["normal", "infinite"]
    ):
        values = families(dtype, 40_000 if mode == "compiled" else 2500)[family].astype(
            dtype
        )
        magnitudes = np.abs(values.astype(np.float64))
        above = magnitudes > threshold
        plans = plans_of([0, values.size], 0.1)
        plans["start"] = threshold
        buffers = np.empty(768), np.empty(2048, np.promote_types(dtype, np.float32))
        given = values.astype(buffers[1].dtype), np.array([0, values.size])
        with np.errstate(all="ignore"):
            fitting._fit_excess(*given, plans, True, *buffers)
        assert plans["above"] == values.size
        assert plans["total"][0] == pytest.approx(
            math.fsum(magnitudes[above] - threshold)
        )


@DTYPE
def test_a_sample_has_whole_segments_or_runs_from_equal_strides(mode, dtype):
    bounds, counts, places = [0, 5, 5, 1600], np.array([5, 0, 64]), np.arange(1600)
    found = fitting.sample(places.astype(dtype), bounds, counts)
    runs = found[5:].reshape(4, 16) - 5
    assert found[:5].tolist() == [0, 1, 2, 3, 4]
    assert (np.diff(runs) == 1).all()
    assert all(
        stride * 1595 / 4 - 1 <= run[0] < (stride + 1) * 1595 / 4 - 15
        for stride, run in enumerate(runs)
    )
    parts = [np.arange(end - first).astype(dtype) for first, end in pairwise(bounds)]
    if dtype == np.float16:
        return
    given = Summands((places % 2).astype(dtype), 0.5, parts)
    total = np.concatenate(parts) + dtype.type(0.5) * given[0]
    sums = fitting.sample(np.empty(1600, dtype), bounds, counts, summands=given)
    assert sums.tolist() == total[found.astype(int)].tolist()


@DTYPE
@pytest.mark.parametrize("by_count", [True, False])
def test_fits_in_stages_select_what_exceeds_the_last_threshold(mode, dtype, by_count):
    """Against the formulas of the fits, as the exceedances of each threshold give it."""
    bounds = [0, 300, 300, 301, 1500]
    values = (families(dtype, 1500)["laplace"] * 2 + 0.01).astype(dtype)
    plans = plans_of(bounds, 0.02, 3)
    positions, found, *_ = host.select_by_fits(
        values, bounds, plans, distribution="pareto", by_count=by_count
    )
    expected, last = [], 0.02
    for (first, end), plan in zip(pairwise(bounds), plans, strict=True):
        magnitudes, thresholds = np.abs(values[first:end].astype(np.float64)), [0.0]
        for stage in range(3) if end - first > 1 else ():
            over = magnitudes[magnitudes > thresholds[-1]] - thresholds[-1]
            ratio = over.mean() ** 2 / over.var()
            share = 0.25 if stage == 0 else (last / 0.25) ** 0.5
            if by_count and stage:
                share = (last * magnitudes.size / over.size) ** (1 / (3 - stage))
            shape = (1 - ratio) / 2
            thresholds.append(
                thresholds[-1]
                + over.mean()
                * (ratio + 1)
                / 2
                / shape
                * np.expm1(-shape * np.log(share))
            )
        if len(thresholds) > 1:
            assert (plan["start"], plan["threshold"]) == (
                pytest.approx(thresholds[2]),
                pytest.approx(thresholds[3]),
            )
            expected += [first + np.flatnonzero(magnitudes > plan["threshold"])]
        elif magnitudes.size:
            expected += [[first]]  # the largest one
    np.testing.assert_array_equal(positions, np.concatenate(expected))
    assert found.tobytes() == values[positions].tobytes()
    assert plans["kept"].tolist() == np.histogram(positions, bounds)[0].tolist()


@pytest.mark.parametrize("x", [1e-300, 1e-12, 0.3, 0.5, 0.7, 1 - 1e-12, 3.0, 1e17])
def test_logarithms_and_exponentials_of_fits(mode, x):
    assert fitting._log(x) == pytest.approx(math.log(x), rel=1e-13, abs=3e-16)
    for exponent in (x, -x) if x < 10 else (-x,):
        assert fitting._expm1(exponent) == pytest.approx(
            math.expm1(exponent), rel=1e-13
        )


@DTYPE
@INDEX_DTYPE
@pytest.mark.parametrize("shape", [(), (3,)], ids=["entries", "rows"])
@pytest.mark.parametrize(
    ("size_a", "size_b"), [(0, 0), (5, 0), (0, 5), (40, 60), (100, 100)]
)
def test_merge_adds_where_both_have_an_entry(
    mode, dtype, index_dtype, shape, size_a, size_b
):
    rng = np.random.default_rng([size_a, size_b])
    pair = [
        draw_sparse(rng, size, 120, index_dtype, shape, dtype)
        for size in (size_a, size_b)
    ]
    indices, total, _ = host.merge(*pair[0], *pair[1])
    dense = np.zeros((120, *shape), dtype)
    for where, what in pair:
        dense[where] += what
    assert (indices.dtype, total.dtype) == (index_dtype, dtype)
    np.testing.assert_array_equal(indices, np.union1d(pair[0][0], pair[1][0]))
    np.testing.assert_array_equal(total, dense[indices])
    assert host.merge(*pair[1], *pair[0])[1].tobytes() == total.tobytes()


def one_after_the_other(indices, values):
    """Return the sum that `accumulate` promises, entry by entry."""
    sums = {}
    with np.errstate(over="ignore"):
        for where, what in zip(indices, values, strict=True):
            wide = what.astype(np.promote_types(what.dtype, np.float32))
            for index, value in zip(where.tolist(), wide, strict=True):
                sums[index] = sums[index] + value if index in sums else value
        return sorted(sums), np.array([sums[index] for index in sorted(sums)]).astype(
            values[0].dtype
        )


@DTYPE
@INDEX_DTYPE
@pytest.mark.parametrize("length", [10_000, 2**31 - 1])
@pytest.mark.parametrize("parts", [1, 2, 9])
@pytest.mark.parametrize("way", ["tiles", "batches", "sorting", "rows"])
def test_accumulate_adds_in_the_order_of_the_vectors(
    mode, monkeypatch, dtype, index_dtype, length, parts, way
):
    monkeypatch.setattr(merging, "_SPARSEST", 0 if way == "sorting" else 2**31)
    monkeypatch.setattr(merging, "_BATCH", 100 if way == "batches" else 2**18)
    rng = np.random.default_rng(parts)
    among, shape = rng.integers(0, length, 300), (2,) if way == "rows" else ()
    drawn = [
        draw_sparse(rng, min(40 * p, 200), np.unique(among), index_dtype, shape, dtype)
        for p in range(parts)
    ]
    indices, values = zip(*drawn, strict=True)
    union, total = host.accumulate(indices, values, length)
    expected = one_after_the_other(indices, values)
    assert (union.dtype, total.dtype) == (index_dtype, dtype)
    assert union.tolist() == expected[0]
    assert total.tobytes() == expected[1].tobytes()


@pytest.mark.parametrize("sparsest", [0, 2**63])
def test_accumulate_keeps_zeros_and_their_signs_at_any_index(monkeypatch, sparsest):
    monkeypatch.setattr(merging, "_SPARSEST", sparsest)
    indices = [
        np.array(each, np.int64) for each in ([0, 7, 2**63 - 2], [7], [1, 2**63 - 2])
    ]
    values = [np.array(each, np.float32) for each in ([-0.0, 3, -0.0], [-3], [0, -0.0])]
    union, total = host.accumulate(indices, values, 2**63 - 1)
    assert union.tolist() == [0, 1, 7, 2**63 - 2]
    np.testing.assert_array_equal(total, 0)
    assert np.signbit(total).tolist() == [True, False, False, True]


@DTYPE
@INDEX_DTYPE
@pytest.mark.parametrize("values_dtype", DTYPES, ids=str)
def test_gather_and_scatter_add_are_numpys_on_unique_indices(
    mode, dtype, index_dtype, values_dtype
):
    rng = np.random.default_rng(1)
    indices, values = draw_sparse(rng, 80, 500, index_dtype, (), values_dtype)
    dense, values[3] = rng.standard_normal(500).astype(dtype), -0.0
    np.testing.assert_array_equal(host.gather(dense, indices), dense[indices])
    expected = dense.copy()
    for sign in 1, -1:
        expected[indices] += sign * values
        host.scatter_add(dense, indices, values, sign=sign)
        assert_same([dense], [expected])


@DTYPE
@INDEX_DTYPE
@pytest.mark.parametrize("sizes", [(500,), (0, 1, 300, 0, 199), (100,) * 5, (0,)])
def test_a_sparse_vector_is_written_to_its_parts_and_zeros_elsewhere(
    mode, sizes, dtype, index_dtype
):
    length = sum(sizes)
    rng = np.random.default_rng(1)
    indices, values = draw_sparse(rng, length // 6, length, index_dtype, (), dtype)
    expected = np.zeros(length, dtype)
    expected[indices] = values
    ends = np.cumsum(sizes)[:-1]
    for are_zero in False, True:
        parts = [np.full(size, not are_zero, dtype) for size in sizes]
        host.sparse_writer(indices, values, parts, are_zero=are_zero)()
        assert_same(parts, np.split(expected, ends))


@DTYPE
@pytest.mark.parametrize("step", [1, 2])
def test_clear_leaves_no_bit_and_nothing_else(dtype, step):
    values = np.full((4, 50), -1, dtype)
    expected = values.copy()
    host.clear(values[1:3, ::step])
    expected[1:3, ::step] = 0
    assert values.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("first", "end"), [(0, 0), (0, 1000), (7, 8), (2**31 - 9, 2**31 - 1)]
)
def test_consecutive_is_arange(mode, dtype, first, end):
    np.testing.assert_array_equal(
        host.consecutive(first, end, dtype),
        np.arange(first, end),
        strict=dtype == np.int64,
    )


@pytest.mark.parametrize(
    ("indices", "position"),
    [
        ([], -1),
        ([0, 4, 9], -1),
        ([-1, 4], 0),
        ([0, 10], 1),
        ([0, 3, 3], 2),
        ([5, 4], 1),
        ([0, 2**31 - 1, 1], 1),
    ],
)
def test_first_disorder(mode, indices, position):
    for dtype in np.int32, np.int64:
        assert host.first_disorder(np.array(indices, dtype), 10) == position


def test_an_inspection_finds_what_is_wrong_and_the_ends(mode):
    values = np.array([[1, 2], [np.nan, np.inf], [5, 6]], np.float32)
    assert host.inspect(np.array([2, 4, 9]), values, 10) == (-1, 2, 2, 9)
    assert host.inspect(np.array([2, 9, 9]), values[:, :0], 10) == (2, -1, 2, 9)
    assert host.inspect(np.array([], np.int32), values[:0], 10) == (-1, -1, 0, -1)


@DTYPE
@INDEX_DTYPE
@pytest.mark.parametrize("size", [1, 2, 63, 64, 300])
def test_indices_and_values_come_back_from_their_codes(mode, dtype, index_dtype, size):
    """Interpreted, an access beyond an array is an IndexError."""
    rng = np.random.default_rng(size)
    indices = np.cumsum(rng.integers(1, 9, size)) + (
        2**33 if index_dtype == np.int64 else 77
    )
    for values in np.full(size, 3.0), 1 + rng.random(size), rng.standard_normal(size):
        vector = SparseVector(
            indices,
            np.copysign(values, rng.standard_normal(size)).astype(dtype),
            indices[-1] + 1,
        )
        back = codec.decode(
            codec.encode(vector, coding=(BITMAP, offsets_of(vector.values)))
        )
        assert vector.indices.dtype == index_dtype
        assert_same([back.indices, back.values], [vector.indices, vector.values])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_divide_parts_the_entries(mode, dtype):
    indices, values = np.arange(0, 20, 2, np.int32), np.arange(10).astype(dtype)
    for positions in (np.arange(0), np.array([0, 3, 9]), np.arange(10)):
        parts = (
            indices[positions],
            values[positions],
            np.delete(indices, positions),
            np.delete(values, positions),
        )
        assert_same(host.divide(indices, values, positions), parts)


def butterflies(part):
    """Return the transform of a part whose length is a power of two, stage by stage."""
    stride, size = 1, part.size
    while stride < size:
        pairs = part.reshape(-1, 2, stride)
        part = np.stack(
            [pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1
        ).reshape(-1)
        stride *= 2
    return part * part.dtype.type(size**-0.5)


def in_parts(size, chunk):
    """Return where the parts of a Walsh-Hadamard transform begin and end."""
    start = 0
    while start < size:
        while chunk > size - start:
            chunk //= 2
        yield start, start + chunk
        start += chunk


@DTYPE
def test_a_walsh_hadamard_transform_has_the_additions_of_its_stages(mode, dtype):
    for chunk in 1, 2, 4, 32, 64, 128, 256, 1024:
        for size in {0, 1, 2, 63, chunk, 3 * chunk, 2 * chunk + 101}:
            values = np.random.default_rng(size).standard_normal(size).astype(dtype)
            wide = values.astype(np.promote_types(dtype, np.float32))
            expected = [
                butterflies(wide[start:end]) for start, end in in_parts(size, chunk)
            ]
            out = np.empty_like(values)
            host.hadamard(values, out, chunk)
            np.testing.assert_array_equal(
                out, np.concatenate([wide[:0], *expected]).astype(dtype)
            )
            host.hadamard(values, values, chunk)
            np.testing.assert_array_equal(values, out)


@DTYPE
def test_signs_are_one_minus_one_and_zero(mode, dtype):
    for values in families(dtype).values():
        values = values.astype(dtype)
        expected = (1.0 * (values > 0) - (values < 0)).astype(dtype)
        host.signs(values)
        assert values.tobytes() == expected.tobytes()


@DTYPE
@pytest.mark.parametrize("step", [1, 3])
def test_a_view_taken_for_writable_holds_the_same_memory(dtype, step):
    values = np.arange(12).astype(dtype)
    view = values[::step]
    assert bits.as_writable(view) is view
    view.flags.writeable = False
    writable = bits.as_writable(view)
    assert writable.flags.writeable
    assert (writable.ctypes.data, writable.strides, writable.dtype) == (
        view.ctypes.data,
        view.strides,
        dtype,
    )
    del values, view
    np.testing.assert_array_equal(writable, np.arange(0, 12, step))
    assert bits.as_writable(np.broadcast_to(dtype.type(3), 0)).size == 0


def coded(values, bits, block, others=(), *, short=False, rejected=None):
    """Return a sum, its values in few bits, decoded, and the errors. others: dense, and first in as many bits."""
    room, rejected = (
        (values.size, bits, block, values),
        np.empty_like(values) if rejected is None else rejected,
    )
    terms = [
        coder(Correction([other], np.empty_like(other)), bits, block)(
            codec.few_bits_message(*room)
        )
        for other in others
    ]
    found, again = (
        coder(Correction([values], rejected), bits, block, short=short)(
            codec.few_bits_message(*room), terms
        ),
        np.empty_like(values),
    )
    decoded = [np.full_like(values, 7) for _ in (found, *terms)]
    for each, out in zip((found, *terms), decoded, strict=True):
        decode_values(each, out)
    host.decoder([(found.codes, found.scales)], bits, block, [again], long=0)()
    assert again.tobytes() == decoded[0].tobytes()
    return sum(decoded[1:], values), decoded[0], rejected


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("number", BITS)
def test_few_bits_are_those_of_numpy(mode, dtype, number):
    for size in (
        (0, 1, 31, 32, 33, 200) if mode == "interpreted" else (0, 1, 31, 32, 33, 3000)
    ):
        for family in (
            "normal",
            "laplace",
            "zeros",
            "all equal",
            "negative zeros",
            "one far off",
        ):
            values = families(dtype, max(size, 18))[family][:size].astype(dtype)
            others = (
                np.random.default_rng(size).standard_normal((3, size)).astype(dtype) / 4
            )
            for block, ranks in ((32, 1), (128, 2), (64, 4)):
                # else sums are between levels
                terms = others[: ranks - 1] if family in ("normal", "laplace") else []
                total, decoded, rejected = coded(values, number, block, terms)
                room = {
                    "rtol": 0,
                    "atol": 9 * np.finfo(dtype).eps * np.abs(values).max(initial=1),
                }
                np.testing.assert_allclose(
                    decoded, quantised(total, number, block, dtype), **room
                )
                np.testing.assert_allclose(decoded + rejected, total, **room)
                in_place = values.copy()
                coded(in_place, number, block, terms, rejected=in_place)
                assert in_place.tobytes() == rejected.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("number", [8, 4])
def test_8_and_4_bits_lose_no_bit(mode, dtype, number):
    for family in ("normal", "cauchy", "denormal", "neighbours", "largest"):
        values = families(dtype, 300)[family].astype(dtype)
        _, decoded, rejected = coded(values, number, 64)
        assert np.isfinite(decoded).all()
        np.testing.assert_array_equal(decoded.astype(np.longdouble) + rejected, values)


@pytest.mark.parametrize("number", BITS)
def test_short_few_bits_are_float16_numbers(mode, number):
    for family in ("normal", "cauchy", "denormal", "largest", "one far off", "zeros"):
        values = families(np.float16, 300)[family].astype(np.float16).astype(np.float32)
        _, decoded, rejected = coded(values, number, 64, short=True)
        np.testing.assert_array_equal(decoded.astype(np.float16), decoded)
        np.testing.assert_allclose(
            decoded.astype(float) + rejected,
            values,
            rtol=0,
            atol=1e-6 * np.abs(values).max(),
        )


@pytest.mark.parametrize("number", BITS)
@NOT_FINITE
def test_a_block_that_is_not_finite_decodes_to_nothing_finite(mode, number, bad):
    values = np.ones(96, np.float32)
    values[40] = bad
    for own, others in (
        (values, ()),
        (np.ones(96, np.float32), [values]),
        (values, [np.ones(96, np.float32)]),
    ):
        with np.errstate(invalid="ignore"):
            _, decoded, rejected = coded(own, number, 32, others)
        assert not np.isfinite(decoded[32:64]).any()
        np.testing.assert_array_equal(rejected[32:64], own[32:64])
        assert np.isfinite(decoded[:32]).all()
        assert np.isfinite(decoded[64:]).all()
