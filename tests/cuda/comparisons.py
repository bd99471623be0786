"""Every kernel of a device against the host's, to the last bit: functions that take the device's kernels and CuPy."""

from contextlib import contextmanager
from inspect import isfunction, signature
from itertools import pairwise, product

import numpy as np
from kernel_cases import draw_sparse, families, magnitude_keys, plans_of

from mpicomp.codec import values as value_formats
from mpicomp.few_bits import first_blocks
from mpicomp.kernels import Summands, host
from mpicomp.kernels.host import few_bits as host_few_bits

DTYPES = [np.dtype(dtype) for dtype in (np.float16, np.float32, np.float64)]
INDEX_DTYPES = [np.dtype(dtype) for dtype in (np.int32, np.int64)]
TILES = {2: 4096, 4: 4096, 8: 2048}  # values that a block of the selection takes


def there(cupy, value):
    """Return arguments of the host as arguments of the device: arrays in CuPy's memory."""
    if isinstance(value, np.ndarray):
        return cupy.asarray(value)
    return [there(cupy, each) for each in value] if isinstance(value, list) else value


def here(value):
    """Return results of the device in host memory."""
    if isinstance(value, tuple):
        return tuple(here(each) for each in value)
    return value.get() if hasattr(value, "get") else value


def assert_same(ours, expected):
    """Fail unless two results have the same bits, but for those of a NaN, which depend on the processor."""
    if isinstance(expected, tuple):
        for one, other in zip(ours, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, np.ndarray):
        assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
        assert without_nan(ours).tobytes() == without_nan(expected).tobytes()
    else:
        assert (
            np.float64(ours).tobytes() == np.float64(expected).tobytes()
            or ours == expected
        )


def without_nan(array):
    """Return an array in which every NaN has the same bits."""
    if array.dtype.kind != "f":
        return array
    return np.where(np.isnan(array), array.dtype.type(np.nan), array)


def compare(device, cupy, name, *args):
    """Call a kernel of both places, and fail unless the results are the same."""
    expected = getattr(host, name)(*args)
    assert_same(here(getattr(device, name)(*there(cupy, list(args)))), expected)


def compare_in_place(device, cupy, name, *args, written):
    """Call a kernel that writes to its arguments `written`; fail unless they, and the results, are the same."""
    sent = there(cupy, list(args))
    ours, args = (
        getattr(device, name)(*sent),
        [np.copy(arg) if isinstance(arg, np.ndarray) else arg for arg in args],
    )
    assert_same(ours, getattr(host, name)(*args))
    for i in written:
        assert_same(sent[i].get(), args[i])


