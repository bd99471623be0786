"""The kernels of a device against the host's: on a GPU where there is one, else emulated, under every schedule."""

import argparse
import importlib
import random
from itertools import product

import comparisons
import kernels
import numpy as np
import pytest
from devices import real_cupy
from emulator import SCHEDULES, VARIABLE

from mpicomp.kernels.host.bits import FORMATS


@pytest.fixture
def device(cupy):
    return importlib.import_module("mpicomp.kernels.device")


# Hundreds of launches each: a run in which every launch draws its schedule sees
# nearly every kernel under all of them.
LONG = [
    comparisons.arithmetic,
    comparisons.entries_of_bins,
    comparisons.entries_of_many_bins,
    comparisons.entries_of_bins_in_long_shares,
    comparisons.largest_in_segments,
    comparisons.selections_by_a_grid,
    comparisons.top_k_of_hostile_data,
    comparisons.top_k_by_a_sample,
    comparisons.top_k_at_the_edges_of_tiles,
    comparisons.every_k,
    comparisons.every_k_by_a_grid,
    comparisons.fits,
    comparisons.largest_in_long_segments,
    comparisons.marks_of_many_tiles_a_block,
    comparisons.largest_of_sums_in_segments,
    comparisons.sums_and_the_largest_of_them,
    comparisons.sums_sampled,
    comparisons.few_bits,
    comparisons.few_bits_in_parts,
]
SHORT = [each for each in comparisons.ALL if each not in LONG]


def named(comparison):
    return comparison.__name__


def scheduled():
    """Yield the comparisons with each schedule, half of them marked slow: every other one, of each schedule too."""
    schedules = ["on the device"] if real_cupy() else SCHEDULES
    for place, (comparison, schedule) in enumerate(product(SHORT, schedules)):
        turn = place + place // len(schedules)
        is_slow = turn % 2 == 1 and not real_cupy()
        yield pytest.param(
            comparison,
            schedule,
            marks=pytest.mark.slow if is_slow else (),
            id=f"{named(comparison)}-{schedule}",
        )


@pytest.mark.parametrize(("comparison", "schedule"), scheduled())
def test_the_bits_are_those_of_the_host(
    cupy, device, monkeypatch, schedule, comparison
):
    monkeypatch.setenv(VARIABLE, schedule)
    comparison(device, cupy)


def drawn():
    """Yield the long comparisons with all formats, marked slow, and with one in turn."""
    for place, comparison in enumerate(LONG):
        name, slow = named(comparison), () if real_cupy() else pytest.mark.slow
        if slow and comparison is not comparisons.every_k_by_a_grid:
            some = [comparisons.DTYPES[place % 3]]
            yield pytest.param(comparison, some, id=f"{name}-some")
        yield pytest.param(comparison, comparisons.DTYPES, marks=slow, id=f"{name}-all")


@pytest.mark.parametrize(("comparison", "formats"), drawn())
def test_the_bits_are_those_of_the_host_in_many_launches(
    cupy, device, monkeypatch, comparison, formats
):
    monkeypatch.setattr(comparisons, "DTYPES", formats)
    launch, draw = device.compiling.launch, random.Random(len(formats))

    def launched(*args, **more):
        monkeypatch.setenv(VARIABLE, draw.choice(SCHEDULES))
        launch(*args, **more)

    for module in vars(device).values():
        if getattr(module, "launch", None) is launch:
            monkeypatch.setattr(module, "launch", launched)
    comparison(device, cupy)


def test_a_sample_serves_ordinary_data(cupy, device, monkeypatch):
    selections = []
    select = device.segments._select

    def selected(*args, **more):
        selections.append(args)
        return select(*args, **more)

    monkeypatch.setattr(device.segments, "_select", selected)
    values = np.random.default_rng(0).laplace(size=100_000).astype(np.float32)
    for k in (1, 100, 10_000):
        comparisons.compare(device, cupy, "largest", values, k)
    assert len(selections) == 3
    comparisons.compare(device, cupy, "largest", np.ones_like(values), k)
    assert len(selections) == 5, "one that misled is repeated"


def test_tiles_of_an_unaligned_segment_begin_at_a_multiple_of_16_bytes(cupy, device):
    whole = cupy.zeros(3 * 4096, np.float32)
    first = np.arange(8)
    for skipped in range(4):
        vector = device.segments.Vector.of(whole[skipped:])
        rows = vector, first, first + 4096, first * 0, np.dtype(np.int32)
        tiles = np.diff(device.segments.Candidates.of(*rows).tiles)
        is_aligned = (first + skipped) % 4 == 0
        assert tiles.tolist() == np.where(is_aligned, 1, 2).tolist()


def test_blocks_share_the_candidates_of_few_segments(device):
    form = FORMATS[np.dtype(np.float32)]
    jobs, words = device.segments._jobs(np.array([2 * 8192, 2 * 8192 + 1]), form)
    assert jobs.tolist() == [1, 3 * 4]
    assert words.tolist() == [0, 3 * 2049 + 2 * 3]
    jobs, words = device.segments._jobs(np.full(200, 40_000), form)
    assert jobs.max() == 1
    assert not words.any(), "counts would take more memory than candidates"


def test_the_names_are_those_of_the_host(device):
    host = importlib.import_module("mpicomp.kernels.host")
    of_the_host = {"add_largest", "change_writer", "digest", "encode_changes", "sides"}
    assert set(device.__all__) == set(host.__all__) - of_the_host
    assert all(hasattr(device, name) for name in device.__all__)


def test_errors_are_those_of_the_host(cupy, device):
    values = np.ones((4, 5), np.float32)
    values[2, 3] = np.nan
    with pytest.raises(
        ValueError, match=r"values\[2, 3\] is nan: expected finite values"
    ):
        device.raise_not_finite(cupy.asarray(values))
    device.raise_not_finite(cupy.asarray(values[:2]))
    with pytest.raises(ValueError, match="expected a contiguous one"):
        device.largest(cupy.asarray(values.reshape(-1))[::2], 1)


def test_the_benchmark_of_a_gpu_runs(cupy, monkeypatch):
    monkeypatch.setattr(
        kernels, "argpartition", lambda xp, values, k: xp.argsort(values)[-k:]
    )
    options = argparse.Namespace(device="gpu", length=30_000, repeats=1)
    rows = list(kernels.rows(options))
    assert {row["name"].split()[0] for row in rows} >= {
        "top_k",
        "merge",
        "accumulate",
        "scatter_add",
    }
    assert all(row["floor"] for row in rows if row["name"].startswith("top_k"))
