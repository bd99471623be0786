"""The emulator itself: it finds the faults that it is there to find."""

import ctypes
import faulthandler
import importlib
import os
import signal
from pathlib import Path

import comparisons
import mutants
import pytest
from devices import cupy_for_tests, real_cupy
from emulator import SCHEDULES, VARIABLE, EmulationError, Program

pytestmark = pytest.mark.skipif(
    real_cupy() is not None, reason="nothing is emulated where there is a GPU"
)

FOLDER = Path(importlib.util.find_spec("mpicomp.kernels").origin).parent / "device"
COMMON = "common.cuh"

SELECTION = "selection.cu"
SEGMENTS = "segments.cu"
UNFAIR = tuple(f"starving:{seed}" for seed in range(2, 9))
# What runs the barriers of a file, and what else has to be compiled with it.
RUNS = {
    COMMON: ([COMMON, "coding.cu"], [comparisons.bitmaps]),
    SELECTION: (
        [COMMON, SELECTION, "chunks.cu", SEGMENTS, "statistics.cu", "fitting.cu"],
        [
            comparisons.selections_by_a_grid,
            comparisons.top_k_of_several_blocks,
            comparisons.misaligned_sums,
            comparisons.largest_of_sums_in_segments,
        ],
    ),
    SEGMENTS: (
        [COMMON, SELECTION, "chunks.cu", SEGMENTS],
        [
            comparisons.selections_by_a_grid,
            comparisons.top_k_of_several_blocks,
            comparisons.marks_of_many_tiles_a_block,
            comparisons.floors_from_a_sample,
            comparisons.largest_of_sums_in_segments,
        ],
    ),
    "statistics.cu": (
        [COMMON, SELECTION, "statistics.cu"],
        [
            comparisons.magnitudes_in_segments,
            comparisons.magnitudes_of_many_tiles,
        ],
    ),
    "chunks.cu": (
        [COMMON, SELECTION, "chunks.cu"],
        [comparisons.largest_in_segments, comparisons.top_k_of_few],
    ),
    "fitting.cu": (
        [COMMON, SELECTION, "chunks.cu", SEGMENTS, "statistics.cu", "fitting.cu"],
        [comparisons.excesses],
    ),
    "bins.cu": (
        [COMMON, SELECTION, "statistics.cu", "bins.cu"],
        [comparisons.entries_of_bins, comparisons.entries_of_many_bins],
    ),
    "merging.cu": ([COMMON, "merging.cu"], [comparisons.merges]),
    "transforms.cu": ([COMMON, "transforms.cu"], [comparisons.hadamard_transforms]),
}
BARRIERS = [
    (name, at, function)
    for name in RUNS
    for at, function in enumerate(mutants.barriers((FOLDER / name).read_text()))
]


@pytest.fixture
def device():
    cupy_for_tests()
    return importlib.import_module("mpicomp.kernels.device")


def survives(device, monkeypatch, runs, schedules=SCHEDULES + UNFAIR):
    """Say whether kernels pass comparisons under some schedules; in a child process, which may die of them."""
    child = os.fork()
    if not child:
        faulthandler.disable()  # a child that dies is what is hoped for
        signal.setitimer(signal.ITIMER_VIRTUAL, 60)
        for schedule in schedules:
            monkeypatch.setenv(VARIABLE, schedule)
            try:
                for run in runs:
                    run(device, importlib.import_module("cupy"))
            except Exception:
                os._exit(1)
        os._exit(0)
    ended = os.waitpid(child, 0)[1]
    assert not (os.WIFSIGNALED(ended) and os.WTERMSIG(ended) == signal.SIGVTALRM), (
        "took too long to say"
    )
    return ended == 0


def source_of(name, text):
    """Return a source of one CUDA file, which is now `text`, and of what it needs."""
    texts = (
        text if each == name else (FOLDER / each).read_text() for each in RUNS[name][0]
    )
    return "".join(texts).replace('#include "common.cuh"\n', "")


def slow_but(chosen, names):
    """Return names as parameters of a test, all marked slow but the chosen ones: each compiles a program."""
    return [
        pytest.param(name, marks=() if name in chosen else pytest.mark.slow)
        for name in names
    ]


@pytest.mark.parametrize("name", slow_but({COMMON, "transforms.cu"}, RUNS))
def test_what_mutants_are_made_of_passes(device, monkeypatch, name):
    text = mutants.with_barriers_to_delete((FOLDER / name).read_text())
    mutants.use(source_of(name, text), monkeypatch, deleted_barrier=-1)
    assert survives(device, monkeypatch, RUNS[name][1], SCHEDULES[::3])


@pytest.mark.parametrize(
    ("name", "number"), [pytest.param(*b[:2], id=f"{b[2]}-{b[1]}") for b in BARRIERS]
)
@pytest.mark.slow
def test_a_deleted_barrier_is_found(device, monkeypatch, name, number):
    text = mutants.with_barriers_to_delete((FOLDER / name).read_text())
    mutants.use(source_of(name, text), monkeypatch, deleted_barrier=number)
    assert not survives(device, monkeypatch, RUNS[name][1])