def top_k_at_the_edges_of_tiles(device, cupy):
    rng = np.random.default_rng(0)
    for dtype in DTYPES:
        tile = TILES[dtype.itemsize]
        for size in (0, 1, 31, 32, 33, tile - 1, tile, tile + 1, 2 * tile + 77):
            values = np.round(9 * rng.standard_normal(size)).astype(dtype)
            for k in (
                {1, size // 9 + 1, max(1, size), 10**6}
                if size < tile
                else {2, size // 9}
            ):
                with by_a_grid(device):
                    compare(device, cupy, "largest", values, k)


def top_k_of_hostile_data(device, cupy):
    for dtype in DTYPES:
        for values in families(dtype).values():
            for k in (1, 37, 3000):
                compare(device, cupy, "largest", values.astype(dtype), k)


def top_k_of_several_blocks(device, cupy):
    values = np.random.default_rng(5).standard_normal(3 * 4096 + 5).astype(np.float32)
    for k in (1, 70, 5000):
        with by_a_grid(device):
            compare(device, cupy, "largest", values, k)


def marks_of_many_tiles_a_block(device, cupy):
    """Blocks compact more marks than they have threads for at once, the last one fewer tiles than the others."""
    values = np.random.default_rng(6).standard_normal(69 * 2048 - 5)
    for k in (40, 9000):
        with rows_only(device):
            compare(device, cupy, "largest", values, k)


def top_k_of_few(device, cupy):
    for dtype in DTYPES:
        tile = 4 * TILES[dtype.itemsize]  # of a block of 1024 threads
        for size, k in ((700, 30), (tile, 9), (2 * tile + 77, 300), (tile + 1, tile)):
            values = np.round(
                9 * np.random.default_rng(size).standard_normal(size)
            ).astype(dtype)
            compare(device, cupy, "largest", values, k)


@contextmanager
def by_a_grid(device):
    """Let no vector be so short that one block of threads selects from it."""
    segments = device.segments
    before = segments._FEW, segments._LONG
    segments._FEW = -1
    segments._LONG = -1
    try:
        yield
    finally:
        segments._FEW, segments._LONG = before


def top_k_by_a_sample(device, cupy):
    for dtype in DTYPES:
        drawn = families(np.float16, 66_001)
        some = drawn if dtype == np.float32 else ("normal", "all equal")
        for family in some:
            compare(device, cupy, "largest", drawn[family].astype(dtype), 66)
    with by_a_grid(device):
        compare(device, cupy, "largest", drawn["cauchy"].astype(dtype), 6600)
        compare(device, cupy, "largest", drawn["all equal"], 66)
    compare(device, cupy, "largest", drawn["laplace"], 66_000)


def floors_from_a_sample(device, cupy):
    for size in (1 << 16, 100_003):
        starts = np.arange((1 << 14) + 1) * size >> 14
        hashed = np.arange(1, (1 << 14) + 1, dtype=np.uint32) * np.uint32(0x9E3779B9)
        hashed = (hashed ^ hashed >> np.uint32(16)) * np.uint32(0x85EBCA6B)
        places = starts[:-1] + (hashed * np.diff(starts) >> 32)
        for dtype in DTYPES:
            values = np.random.default_rng(size).standard_normal(size).astype(dtype)
            keys, width = magnitude_keys(values)
            sample = keys[places]
            sent = cupy.asarray(values).view(keys.dtype)
            floors = cupy.zeros(4, np.uint64)
            ranks = 1, 40, 9000, 0
            rows = [[0, size, 0, 0, 0, rank, 0, 0] for rank in ranks]
            device.compiling.launch(
                "sample_floors",
                [keys.dtype],
                4,
                sent,
                0,
                cupy.asarray(np.array(rows)),
                (1 << width) - 1,
                width,
                floors,
                threads=1024,
            )
            *found, last = floors.get().tolist()
            assert last == 1
            for floor, rank in zip(found, ranks, strict=False):
                of_rank = np.sort(sample)[-rank]
                assert floor <= of_rank
                assert (sample >= floor).sum() == (sample >= of_rank).sum()


def largest_in_segments(device, cupy):
    for dtype in DTYPES:
        tile = TILES[dtype.itemsize]
        cases = (
            (1, 1, 1, 30),
            (3, 50, 1, 170),
            (9, 1009, 5, 2500),
            (64, tile, 9, 2 * tile),
            (70, tile + 5, 3, 2 * tile),
        )
        for k, chunk, last, size in cases:
            for family in ("quantised", "infinite"):
                values = families(dtype, size)[family].astype(dtype)
                select(device, cupy, values, [0, size], [k], [chunk], [last])
        for family in ("one non-zero", "negative zeros"):  # chunks with fewer entries
            values = families(dtype, 300)[family].astype(dtype)
            select(device, cupy, values, [0, 300], [50], [50], [1])
        select(device, cupy, values[:0], [0, 0], [3], [50], [1])
        bounds = [0, 0, 40, 300]
        select(device, cupy, values, bounds, [1, 9, 5], [1, 40, 64], [1, 9, 2])
        select(device, cupy, values[1:], [0, 299], [3], [64], [3])


def largest_in_long_segments(device, cupy):
    """By thresholds from samples that serve and that mislead, by one block and by several."""
    sizes = [20_000, 0, 300, 9000, 1, 17_000]
    bounds = [0, *np.cumsum(sizes).tolist()]
    for dtype in DTYPES:
        drawn = families(dtype, bounds[-1])
        some = "laplace", "quantised", "one non-zero", "infinite"
        for family in some if dtype == np.float32 else some[1:2]:
            values = drawn[family].astype(dtype)
            for chunk in ([max(1, size) for size in sizes], [7000] * 6):
                rest = [300, 1, 5, 4000, 1, 20], chunk, [9] * 6
                with rows_only(device):
                    select(device, cupy, values, bounds, *rest)
                with by_a_grid(device):
                    select(device, cupy, values, bounds, *rest)


def largest_of_sums_in_segments(device, cupy):
    sizes = [9000, 0, 300, 4099]
    bounds = [0, *np.cumsum(sizes).tolist()]
    k = np.minimum([40, 1, 9, 70], sizes)
    for dtype in DTYPES:
        drawn = families(dtype, bounds[-1])
        for family, scale in product(("laplace", "denormal"), (1.0, 0.7)):
            a = drawn[family].astype(dtype)
            parts = [a[::-1][first:end] / 3 for first, end in pairwise(bounds)]
            for chunk in (np.maximum(sizes, 1), [4200] * 4):
                args = a * 0, bounds, k, chunk, [1, 1, 9, 70]
                select(device, cupy, *args, summands=Summands(a, scale, parts))
                with rows_only(device):
                    select(device, cupy, *args, summands=Summands(a, scale, parts))


def select(device, cupy, values, bounds, k, chunk, last, *, summands=None):
    """Compare a selection, what is known of it, and the sum that it writes."""
    dense = values.copy()
    sent = cupy.asarray(values)
    given = summands
    if summands is not None:
        a, scale, parts, _ = summands
        given = Summands(cupy.asarray(a), scale, there(cupy, parts))
    rows = bounds, k, chunk, last
    expected = host.largest_in_segments(dense, *rows, summands=summands)
    ours = device.largest_in_segments(sent, *rows, summands=given)
    assert_same_entries(ours, expected, values.size)
    assert_same(sent.get(), dense)


def assert_same_entries(ours, expected, length):
    """Fail unless two selections have the same entries, and what the device knows of them is right."""
    assert_same(here(ours[:2]), expected[:2])
    assert ours.places == expected.places
    disorder, not_finite, *ends = host.inspect(*expected[:2], length)
    if ours.facts is not None:
        known = ours.facts[0], ours.facts[1] >= 0, *ours.facts[2:]
        assert known == (disorder, not_finite >= 0, *ends)


@contextmanager
def rows_only(device):
    """Let no chunk be so short that a block selects from it without a threshold, and a block mark several tiles."""
    segments = device.segments
    before = segments._LONG, segments.MOST_BLOCKS
    segments._LONG = -1
    segments.MOST_BLOCKS = 2
    try:
        yield
    finally:
        segments._LONG, segments.MOST_BLOCKS = before


def entries_of_bins(device, cupy):
    for dtype, (bounds, bins) in product(
        DTYPES, (([0, 0], [9]), ([0, 7, 7, 300, 2900], [7, 5, 50, 500]))
    ):
        for family, drawn in families(dtype, 3000).items():
            values = drawn[: bounds[-1]].astype(dtype)
            for new in (
                (np.roll(values, 3), values / 2) if np.isfinite(values).all() else ()
            ):
                parts = [
                    new[first:end].astype(dtype) for first, end in pairwise(bounds)
                ]
                for summand in (None, (values[::-1].copy() / 4, 0.5)):
                    if summand is not None and family == "largest":
                        continue
                    in_bins(device, cupy, values, parts, bounds, bins, summand)


def entries_of_many_bins(device, cupy):
    """Of several tiles of maxima; of some nothing is selected but the largest; a sum in range, and out of it."""
    tile = device.statistics.SUM_TILE
    bounds = [0, tile + 9, tile + 9, tile + 20, 2 * tile + 30]
    drawn = np.random.default_rng(8).uniform(1, 2, bounds[-1])
    for dtype in DTYPES[1:]:
        top = 1 if dtype == np.float32 else 1e305
        values = (drawn * top).astype(dtype)
        for share in (1, -0.5):
            parts = [values[first:end] * share for first, end in pairwise(bounds)]
            parts[-1] = np.abs(parts[-1])
            in_bins(device, cupy, values, parts, bounds, [1, 1, 2, 1])


def entries_of_bins_in_long_shares(device, cupy):
    """Bins of all numbers of words that a warp holds, segments within its share; ties, zeros, sums out of range."""
    lengths = [1, 32, 33, 50, 64, 65, 128, 129, 256, 257, 513, 1100]
    sizes = [size * (40 if size <= 64 else 5) + size // 3 for size in lengths]
    bounds = np.append(0, np.cumsum(sizes)).tolist()
    most, device.bins.MOST_BLOCKS = device.bins.MOST_BLOCKS, 1
    try:
        for dtype in DTYPES:
            rng = np.random.default_rng(8)
            few = rng.integers(-3, 4, (2, bounds[-1])).astype(dtype)
            few[0, 900:1300] = 0
            # float32 rounds the sum to the value, and float64 does not
            little = few[0], np.sign(rng.uniform(-1, 1, bounds[-1])) * 2.0**-24
            many = rng.standard_normal((2, bounds[-1])).astype(dtype)
            beyond = np.full_like(many, np.finfo(dtype).max)
            for values, new in beyond, few, little, many:
                parts = [
                    new[first:end].astype(dtype) for first, end in pairwise(bounds)
                ]
                in_bins(device, cupy, values, parts, bounds, lengths)
            in_bins(device, cupy, values, parts, bounds, lengths, (few[0], 0.5))
    finally:
        device.bins.MOST_BLOCKS = most


def in_bins(device, cupy, values, parts, bounds, bins, summand=None):
    out, sent = values.copy(), cupy.asarray(values)
    residual, decay = summand or (None, 1.0)
    rows = bounds, bins
    ours = device.entries_in_bins(
        sent,
        there(cupy, parts),
        *rows,
        residual=None if residual is None else cupy.asarray(residual),
        decay=decay,
    )
    expected = host.entries_in_bins(out, parts, *rows, residual=residual, decay=decay)
    assert_same_entries(ours, expected, out.size)
    assert_same(sent.get(), out)


def magnitudes_in_segments(device, cupy):
    """Of no tile, of one, of several, and of some that no value exceeds or whose sum is out of range."""
    bounds = [0, 1, 1, 300, 20_000, 56_000]
    for dtype in DTYPES:
        values = np.random.default_rng(4).standard_normal(bounds[-1]).astype(dtype)
        for two in (False, True):
            of_magnitudes(device, cupy, values, bounds, two=two)


def magnitudes_of_many_tiles(device, cupy):
    """Segments of 20, 1 and 2 tiles, and empty ones; some without a value above the mean."""
    tile = device.statistics.SUM_TILE
    sizes = [20 * tile - 7, 0, 300, 2 * tile, 0, tile, tile + 1, 0]
    bounds = [0, *np.cumsum(sizes).tolist()]
    values = np.random.default_rng(7).standard_cauchy(bounds[-1]).astype(np.float32)
    values[bounds[5] : bounds[6]] = -3
    values[bounds[6] :] = 0.1
    of_magnitudes(device, cupy, values, bounds, two=True)
    wide = values.astype(np.float64)
    wide[bounds[3] : bounds[4]] = 1e305  # the sum of these is out of range
    of_magnitudes(device, cupy, wide, bounds, two=True)
    of_magnitudes(device, cupy, wide[:0], [0, 0, 0], two=True)


def of_magnitudes(device, cupy, values, bounds, *, two):
    given = cupy.asarray(values)
    signed, levels = device.with_magnitudes(given, bounds, two=two)
    expected, rows = host.with_magnitudes(values, bounds, two=two)
    assert_same(levels, rows)
    is_finite = np.repeat(np.isfinite(rows).all(axis=1), np.diff(bounds))
    assert_same(signed.get()[is_finite], expected[is_finite])


def scaled_sums(device, cupy):
    for dtype in DTYPES:
        a, b = np.random.default_rng(5).standard_normal((2, 1000)).astype(dtype)
        for scale in 1, 0.3:
            compare_in_place(
                device,
                cupy,
                "add_parts",
                a,
                scale,
                [b[:0], b[:7], b[7:]],
                np.empty_like(a),
                written=[3],
            )
        ours, expected = cupy.empty(a.size, dtype), np.empty_like(a)
        device.add_parts(cupy.asarray(a), 1, [cupy.asarray(b)], ours, sign=-1)
        host.add_parts(a, 1, [b], expected, sign=-1)
        assert_same(ours.get(), expected)


def arithmetic(device, cupy):
    """Also of dtypes that differ, and of numbers that CuPy's operators flush to zero."""
    for kinds in product(DTYPES, DTYPES, DTYPES):
        for family in ("normal", "denormal"):
            a, b, out = (families(kind)[family].astype(kind) for kind in kinds)
            b = np.where(b == 0, b.dtype.type(1), b)[::-1].copy()
            for factor in (1, -1, 0.7):
                for sign in (1, -1):
                    host.add_scaled(a, factor, b, out, sign=sign)
                    ours = cupy.empty(out.size, out.dtype)
                    device.add_scaled(*there(cupy, [a, factor, b]), ours, sign=sign)
                    assert_same(ours.get(), out)
                for name in ("multiply", "quotient"):
                    compare_in_place(device, cupy, name, a, factor, out, written=[2])
            compare_in_place(device, cupy, "quotient", a, b, out, written=[2])


def arithmetic_in_place(device, cupy):
    """The output is one of the operands."""
    for dtype in DTYPES:
        a, b = (families(dtype)[name].astype(dtype) for name in ("normal", "denormal"))
        for factor, sign in product((1, 0.3), (1, -1)):
            for written in (a, b):
                expected, ours = written.copy(), cupy.asarray(written)
                one, other = (
                    (ours, cupy.asarray(b)) if written is a else (cupy.asarray(a), ours)
                )
                device.add_scaled(one, factor, other, ours, sign=sign)
                one, other = (expected, b) if written is a else (a, expected)
                host.add_scaled(one, factor, other, expected, sign=sign)
                assert_same(ours.get(), expected)


def every_k(device, cupy):
    values = np.round(9 * np.random.default_rng(3).standard_normal(120)).astype(
        np.float32
    )
    for k in range(1, 122):
        compare(device, cupy, "largest", values, k)


def every_k_by_a_grid(device, cupy):
    with by_a_grid(device):
        every_k(device, cupy)


def not_finite_values(device, cupy):
    for dtype in DTYPES:
        for places in ([4242, 8999], [0], [8999], []):
            values = np.arange(9000).astype(dtype) / 8
            values[places] = [np.nan, -np.inf][: len(places)]
            sent = cupy.asarray(values)
            assert device.selection.first_not_finite(
                sent
            ) == host.selection.first_not_finite(values)
            compare(device, cupy, "largest", values, 3)
        assert device.selection.first_not_finite(sent[:0]) == -1
    for dtype, limit in ((np.uint16, 0x7F80), (np.uint32, 0x7FF00000)):
        scales = np.full(9001, limit - 1, dtype)
        scales[0] = 0
        for reaching in ([], [8999], [1]):
            scales[reaching] = limit
            # of a message: at an address that is a multiple of their bytes alone
            for first in (0, 1):
                sent = cupy.asarray(scales)[first:9000]
                expected = host.all_below(scales[first:9000], limit)
                assert device.all_below(sent, limit) == expected
                assert expected == (not reaching)
            scales[reaching] = 0
        assert device.all_below(sent[:0], limit)


def misaligned_values(device, cupy):
    for dtype in DTYPES:
        values = (
            np.random.default_rng(1)
            .standard_normal(2 * TILES[dtype.itemsize] + 9)
            .astype(dtype)
        )
        sent = cupy.asarray(values)[1:]
        assert_same(here(device.largest(sent, 100)), host.largest(values[1:], 100))


def selections_by_a_grid(device, cupy):
    for dtype in DTYPES:
        for family in ("normal", "quantised", "zeros", "infinite"):
            values = families(dtype, 5000)[family].astype(dtype)
            for k in (1, 300, 5001):
                with by_a_grid(device):
                    compare(device, cupy, "largest", values, k)


def excesses(device, cupy):
    """Of several tiles of a sample, and of candidates."""
    for dtype in DTYPES:
        bounds = [0, 70_000 if dtype == np.float32 else 20_000]
        values = families(dtype, bounds[-1])["laplace"].astype(dtype)
        how = {"distribution": "gamma", "by_count": True}
        fit(device, cupy, values, bounds, **how, plans=plans_of(bounds, 0.2, 3))


def fits_that_need_more_room(device, cupy):
    """One stage, by which five times as many exceed the threshold as are expected; with a sum."""
    bounds = [0, 50, 18_000]
    values = np.where(np.arange(bounds[-1]) % 10 == 3, 2, 0.3).astype(np.float32)
    parts = [values[first:end].copy() for first, end in pairwise(bounds)]
    plans = plans_of(bounds, 0.02, 1)
    given = Summands(np.zeros_like(values), 1.0, parts)
    how = {"distribution": "exponential", "by_count": True}
    fit(device, cupy, np.empty_like(values), bounds, given, **how, plans=plans)
    host.select_by_fits(values, bounds, plans, **how)
    assert plans["above"][1] > 2 * plans["wanted"][1] + 64


def fits(device, cupy):
    """Segments that differ, and are empty; with and without a sum, of samples that serve and that mislead."""
    bounds = [0, 0, 1, 900, 900, 18_000]
    for dtype in DTYPES:
        for family, distribution in (
            ("laplace", "exponential"),
            ("cauchy", "pareto"),
            ("normal", "gamma"),
            ("denormal", "gamma"),
            ("zeros", "exponential"),
            ("infinite", "gamma"),
        ):
            values = families(dtype, bounds[-1])[family].astype(dtype)
            fit(
                device,
                cupy,
                values,
                bounds,
                distribution=distribution,
                by_count=family != "laplace",
            )
            a = families(dtype, bounds[-1])["normal"].astype(dtype)
            parts = [values[first:end].copy() for first, end in pairwise(bounds)]
            if dtype != np.float16:
                fit(
                    device,
                    cupy,
                    np.empty_like(a),
                    bounds,
                    Summands(a, 0.5, parts),
                    distribution="gamma",
                    by_count=True,
                )
                fit(
                    device,
                    cupy,
                    np.empty_like(a),
                    [0, a.size],
                    Summands(a, 1.0, [values]),
                    distribution="exponential",
                    by_count=True,
                )


def fit(
    device, cupy, values, bounds, summands=None, *, distribution, by_count, plans=None
):
    if plans is None:
        plans = plans_of(bounds, 0.01, sample=1024)
    found = []
    results = []
    for kernels, to in ((host, np.array), (device, cupy.asarray)):
        own, dense = plans.copy(), to(values)
        given = summands and Summands(
            to(summands[0]),
            summands[1],
            [to(part) for part in summands[2]],
        )
        with np.errstate(all="ignore"):
            result = kernels.select_by_fits(
                dense,
                bounds,
                own,
                distribution=distribution,
                by_count=by_count,
                summands=given,
            )
        results.append(result)
        serves = (own["above"] <= own["room"]).all()
        found.append((here(dense), own if serves else own["above"]))
    assert_same(*found)
    if serves:
        assert_same_entries(*results[::-1], values.size)


def compare_merge(device, cupy, *args):
    """Compare a sum, and what the device says of it with what `inspect` returns."""
    with np.errstate(all="ignore"):
        indices, values, _ = host.merge(*args)
    *found, facts = device.merge(*there(cupy, list(args)))
    assert_same(here(tuple(found)), (indices, values))
    if facts is not None:
        expected = host.inspect(indices, values, int(indices[-1]) + 1)
        assert (facts[1] < 0) == (expected[1] < 0)
        assert (facts[0], *facts[2:]) == (expected[0], *expected[2:])


def merges(device, cupy):
    for dtype in DTYPES:
        for index_dtype in INDEX_DTYPES:
            for size_a, size_b in (
                (0, 0),
                (5, 0),
                (0, 5),
                (40, 60),
                (100, 100),
                (1023, 1025),
                (3000, 2048),
            ):
                rng = np.random.default_rng([size_a, size_b])
                a, b = (
                    draw_sparse(rng, size, 4000, index_dtype, (), dtype)
                    for size in (size_a, size_b)
                )
                compare_merge(device, cupy, *a, *b)
            compare_merge(device, cupy, a[0], a[1], a[0], a[1])
            huge = np.full(b[0].size, np.finfo(dtype).max, dtype)
            compare_merge(device, cupy, b[0], huge, b[0], huge)  # infinity
            run = np.arange(9000, 12_000).astype(index_dtype), np.ones(3000, dtype)
            compare_merge(device, cupy, *run, *a)
            compare_merge(device, cupy, *a, *run)
            rows = [
                draw_sparse(rng, size, 90, index_dtype, (3,), dtype)
                for size in (40, 60)
            ]
            compare_merge(device, cupy, *rows[0], *rows[1])


def sums_of_many(device, cupy):
    for dtype in DTYPES:
        for index_dtype in INDEX_DTYPES:
            for parts, shape in ((1, ()), (2, ()), (9, ()), (5, (2,))):
                rng = np.random.default_rng(parts)
                drawn = [
                    draw_sparse(rng, min(150 * p, 700), 2000, index_dtype, shape, dtype)
                    for p in range(parts)
                ]
                indices, values = ([pair[i] for pair in drawn] for i in (0, 1))
                compare(device, cupy, "accumulate", indices, values, 2000)
    indices = [
        np.array(each, np.int64) for each in ([0, 7, 2**63 - 2], [7], [1, 2**63 - 2])
    ]
    values = [np.array(each, np.float32) for each in ([-0.0, 3, -0.0], [-3], [0, -0.0])]
    compare(device, cupy, "accumulate", indices, values, 2**63 - 1)
    compare_merge(device, cupy, indices[0], values[0], indices[2], values[2])


def sums_that_round(device, cupy):
    """Halves of all magnitudes: subnormal, at ties, and beyond the largest."""
    halves = np.arange(1 << 16).astype(np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    indices = np.arange(halves.size)
    for step in (1, 997, 20_011):
        compare_merge(device, cupy, indices, halves, indices, np.roll(halves, step))
        with np.errstate(over="ignore"):
            compare_in_place(
                device,
                cupy,
                "add",
                halves,
                np.roll(halves, step),
                halves * 0,
                written=[2],
            )
    subnormal = np.arange(1, 300, dtype=np.uint32).view(np.float32)
    compare_in_place(
        device,
        cupy,
        "add",
        subnormal,
        subnormal[::-1].copy(),
        subnormal * 0,
        written=[2],
    )
    dense, doubles = (
        halves.copy(),
        np.ldexp(
            np.random.default_rng(0).uniform(-1, 1, halves.size), indices % 50 - 30
        ),
    )
    compare_in_place(device, cupy, "scatter_add", dense, indices, doubles, written=[0])
    compare_in_place(
        device,
        cupy,
        "scatter_add",
        dense * 0,
        indices,
        doubles.astype(np.float32),
        written=[0],
    )


def parts(device, cupy):
    for dtype in DTYPES:
        for index_dtype in INDEX_DTYPES:
            for shape in ((), (3,)):
                indices, values = draw_sparse(
                    np.random.default_rng(2), 700, 3000, index_dtype, shape, dtype
                )
                for positions in (
                    np.arange(0),
                    np.arange(3, 700, 7),
                    np.array([0, 255, 256, 699]),
                    np.arange(700),
                ):
                    compare(device, cupy, "divide", indices, values, positions)
                compare(device, cupy, "divide", indices[:0], values[:0], np.arange(0))
                if not shape:
                    for k in 1, 350, 699:
                        compare(device, cupy, "divide_largest", indices, values, k)


def dense_and_sparse(device, cupy):
    for dtype in DTYPES:
        for index_dtype in INDEX_DTYPES:
            for values_dtype in DTYPES:
                rng = np.random.default_rng(1)
                indices, values = draw_sparse(
                    rng, 300, 500, index_dtype, (), values_dtype
                )
                dense = rng.standard_normal(500).astype(dtype)
                compare(device, cupy, "gather", dense, indices)
                kind = np.promote_types(dtype, np.float32)
                bonus = (indices % 3 == 0).astype(kind)
                given = dense, indices, bonus, kind.type(1.7)
                compare(device, cupy, "gather_scores", *given)
                compare_in_place(
                    device, cupy, "scatter_add", dense, indices, values, written=[0]
                )
            compare_in_place(
                device, cupy, "add", dense, dense[::-1].copy(), dense * 0, written=[2]
            )
            compare(device, cupy, "gather", dense, indices[:0])


def inspections(device, cupy):
    for dtype in INDEX_DTYPES:
        for indices in (
            [],
            [0, 4, 9],
            [-1, 4],
            [0, 10],
            [0, 3, 3],
            [5, 4],
            [0, 2**31 - 1, 1],
        ):
            compare(device, cupy, "first_disorder", np.array(indices, dtype), 10)
        for values_dtype in DTYPES:
            long, values = (
                np.arange(2000).astype(dtype),
                np.ones((2000, 2), values_dtype),
            )
            compare(device, cupy, "inspect", long, values, 2000)
            long[[1500, 900]] = 3
            values[[1700, 30], 1] = np.nan, -np.inf
            compare(device, cupy, "inspect", long, values, 2000)
            compare(device, cupy, "inspect", long[:0], values[:0], 2000)


def bitmaps(device, cupy):
    for index_dtype in INDEX_DTYPES:
        for span, share in [
            *product((1, 63, 64, 65, 1000, 70_000), (0, 0.05, 0.9, 1)),
            (400_000, 0.01),
        ]:
            places = np.flatnonzero(np.random.default_rng(span).random(span) < share)
            indices, words = (
                (places + 77).astype(index_dtype),
                np.zeros(-(-span // 64), np.uint64),
            )
            compare_in_place(device, cupy, "to_bitmap", indices, 77, words, written=[2])
            host.to_bitmap(indices, 77, words)
            for room in {indices.size, indices.size // 2}:
                out = np.zeros(room, index_dtype)
                compare_in_place(
                    device, cupy, "from_bitmap", words, 77, out, written=[2]
                )
    assert device.from_bitmap(cupy.zeros(0, np.uint64), 0, cupy.zeros(0, np.int64)) == 0


def elias_fano(device, cupy):
    for index_dtype in INDEX_DTYPES:
        for low_bits, step, size in (
            (0, 1, 70),
            (1, 3, 700),
            (9, 1000, 700),
            (31, 2**33, 70),
        ):
            indices = 5 + np.cumsum(
                np.random.default_rng(step).integers(1, step + 1, size)
            )
            if indices[-1] > np.iinfo(index_dtype).max:
                continue
            indices = indices.astype(index_dtype)
            lows = np.zeros(size * low_bits // 64 + 2, np.uint64)
            highs = np.zeros(
                (size + (int(indices[-1]) >> low_bits)) // 64 + 1, np.uint64
            )
            compare_in_place(
                device,
                cupy,
                "to_elias_fano",
                indices,
                5,
                low_bits,
                lows,
                highs,
                written=[3, 4],
            )
            host.to_elias_fano(indices, 5, low_bits, lows, highs)
            for room in (size, size - 1):
                out = np.zeros(room, index_dtype)
                compare_in_place(
                    device,
                    cupy,
                    "from_elias_fano",
                    lows,
                    highs,
                    5,
                    low_bits,
                    out,
                    written=[4],
                )


def offsets(device, cupy):
    rng = np.random.default_rng(9)
    for dtype in DTYPES:
        for size in (1, 64, 700):
            for values in (
                1 + rng.random(size),
                rng.standard_normal(size),
                np.zeros(size),
            ):
                values = np.copysign(values, rng.standard_normal(size)).astype(dtype)
                compare(device, cupy, "magnitude_range", values)
                least, largest = host.magnitude_range(values)
                width = (largest - least).bit_length()
                planes = np.zeros(
                    value_formats.offsets(dtype, least, width).nbytes(size) - 16,
                    np.uint8,
                )
                compare_in_place(
                    device,
                    cupy,
                    "to_offsets",
                    values,
                    least,
                    width,
                    planes,
                    written=[3],
                )
                host.to_offsets(values, least, width, planes)
                compare_in_place(
                    device,
                    cupy,
                    "from_offsets",
                    planes,
                    least,
                    width,
                    np.zeros(size, dtype),
                    written=[3],
                )


def few_bits(device, cupy):
    for dtype, bits, block in product(DTYPES[1:], (8, 4, 2, 1), (32, 64, 256, 512)):
        rng = np.random.default_rng(block)
        for size, short in (
            (0, False),
            (1, False),
            (block, True),
            (9 * block + 7, False),
        ):
            for family in ("normal", "denormal", "largest", "negative zeros"):
                values = families(np.float16 if short else dtype, max(size, 18))[
                    family
                ][:size].astype(dtype)
                values[size // 2 :][:1] = np.inf if family == "negative zeros" else 1
                other = np.roll(values, 3) / 4 + rng.random(size).astype(dtype)
                compare_few_bits(device, cupy, values, other, bits, block, short)


def compare_few_bits(device, cupy, values, other, bits, block, short):
    """Compare the codes of values, and of sums of them; the errors replace the values."""
    blocks, stored, terms = (
        -(-values.size // block),
        np.dtype(f"u{values.itemsize // 2}"),
        [],
    )
    for own in (other.copy(), np.flip(other).copy(), values):
        codes, scales = (
            np.zeros(blocks * block * bits // 8, np.uint8),
            np.zeros(blocks * (1 + (bits == 2)), stored),
        )
        room, ours, sent = there(cupy, [[codes, scales], own, terms])
        device.encoder([ours], None, bits, block, ours, short=short)(*room, sent)
        host.encoder([own], None, bits, block, own, short=short)(codes, scales, terms)
        for found, expected in zip((*room, ours), (codes, scales, own), strict=True):
            assert_same(found.get(), expected)
        terms = [*terms, [codes, scales]]
    expected = np.ones_like(values)
    ours, sent = there(cupy, [expected, [codes, scales]])
    device.decoder([sent], bits, block, [ours])()
    host.decoder([(codes, scales)], bits, block, [expected])()
    assert_same(ours.get(), expected)


def few_bits_in_parts(device, cupy):
    """Segments in one launch: ranges of blocks, terms, factors; parts at any place of their memory."""
    sizes = 700, 0, 1, 33, 32, *[5] * 40, 1024, 257
    rng = np.random.default_rng(1)
    for dtype, bits, block in product(DTYPES[1:], (8, 4, 2, 1), (32, 256, 512)):
        parts, other = (
            [
                (10.0 ** rng.integers(-3, 3) * rng.standard_normal(size)).astype(dtype)
                for size in sizes
            ]
            for _ in range(2)
        )
        parts[0][:9] = np.nan
        parts[-1][3] = -np.inf
        blocks = first_blocks(sizes, block)[-1]
        residual = np.concatenate(other)
        terms = []
        for first, last in ((0, blocks), (1, 7), (2, blocks)):
            room = coded_room(dtype, bits, block, last - first)
            terms = terms[:1] if first else []
            factors = {"decay": 0.75}
            some = [
                [codes[: room[0].size], scales[: room[1].size]]
                for codes, scales in terms
            ]
            ours = misaligned(cupy, parts)
            given, sent = there(cupy, [[*room, residual], some])
            given[0] = cupy.asarray(np.append(np.uint8(0), room[0]))[1:]
            *coding, errors = given
            encode = device.encoder(ours, errors, bits, block, errors, **factors)
            encode(*coding, sent, (first, last))
            with np.errstate(all="ignore"):
                encode = host_few_bits.encoder(
                    parts, residual, bits, block, residual, **factors
                )
                encode(*room, some, (first, last))
            for found, expected in zip(given, (*room, residual), strict=True):
                assert_same(found.get(), expected)
            terms.append(room)
            decode_in_parts(device, cupy, room, bits, block, other, first)


def sparse_vectors_in_parts(device, cupy):
    """Parts at any place of their memory, some empty, and longer than what a block clears."""
    sizes = 700, 0, 1, 9000, *[5] * 40, 4096, 0
    for dtype, index in product(DTYPES, INDEX_DTYPES):
        for some in (sizes, sizes[:1], sizes[1:2]):
            rng, size = np.random.default_rng(3), sum(some)
            indices, values = draw_sparse(rng, size // 7, size, index, dtype=dtype)
            parts = [np.ones(size, dtype) for size in some]
            ours = misaligned(cupy, parts)
            sent = there(cupy, [indices, values])
            device.sparse_writer(*sent, ours)()
            host.sparse_writer(indices, values, parts)()
            for found, expected in zip(ours, parts, strict=True):
                assert_same(found.get(), expected)


def transforms_of_entries(device, cupy):
    sizes = 0, 100, 5000
    for dtype, size, is_sign in product(DTYPES[1:], sizes, (False, True)):
        rng = np.random.default_rng(size)
        indices, values = draw_sparse(rng, size // 9, size, np.int32, dtype=dtype)
        out = np.ones(size, dtype)
        sent = there(cupy, [indices, values, out])
        device.hadamard_writer(*sent, 256, is_sign=is_sign)()
        host.hadamard_writer(indices, values, out, 256, is_sign=is_sign)()
        assert_same(sent[2].get(), out)


def coded_room(dtype, bits, block, blocks):
    """Return codes and scales of that many blocks, filled with another pattern."""
    return [
        np.full(blocks * block * bits // 8, 85, np.uint8),
        np.full(blocks * (1 + (bits == 2)), 85, f"u{dtype.itemsize // 2}"),
    ]


def misaligned(cupy, parts):
    """Return parts at places of the device's memory that are multiples of a value's size only."""
    return [
        cupy.asarray(np.append(np.zeros(shift % 4, part.dtype), part))[shift % 4 :]
        for shift, part in enumerate(parts)
    ]


def decode_in_parts(device, cupy, room, bits, block, like, first):
    """Compare decoded values over divisors; the others' are left alone."""
    for divisor in (1, 2, 3, 127, 0.3, 1 << 20):
        expected = [np.full_like(part, 7) for part in like]
        ours, sent = misaligned(cupy, expected), there(cupy, room)
        decode = device.decoder([sent], bits, block, ours, divisor=divisor, first=first)
        decode()
        with np.errstate(all="ignore"):
            host_few_bits.decoder(
                [room], bits, block, expected, divisor=divisor, first=first
            )()
        for found, values in zip(ours, expected, strict=True):
            assert_same(found.get(), values)


def compare_fused(device, cupy, a, b, *, k):
    """Compare the sum, and what is found in it; the vectors may lie at any place of their memory."""
    with np.errstate(all="ignore"):
        for scale in (1.0, 0.7):
            ours, expected = cupy.asarray(a * 0 - 7), np.empty_like(a)
            sent = Summands(cupy.asarray(a), scale, [cupy.asarray(b)])
            rows = [0, a.size], [k], [a.size], [k]
            found = device.largest_in_segments(ours, *rows, summands=sent)
            given = Summands(a, scale, [b])
            same = host.largest_in_segments(expected, *rows, summands=given)
            assert_same_entries(found, same, a.size)
            assert_same(ours.get(), expected)


def sums_and_the_largest_of_them(device, cupy):
    for dtype in DTYPES:
        tile = TILES[dtype.itemsize]
        for size in (0, 1, 33, tile - 1, tile, tile + 1, 2 * tile + 77):
            a, b = np.random.default_rng(size).standard_normal((2, size)).astype(dtype)
            compare_fused(device, cupy, a, b, k=size // 9 + 1)
        for values in families(dtype).values():
            compare_fused(
                device,
                cupy,
                np.roll(values, 7).astype(dtype),
                values.astype(dtype),
                k=37,
            )
            compare_fused(
                device, cupy, values.astype(dtype), np.zeros_like(a, shape=3000), k=370
            )


def sums_sampled(device, cupy):
    drawn = families(np.float16, 66_001)
    for dtype in DTYPES:
        for family in (
            ("normal", "all equal", "sorted", "one non-zero")
            if dtype == np.float32
            else ("cauchy",)
        ):
            a, b = (
                drawn["laplace" if family == "normal" else "zeros"].astype(dtype),
                drawn[family].astype(dtype),
            )
            compare_fused(device, cupy, a, b, k=66)
            compare_fused(device, cupy, b, a, k=6600)
        compare_fused(device, cupy, a, b, k=66_000)


def misaligned_sums(device, cupy):
    for dtype in DTYPES:
        values = (
            np.random.default_rng(1)
            .standard_normal((2, 2 * TILES[dtype.itemsize] + 9))
            .astype(dtype)
        )
        for starts in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (3, 2, 1)):
            size = values.shape[1] - 3
            a, b, out = (
                cupy.asarray(each)[at : at + size]
                for each, at in zip((*values, values[0] * 0), starts, strict=True)
            )
            expected = a.get() + b.get()
            plans = [plans_of([0, size], 0.1, 2) for _ in range(2)]
            how = {"distribution": "pareto", "by_count": True}
            found = device.select_by_fits(
                out, [0, size], plans[0], **how, summands=Summands(a, 1.0, [b])
            )
            ours = host.select_by_fits(expected, [0, size], plans[1], **how)
            assert_same_entries(found, ours, size)
            assert_same(*plans)
            assert_same(out.get(), expected)


def cleared(device, cupy):
    for dtype in DTYPES:
        compare_in_place(
            device, cupy, "clear", np.full((3, 50), -1, dtype), written=[0]
        )


def hadamard_transforms(device, cupy):
    for dtype in DTYPES:
        for chunk in (1, 2, 8, 64, 256, 4096):
            for size in {
                0,
                1,
                chunk - 1,
                chunk,
                2 * chunk + 63,
                4095,
                4096 + chunk // 2 + 1,
                2 * 4096 + 100,
            }:
                values = np.random.default_rng(size).standard_normal(size).astype(dtype)
                compare_in_place(
                    device,
                    cupy,
                    "hadamard",
                    values,
                    np.zeros_like(values),
                    chunk,
                    written=[1],
                )
        for family, values in families(dtype).items():
            # the bits of a NaN are the processor's
            if family not in ("infinite", "largest"):
                values = values.astype(dtype)
                compare_in_place(
                    device,
                    cupy,
                    "hadamard",
                    values,
                    np.zeros_like(values),
                    32,
                    written=[1],
                )
        own, expected = cupy.asarray(values), np.empty_like(values)
        device.hadamard(own, own, 128)
        host.hadamard(values, expected, 128)
        assert_same(own.get(), expected)


def signs_of_values(device, cupy):
    for dtype in DTYPES:
        for values in families(dtype).values():
            compare_in_place(device, cupy, "signs", values.astype(dtype), written=[0])
        compare_in_place(device, cupy, "signs", np.zeros(0, dtype), written=[0])


ALL = [
    each
    for each in [*vars().values()]
    if isfunction(each) and [*signature(each).parameters] == ["device", "cupy"]
]
