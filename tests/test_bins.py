"""AdaComp against its formula in NumPy: the same entries, values and errors, bit for bit."""

import re
from itertools import pairwise

import numpy as np
import pytest
from kernel_cases import families

from mpicomp import AdaComp, ErrorFeedback
from mpicomp.compressors.common import mean_and_largest
from mpicomp.compressors.segments import Segments
from mpicomp.kernels import host

DTYPES = pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
BINS = 1, 7, 50, 64, 65, 500, 16384


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
    scale = dense.dtype.type(mean_and_largest(largest)[0])
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
        for new in (values, np.roll(values, 3), -values, values / dtype(2)) if name != "infinite" else ():
            for bin_size in BINS:
                compressor = AdaComp(bin_size)
                vector = compressor.compress(values, gradient=new)
                assert_entries(vector, *adacomp(values, new, bin_size))
                assert compressor.report.threshold == (np.abs(vector.values[0]) if vector.nnz else 0)


@DTYPES
def test_segments_with_other_bins_are_selected_from_in_one_call(dtype, monkeypatch):
    rng, bounds, sizes = np.random.default_rng(1), [0, 0, 3, 1000, 5000, 5001, 9000], [50, 500, 50, 7, 50, 500]
    calls, kernel = [], host.entries_in_bins
    monkeypatch.setattr(host, "entries_in_bins", lambda *args, **more: calls.append(1) or kernel(*args, **more))
    segments = Segments([f"layer {i}" for i in range(6)], bounds, [AdaComp(size) for size in sizes])
    for cancels in False, True:
        residual, new = rng.standard_normal((2, bounds[-1])).astype(dtype)
        if cancels:
            residual[1000:5000] = -2 * new[1000:5000]
        parts, out = [new[first:end] for first, end in pairwise(bounds)], np.empty_like(new)
        vector = segments.compress_segments(out, bounds, summands=(residual, 1.0, parts))
        assert out.tobytes() == (residual + new).tobytes()
        each = [adacomp(out[a:b], new[a:b], size) for (a, b), size in zip(pairwise(bounds), sizes, strict=True)]
        positions = np.concatenate([found + first for (found, _), first in zip(each, bounds, strict=False)])
        assert_entries(vector, positions, np.concatenate([found for _, found in each]))
        alone = segments.compress(out, gradient=new)
        assert_entries(alone, vector.indices, vector.values)
    assert len(calls) == 2 * 7
    found = [compressor.report.achieved for compressor in segments.compressors.values()]
    assert found == [
        len(found) / max(1, end - first) for (found, _), (first, end) in zip(each, pairwise(bounds), strict=True)
    ]
    assert [compressor.bin_size for compressor in segments.compressors.values()] == sizes


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
    feedback, segments = ErrorFeedback(), Segments(["one", "two"], [0, 100, 300], [AdaComp(50), AdaComp(500)])
    with pytest.raises(ValueError, match=re.escape(f"in two: values[23] is {bad}")):
        feedback.compress(pair[1], segments, [0, 100, 300])