FAULTS = {
    "the compaction writes a place late": (SELECTION, "at = place + through - own;", "at = place + through - own + 1;"),
    "the compaction forgets a warp": (COMMON, "before + through - own", "before + through"),
    "a tile counts itself among those before it": (COMMON, "i64 last = tile - 1;", "i64 last = tile;"),
    "the nearest sum is left out": (COMMON, "lane() <= nearest", "lane() < nearest"),
    "the look-back does not wait": (COMMON, "if (!(empty & (summed ?", "if (true || !(empty & (summed ?"),
    "a block takes its own number as its tile": (COMMON, "(i64)atomicAdd(ticket, 1ull)", "(i64)blockIdx.x"),
    "a count is published before it is known": (COMMON, "states[tile] = COUNTED | own;", "states[tile] = COUNTED;"),
    "a tie too many": (SELECTION, "(at++ < ties)", "(at++ <= ties)"),
    "a block does not wait for the counts of the others": (SEGMENTS, "!= (u64)tiles)", "!= (u64)tiles && false)"),
    "a compaction takes up where it began": (SEGMENTS, "place += all;", ""),
    "a compaction forgets the blocks before": (SEGMENTS, "before += counts[block]", "before += 0"),
    "a segment begins a place late": (SEGMENTS, "starts[row] = at;", "starts[row] = at + 1;"),
    "a tile is of the segment before": (SEGMENTS, "<= tile) ++row;\n        const u32 h", "< tile) ++row; const u32 h"),
    "a sum is a difference": ("merging.cu", "= sum[i] + widened(values_b", "= sum[i] - widened(values_b"),
    "a vector is added to itself": (SELECTION, "read(addend, size,", "read(values, size,"),
    "a sum is not written": (SEGMENTS, "write(out + start, size, first, items, head);", ""),
    "a chunk at the end has a stage less": ("transforms.cu", "bound < 2 * by * unit", "bound <= 2 * by * unit"),
    "a round does not wait for the one before": ("statistics.cu", "while (done < (u64)round)", "while (false)"),
    "a block adds up before the others": ("statistics.cu", "+ 1 == (u64)all;", "+ 2 == (u64)all;"),
    "the fit leaves out a block": ("fitting.cu", "(size + SUM_TILE - 1) /", "size /"),
}  # fmt: skip


OF_EACH_KIND = {
    "a tie too many",
    "a block does not wait for the counts of the others",
    "a sum is a difference",
    "a chunk at the end has a stage less",
    "the fit leaves out a block",
}


@pytest.mark.parametrize("fault", slow_but(OF_EACH_KIND, FAULTS))
def test_a_fault_is_found(device, monkeypatch, fault):
    name, old, new = FAULTS[fault]
    mutants.use(
        source_of(name, mutants.replaced((FOLDER / name).read_text(), old, new)),
        monkeypatch,
    )
    assert not survives(device, monkeypatch, RUNS[name][1])


LEFT = "__syncthreads"
BROKEN = {
    "if (threadIdx.x < 7) return; __syncthreads();": LEFT,
    "if (threadIdx.x == 40) return; __syncthreads();": LEFT,
    "if (threadIdx.x == 0) __syncwarp(3); __syncthreads();": "wait for ever",
    "if (threadIdx.x == 0) return; __ballot_sync(ALL, 1);": "wait for it at a ballot|wait for ever",
    "__shfl_sync(2u, 1, 1);": "is not in the mask of a shuffle",
    "if (lane() & 1) __ballot_sync(ALL, 1); else __shfl_sync(ALL, 1, 0);": "is at .* while others of its warp are at",
    "volatile u64* flag = out; while (!*flag) __nanosleep(20);": "wait in loops",
    "SHARED(u64, one); SHARED(u32, two); one = two;": "SHARED twice",
}


@pytest.fixture(scope="module")
def broken():
    """Return a program of all kernels that break a rule: `kernel` and a number."""
    kernels = (
        f"KERNEL kernel{number}(u64* out) {{ {body} }}\n"
        for number, body in enumerate(BROKEN)
    )
    return Program((FOLDER / COMMON).read_text() + "".join(kernels))


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_rules_of_cuda_are_watched(broken, number):
    said = [*BROKEN.values()][number]
    word = ctypes.c_uint64(0)
    for schedule in SCHEDULES:
        with pytest.raises(EmulationError, match=said):
            broken.launch(
                f"kernel{number}",
                (2,),
                (256,),
                [ctypes.addressof(word)],
                schedule=schedule,
            )


def test_shared_memory_holds_garbage(tmp_path):
    source = (
        (FOLDER / COMMON).read_text()
        + "KERNEL leak(u64* out) { SHARED(u64, word); out[blockIdx.x] = word; }"
    )
    words = (ctypes.c_uint64 * 4)()
    Program(source).launch("leak", (4,), (1,), [ctypes.addressof(words)])
    assert 0 not in words
    assert len(set(words)) == 4
