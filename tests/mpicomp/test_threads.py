"""Kernels on several threads: the same bits on any number of them; how many there are, and what a fork leaves."""

import math
import os
import signal
import threading
import time
import warnings
from itertools import pairwise

import numpy as np
import pytest
from kernel_cases import families, plans_of
from strategies import DTYPES

from mpicomp import threads
from mpicomp.few_bits import BITS
from mpicomp.kernels import Summands, host
from mpicomp.kernels.host import selection

TILE = 1 << 14  # values in a block of `sides`, the longest step between pieces


@pytest.fixture
def short_pieces(monkeypatch):
    monkeypatch.setattr(threads, "_LEAST", 64)
    monkeypatch.setattr(selection, "_SAMPLE", 64)


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv(threads.VARIABLE, raising=False)
    monkeypatch.setattr(threads, "_ranks", 1)


def dense_calls(values, other, number):
    """Return what every kernel of dense vectors gives on so many threads, as bytes."""
    total = np.full(values.size + 3, 7, values.dtype)
    room, k, options = total[3:], values.size // 50 + 1, {"threads": number}
    with np.errstate(all="ignore"):
        yield host.largest(values, k, **options)
        yield host.largest(np.sign(values), k, **options)
        yield host.sides(values, 1.0, **options)
        yield host.largest_in_segments(
            values, [0, values.size], [3], [1000], [2], **options
        )
        bounds = [0, values.size // 9, values.size // 2, values.size]
        rows = [1, 99, 3], [9, values.size + 1, 70], [1, 99, 2]
        yield host.largest_in_segments(values, bounds, *rows, **options)
        parts = [other[first:end] for first, end in pairwise(bounds)]
        yield host.largest_in_segments(
            room, bounds, *rows, summands=Summands(values, 1.0, parts), **options
        )
        yield total.copy()
        plans = plans_of(bounds, 0.02)
        given = None
        if values.dtype != np.float16:
            given = Summands(values, 1.0, parts)
        yield host.select_by_fits(
            room,
            bounds,
            plans,
            distribution="pareto",
            by_count=True,
            summands=given,
            **options,
        )[:2]
        yield total.copy(), plans
        if np.isfinite(values).all():
            bins = bounds, [9, 70, 3]
            yield host.entries_in_bins(
                room, parts, *bins, residual=values, decay=0.3, **options
            )
            yield host.entries_in_bins(values, parts, *bins, **options)
            yield total.copy()
        yield host.add_parts(values, 0.3, parts, room, long=0, **options)
        yield total.copy()
        yield host.add(values, other, room, long=0, **options)
        yield total.copy()
        for chunk in 1, 128:
            given = {"chunk": chunk, "long": 0, **options}
            yield host.add_largest(values, other, room, k, **given)
            yield total.copy()
        yield selection.first_not_finite(values, number)
        for chunk in 16, 128:
            yield host.hadamard(values, room, chunk, **options)
            yield total.copy()
        yield host.signs(room, **options)
        yield total.copy()
    yield from few_bits_calls(values, other, number)


def few_bits_calls(values, other, number):
    """Return what the kernels of values in few bits give on so many threads."""
    values, other = (
        each.astype(np.promote_types(each.dtype, np.float32))
        for each in (values, other)
    )
    blocks = -(-values.size // 64)
    for each in BITS:
        codes, scales = (
            np.zeros(8 * each * blocks, np.uint8),
            np.zeros(2 * blocks, f"u{values.itemsize // 2}"),
        )
        scales = scales[: blocks * (1 + (each == 2))]
        rejected, total = np.zeros_like(values), np.zeros_like(values)
        with np.errstate(all="ignore"):
            host.encoder([values], None, each, 64, rejected, threads=number)(
                codes, scales
            )
            host.encoder([other], None, each, 64, total, threads=number)(
                codes.copy(), scales.copy(), [(codes, scales)]
            )
            host.decoder([(codes, scales)], each, 64, [other], threads=number, long=0)()
        yield codes, scales, rejected, total, other


def sparse_calls(values, number):
    """Return what every kernel of entries gives on so many threads."""
    options, places = (
        {"threads": number},
        2 * np.arange(values.size, dtype=np.int32) + 1,
    )
    dense = np.ones(2 * values.size + 1, values.dtype)
    parts = np.split(dense.copy(), [values.size // 3, values.size])
    yield host.sparse_writer(places, values, parts, **options)()
    yield tuple(parts)
    yield host.scatter_add(dense, places, values, **options)
    yield dense
    yield host.gather(dense, places, **options)


def as_bytes(results):
    return [
        [
            each.tobytes() if isinstance(each, np.ndarray) else each
            for each in (it if isinstance(it, tuple) else [it])
        ]
        for it in results
    ]


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "size",
    [
        0,
        1,
        127,
        128,
        129,
        191,
        192,
        193,
        255,
        256,
        257,
        999,
        3 * TILE - 1,
        4 * TILE + 65,
    ],
)
def test_the_bits_are_the_same_on_any_number_of_threads(dtype, size):
    for family in "normal", "zeros", "quantised", "one non-zero", "infinite":
        values = families(dtype, max(size, 18))[family][:size].astype(dtype)
        other = values[::-1].copy()
        expected = as_bytes([*dense_calls(values, other, 1), *sparse_calls(values, 1)])
        for number in (2, 4) if size % 2 else (3,):
            assert (
                as_bytes(
                    [*dense_calls(values, other, number), *sparse_calls(values, number)]
                )
                == expected
            )


def test_pieces_cover_a_range_in_order():
    for size in 0, 1, 10**6, 2**21 - 1, 2**21, 2**22 + 1, 10**7:
        for most in 1, 2, 3, 4, 100:
            pieces = threads.in_pieces(
                lambda start, end: (start, end), size, most, step=1000
            )
            starts, ends = zip(*pieces, strict=True)
            assert (starts[0], ends[-1], starts[1:]) == (0, size, ends[:-1])
            assert len(pieces) <= max(1, min(most, size >> 20))
            assert all(start % 1000 == 0 for start in starts)


def test_pieces_run_at_the_same_time():
    barrier = threading.Barrier(3)
    assert len(threads.in_pieces(lambda start, end: barrier.wait(60), 3 << 20, 3)) == 3


def test_no_piece_writes_any_more_once_the_error_of_the_first_one_is_raised(
    short_pieces,
):
    written = []

    def work(start, end):
        if start == 0:
            raise KeyError("of the first piece")
        if start == 64:
            raise ValueError("of the second piece")
        time.sleep(0.2)
        written.append(start)

    with pytest.raises(KeyError, match="of the first piece"):
        threads.in_pieces(work, 192, 3)
    assert written == [128]


def test_short_vectors_are_left_to_one_thread(monkeypatch):
    monkeypatch.setattr(
        threads, "_ready_pool", None
    )  # with it threads would be started
    short = np.zeros((1 << 21) - 1, np.float32)
    assert host.sides(short, 1.0, threads=4).below == short.size
    monkeypatch.setattr(threads, "count", lambda: 1)
    assert host.sides(np.zeros(1 << 22, np.float32), 1.0).below == 1 << 22


@pytest.mark.skipif(
    threads._current_core is None,
    reason="the C library does not say which core this is",
)
def test_other_threads_are_kept_off_the_core_of_the_caller():
    mask = os.sched_getaffinity(0)
    for _ in range(2):  # the first call starts the thread
        own, other = threads.in_pieces(
            lambda start, end: os.sched_getaffinity(0), 1 << 22, 2
        )
    assert own == mask
    assert other <= mask
    assert len(other) == max(1, len(mask) - 1)


def test_an_error_on_another_thread_is_raised():
    def work(start, end):
        if start:
            raise ValueError("the second piece")

    with pytest.raises(ValueError, match="the second piece"):
        threads.in_pieces(work, 1 << 22, 2)


def test_ranks_share_the_cores(monkeypatch):
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(threads, "quota", lambda: math.inf)
    assert threads.count() == cores
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(7))
    for ranks, expected in (1, 7), (2, 3), (7, 1), (100, 1):
        threads.share(ranks)
        assert threads.count() == expected


def test_the_variable_says_how_many_threads(monkeypatch):
    threads.share(9)
    monkeypatch.setenv(threads.VARIABLE, "3")
    assert threads.count() == 3
    for bad in "0", "-1", "two", "", "1.5":
        monkeypatch.setenv(threads.VARIABLE, bad)
        with pytest.raises(
            ValueError, match=r"MPICOMP_THREADS is .*: expected an integer >= 1"
        ):
            threads.count()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_starts_threads_of_its_own():
    def pieces():
        return threads.in_pieces(lambda start, end: end - start, 1 << 22, 2)

    expected = pieces()
    child = os.fork()
    if not child:
        signal.alarm(60)
        os._exit(0 if pieces() == expected else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("named", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        (
            "0::/slurm/job\n",
            {"slurm/cpu.max": "100000 100000\n", "slurm/job/cpu.max": "max 100000\n"},
            1.0,
        ),
        # the name outside of the container
        ("0::/docker/7f3a\n", {"cpu.max": "50000 100000\n"}, 0.5),
        (None, {}, math.inf),  # no Linux
    ],
)
def test_the_cpu_quota_of_a_container_is_the_least_of_its_cgroups(
    tmp_path, monkeypatch, named, files, expected
):
    groups = {"proc/self/cgroup": named} if named else {}
    for name, text in (
        groups | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    ).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert threads.quota(tmp_path) == expected
    monkeypatch.setattr(threads, "quota", lambda: expected)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64))
    assert threads.count() == max(1, int(min(64, expected)))


@pytest.mark.parametrize("started", [0, 1])
def test_without_threads_to_start_the_caller_does_the_work_and_warns_once(
    monkeypatch, started
):
    """A limit of processes; with one thread of the pool, or none. Work in the queue of the pool is done once."""
    monkeypatch.setattr(threads, "_LEAST", 64)
    monkeypatch.setattr(threads, "_pool", None)
    start, left, counts = threading.Thread.start, [started], np.zeros(1000, int)

    def refused(thread):
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)

    def work(first, end):
        counts[first:end] += 1
        return end - first

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            assert sum(threads.in_pieces(work, 1000, 4)) == 1000
    if pool := threads._pool:
        pool.shutdown(wait=True)
    assert counts.tolist() == [3] * 1000
    (warning,) = caught
    assert "raise the limit of processes" in str(warning.message)


def test_work_that_fails_in_a_thread_raises_in_the_caller(monkeypatch):
    monkeypatch.setattr(threads, "_LEAST", 64)

    def work(first, end):
        if first:
            raise MemoryError("a buffer")

    with pytest.raises(MemoryError, match="a buffer"):
        threads.in_pieces(work, 1000, 4)
