"""AdaComp and aggregation-aware selection against their formulas in NumPy: the same entries and errors, bit for bit."""

import re
from itertools import pairwise

import numpy as np
import pytest
from kernel_cases import expected_top_k, families

from mpicomp import AdaComp, AggregationAware, ErrorFeedback, SparseVector
from mpicomp.compressors.aggregation_aware import METRICS
from mpicomp.compressors.selection import Selection
from mpicomp.correction import Correction
from mpicomp.kernels import host
from mpicomp.kernels.host import bins

DTYPES = pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
BINS = 1, 7, 50, 64, 65, 500, 16384


def mean_of(magnitudes):
    """Return the mean, in range also if the sum is not, added in the order of the kernels."""
    count = max(1, magnitudes.size)
    sums = host.sides(magnitudes, np.inf)
    mean = sums.sum_below / count
    if not np.isfinite(mean):
        mean = host.sides(magnitudes / count, np.inf).sum_below
    return min(mean, sums.largest)


def adacomp(dense, new, size):
    """Return the positions and values that AdaComp selects."""
    bins = -(-dense.size // size)
    padded = np.zeros(bins * size)
    padded[: dense.size] = np.abs(dense)
    largest = padded.reshape(bins, size).max(axis=1)
    with np.errstate(over="ignore"):
        padded[: dense.size] = np.abs(dense.astype(np.float64) + new)
    chosen = (padded.reshape(bins, size) >= largest[:, None]).reshape(-1)[: dense.size]
    positions = np.flatnonzero(chosen & (dense != 0))
    if not positions.size:
        positions, _ = host.largest(dense, 1)
    scale = dense.dtype.type(mean_of(largest))
    if positions.size and not scale:
        scale = np.finfo(dense.dtype).smallest_subnormal
    return positions, np.copysign(scale, dense[positions])


def assert_entries(vector, positions, values):
    assert vector.indices.tolist() == positions.tolist()
    assert vector.values.tobytes() == values.tobytes()


@DTYPES
@pytest.mark.parametrize("size", [0, 1, 50, 51, 64, 130, 3000, 17_000])
def test_adacomp_selects_as_its_formula(dtype, size):
    for name, drawn in families(dtype, max(size, 18)).items():
        values = drawn[:size].astype(dtype)
        if name == "infinite":
            continue
        gradients = values, np.roll(values, 3), -values, values / dtype(2)
        for place, bin_size in enumerate(BINS):
            for new in gradients[place % 2 :: 2]:
                compressor = AdaComp(bin_size)
                vector = compressor.compress(values, gradient=new)
                assert_entries(vector, *adacomp(values, new, bin_size))


@DTYPES
def test_segments_with_other_bins_are_selected_from_in_one_call(dtype, monkeypatch):
    rng, bounds, sizes = (
        np.random.default_rng(1),
        [0, 0, 3, 1000, 5000, 5001, 9000],
        [50, 500, 50, 7, 50, 500],
    )
    calls, kernel = [], host.entries_in_bins
    monkeypatch.setattr(
        host,
        "entries_in_bins",
        lambda *args, **more: calls.append(1) or kernel(*args, **more),
    )
    segments = Selection(
        [f"layer {i}" for i in range(6)], bounds, [AdaComp(size) for size in sizes]
    )
    for cancels in False, True:
        residual, new = rng.standard_normal((2, bounds[-1])).astype(dtype)
        if cancels:
            residual[1000:5000] = -2 * new[1000:5000]
        parts, out = (
            [new[first:end] for first, end in pairwise(bounds)],
            np.empty_like(new),
        )
        vector = segments.select(Correction(parts, out, residual, shows_gradient=True))
        assert out.tobytes() == (residual + new).tobytes()
        each = [
            adacomp(out[a:b], new[a:b], size)
            for (a, b), size in zip(pairwise(bounds), sizes, strict=True)
        ]
        positions = np.concatenate(
            [found + first for (found, _), first in zip(each, bounds, strict=False)]
        )
        assert_entries(vector, positions, np.concatenate([found for _, found in each]))
        alone = segments.select(Correction(parts, out, shows_gradient=True))
        assert_entries(alone, vector.indices, vector.values)
    assert len(calls) == 2 * 2
    ((compressor, *_),) = segments.runs
    assert compressor.bin_size.tolist() == sizes


def test_more_entries_than_a_buffer_has_room_for(monkeypatch):
    monkeypatch.setattr(bins, "_ROOM", 1)
    values = np.arange(1, 200_001, dtype=np.float32)
    assert_entries(
        AdaComp(1).compress(values, gradient=values), *adacomp(values, values, 1)
    )


@DTYPES
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_adacomp_names_the_first_value_that_is_not_finite(dtype, bad):
    values = np.arange(1, 301).astype(dtype)
    for new, dense, place in ((1, 0, 123), (0, 1, 123), (1, 1, 123)):
        pair = [values.copy(), values.copy()]
        pair[0][[123, 200]] = bad if dense else values[[123, 200]]
        pair[1][[123, 200]] = bad if new else values[[123, 200]]
        with pytest.raises(ValueError, match=re.escape(f"values[{place}] is {bad}")):
            AdaComp(50).compress(pair[0], gradient=pair[1])
    feedback, segments = (
        ErrorFeedback(),
        Selection(["one", "two"], [0, 100, 300], [AdaComp(50), AdaComp(500)]),
    )
    with pytest.raises(ValueError, match=re.escape(f"in two: values[23] is {bad}")):
        segments.select(feedback.correct(*np.split(pair[1], [100])))


def preferred(compressor, dense, bonus, k):
    """Return the positions of the k largest scores of all positions, each of which has a bonus."""
    scores = np.abs(dense).astype(bonus.dtype)
    if compressor.metric == "quota":
        most = k if compressor.quota == 1 else min(round(compressor.quota * k), k - 1)
        inside = expected_top_k(np.where(bonus > 0, scores, 0), most)
        scores[inside] = 0
        return np.sort(
            np.concatenate([inside, expected_top_k(scores, k - inside.size)])
        )
    return expected_top_k(
        scores * (1 + compressor.weight * bonus).astype(bonus.dtype), k
    )


def bonus_after(bonus, aggregate):
    """Return the bonus of each position after an aggregate."""
    after = np.zeros_like(bonus)
    after[aggregate.indices[aggregate.values != 0]] = 1
    return after


@DTYPES
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"weight": 0.0, "quota": 0.0},
        {"weight": 7, "quota": 1},
    ],
)
def test_aggregation_aware_selection_is_that_of_all_scores(dtype, metric, more):
    sizes, rng = [1, 60, 0, 3000, 17_000], np.random.default_rng(3)
    bounds = np.cumsum([0, *sizes]).tolist()
    for k in 1, 7, 400:
        segments = Selection(
            sizes, bounds, [AggregationAware(k=k, metric=metric, **more) for _ in sizes]
        )
        bonus = [np.zeros(size, np.promote_types(dtype, np.float32)) for size in sizes]
        for drawn in map(
            families(dtype, bounds[-1]).get,
            ("normal", "quantised", "denormal", "one non-zero", "cauchy"),
        ):
            dense, out = drawn.astype(dtype), np.empty(bounds[-1], dtype)
            parts = [dense[first:end] for first, end in pairwise(bounds)]
            sent = segments.select(Correction(parts, out, np.zeros_like(dense)))
            each = [
                preferred(segments.runs[0].compressor, new, old, k)
                for new, old in zip(parts, bonus, strict=True)
            ]
            positions = np.concatenate(
                [found + first for found, first in zip(each, bounds, strict=False)]
            ).astype(int)
            assert_entries(sent, positions, dense[positions])
            indices = np.sort(rng.choice(bounds[-1], 900, replace=False))
            values = np.where(rng.random(900) < 0.3, 0, dense[indices])
            segments.observe(SparseVector(indices, values.astype(dtype), bounds[-1]))
            for row, (size, (first, end)) in enumerate(
                zip(sizes, pairwise(bounds), strict=True)
            ):
                here = (indices >= first) & (indices < end)
                part = SparseVector(
                    indices[here] - first, values[here].astype(dtype), size
                )
                bonus[row] = bonus_after(bonus[row], part)
