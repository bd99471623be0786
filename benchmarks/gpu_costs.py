"""What calls on a GPU cost, counted without one: launches, waits, bytes, instructions, and the host's time.

    python benchmarks/gpu_costs.py --json docs/results/gpu_costs.json
    python benchmarks/gpu_costs.py --architecture sm_90 --json ... # instructions too: NVRTC and cuobjdump, by pip
                                                    # nvidia-cuda-nvrtc nvidia-cuda-cuobjdump

Calls run on the tests' stand-in for CuPy, one rank: it counts kernels and operations of
CuPy, copies, and waits for the device. bytes: of all arrays that kernels of the library
get as arguments, or by an address in a table, each once a kernel; those of CuPy's
operations are not seen. host_us: the time of a step on a few values in the library and
in NumPy, the least of many: in a replay kernels do nothing, a copy to the host returns
what it did before, and the time in the stand-in is taken off. What CuPy's functions
take, and the driver, comes on top (docs/contributing/gpu.md, "A launch"). launch_us: of
a launch with 12 arguments, without the driver.

instructions: of machine code (SASS), on a path from the entry of a kernel to its end:
that of most accesses of 128 bits, which passes the instructions in `THROUGH`, and
among these the shortest: without either it would be the way out of a thread that has
nothing to do. Loops in `TRIPS` are counted as often as they run, others once;
predicated instructions count. They are divided by the values of a thread in
`OF_A_THREAD`.
"""

import argparse
import inspect
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from math import prod
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "tests" / "support"),
    str(ROOT / "tests" / "cuda"),
]

from compilers import log_and_cubin, nvrtc_libraries, spills  # noqa: E402
from devices import counted, cupy_for_tests, kernel_hash  # noqa: E402

cupy = cupy_for_tests()

from mpi4py import MPI  # noqa: E402

from collectives import GradientExchange  # noqa: E402
from mpicomp import (  # noqa: E402
    AdaComp,
    ChunkedTopK,
    Quantised,
    SIDCo,
    TopK,
)
from mpicomp.kernels.device import compiling  # noqa: E402

TENSORS = 1, 54, 160
VALUES = 160 * 2048  # of a gradient
FEW = 160 * 64  # of one whose step is timed
STEPS: dict[str, Callable[..., GradientExchange]] = {
    "Top-k": lambda comm, **how: GradientExchange(comm, TopK(0.01), **how),
    "bits=4": lambda comm, **how: GradientExchange(comm, bits=4, **how),
    "chunks, two bits": lambda comm, **how: GradientExchange(
        comm, Quantised(ChunkedTopK(4, 256), "two_bit"), **how
    ),
    "SIDCo": lambda comm, **how: GradientExchange(comm, SIDCo(0.01), **how),
    "AdaComp": lambda comm, **how: GradientExchange(comm, AdaComp(50), **how),
}
TIMED = "Top-k", "bits=4", "chunks, two bits"  # steps that do the same in a replay
# values of a thread: float32, blocks of 256
OF_A_THREAD = {
    **{f"quantise_{bits}_f4": 16 for bits in (8, 4, 2, 1)},
    **{f"dequantise_{bits}_f4": 32 for bits in (8, 4, 2, 1)},
    "mark_u4": 16,
    "add_and_mark_u4": 16,
    "compact_marked_i4_u4": 512,
    "first_reaching_u4": 16,
    "largest_in_chunks_i4_u4": 16,
    "mark_in_bins_u4": 4 * 50 / 32,  # a warp holds 4 bins of 50 values
    "mean_of_bins_u4": 64 * 50,  # bins of 50 values
    "entries_of_bins_i4_u4": 16 * 50 / 32,  # a warp reads the marks of 16 bins
    "hadamard_f4": 8,
    "combine_f4_f4_f4": 1,
}

_Kind = tuple[int, int]
WIDE = {"largest_in_chunks_i4_u4": 4}  # accesses: few of a tile, which is read once
# loops, each by an instruction of it, and their trips: tiles of a block of 2^27 values;
# rounds in which a threshold is narrowed, 6 in the mean for 4 to 64 of 4096 normal values;
# of a fifth of all values selected the most bits of 32 words, and the entries of a turn
TRIPS = {
    "mark_u4": (("LDG.E.EF.128", 32),),
    "add_and_mark_u4": (("LDG.E.EF.128", 32),),
    "largest_in_chunks_i4_u4": (("BAR.RED", 6),),
    "mark_in_bins_u4": (("+0x4c]", 82),),
    "mean_of_bins_u4": (("+0x7c00]", 2),),
    "entries_of_bins_i4_u4": (("SHFL.UP", 21), ("STS.U16", 12), ("LDS.U16", 6)),
}
# instructions of a path, in order: of few of a tile, of blocks of 256 values, of bins that
# are held together (the largest of the last one) and have entries, of a whole tile of bins,
# of a thread that has a value
THROUGH = {
    "largest_in_chunks_i4_u4": ("BAR.RED",),
    "mark_in_bins_u4": ("+0x4c]", "STG.E.64", "FLO"),
    "mean_of_bins_u4": ("+0x7c00]",),
    "combine_f4_f4_f4": ("LDG", "STG"),
    "entries_of_bins_i4_u4": ("SHFL.UP", "STS.U16", "LDS.U16"),
    **{name: ("+0x100]",) for name in OF_A_THREAD if "quantise" in name},
}
# `OF_A_THREAD` is of a trip of the first loop
TILED = {"mark_u4", "add_and_mark_u4", "mark_in_bins_u4", "entries_of_bins_i4_u4"}


class Recorder:
    """Record what kernels get."""

    def __init__(self) -> None:
        self.bytes = 0
        self.plan = compiling._plan

    def planned(self, device: int, name: str, arguments: int) -> Callable[..., None]:
        """Return what starts a kernel, in the place of the library's."""
        start = self.plan(device, name, arguments)

        def recorded(blocks: int, threads: int, args: Sequence[Any]) -> None:
            self.bytes += sum(_sizes(args))
            start(blocks, threads, args)

        return recorded


class Replay:
    """Steps whose kernels do nothing, and the time outside of the stand-in; while it is a context."""

    def __init__(self) -> None:
        self.answers: list[Any] = []  # of copies to the host
        self.left: list[Any] = []
        self.is_replay = False
        self.outside = 0.0  # seconds
        self._since = 0.0
        self._depth = 1
        self._replaced: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> "Replay":
        cuda = cupy.cuda
        places = cupy, cupy.ndarray, cuda, cuda.Stream, cuda.Event, cuda.MemoryPointer
        memory = sys.modules["cupy._memory"].Memory
        for place in (*places, memory):
            for name, value in list(vars(place).items()):
                is_known = name != "__init__" or place is cupy.ndarray
                if inspect.isfunction(value) and is_known:
                    self._replace(place, name, self._timed(value))
        get = cupy.ndarray.get
        start = cuda.driver.launchKernel

        def answered(array: Any, *args: Any, **how: Any) -> Any:
            if self.is_replay:
                return self.left.pop(0).copy()
            self.answers.append(get(array, *args, **how))
            return self.answers[-1]

        def started(*args: Any) -> None:
            if not self.is_replay:
                start(*args)

        self._replace(cupy.ndarray, "get", self._timed(answered))
        self._replace(cuda.driver, "launchKernel", self._timed(started))
        return self

    def __exit__(self, *raised: object) -> None:
        for place, name, value in reversed(self._replaced):
            setattr(place, name, value)

    def time(self, step: Callable[[], Any], repeats: int) -> float:
        """Return the least time of a step outside of the stand-in, in seconds."""
        self.answers.clear()
        step()
        self.is_replay = True
        times = []
        for _ in range(repeats):
            self.left = self.answers[:]
            self.outside, self._depth, self._since = 0.0, 0, perf_counter()
            step()
            times.append(self.outside + perf_counter() - self._since)
            self._depth = 1
        self.is_replay = False
        return min(times)

    def _replace(self, place: Any, name: str, value: Any) -> None:
        self._replaced.append((place, name, vars(place)[name]))
        setattr(place, name, value)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose time does not count."""

        def call(*args: Any, **how: Any) -> Any:
            if self._depth:
                return function(*args, **how)
            self.outside += perf_counter() - self._since
            self._depth = 1
            try:
                return function(*args, **how)
            finally:
                self._depth = 0
                self._since = perf_counter()

        return call


def _sizes(args: Sequence[Any]) -> Iterator[int]:
    """Yield the bytes of the arrays in arguments, and of the memory that their tables name."""
    arena = sys.modules["cupy._memory"].arena
    for arg in args:
        if isinstance(arg, int) and arena.has(arg):
            yield arena.bytes_at(arg)
        elif isinstance(arg, cupy.ndarray):
            yield arg.nbytes
            if arg.dtype == np.int64:
                words = arg._hidden.ravel().tolist()
                yield from (arena.bytes_at(word) for word in words if arena.has(word))


def gradient(tensors: int, values: int, seed: int) -> Any:
    """Return a gradient of so many tensors on the stand-in's device; an array for one."""
    rng = np.random.default_rng(seed)
    arrays = [
        cupy.asarray(rng.laplace(size=values // tensors).astype(np.float32))
        for _ in range(tensors)
    ]
    if tensors == 1:
        return arrays[0]
    return {f"tensor {i}": array for i, array in enumerate(arrays)}


def step(name: str, tensors: int, repeats: int) -> dict[str, Any]:
    """Return what a step cost, and the least time of the host."""
    counts, recorder = last(name, tensors, VALUES, 3)
    found = {
        "call": name,
        "tensors": tensors,
        "launches": counts.launches,
        "waits": counts.synchronisations,
        "uploads": counts.uploads,
        "reads": round(recorder.bytes / (4 * VALUES), 2),
    }
    if repeats and name in TIMED:
        found["host_us"] = round(1e6 * host_seconds(name, tensors, repeats))
    return found


def host_seconds(name: str, tensors: int, repeats: int) -> float:
    """Return the least time of a step in the library."""
    exchange = made(name, tensors, MPI.COMM_SELF)
    given = gradient(tensors, FEW, 0)
    exchange(given, out=given)
    with Replay() as replay:
        return replay.time(lambda: exchange(given, out=given), repeats)


def launch_seconds(repeats: int) -> float:
    """Return the least time of a launch of 12 arguments, a half of them arrays, by a driver that does nothing."""

    class Array:  # as quick as CuPy's
        _c_contiguous = True
        data = SimpleNamespace(ptr=1 << 40)

    cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=0))
    own = compiling.cupy, compiling.driver, compiling._function
    compiling.cupy = SimpleNamespace(ndarray=Array, cuda=cuda)
    compiling.driver = SimpleNamespace(launchKernel=lambda *args: None)
    compiling._function = lambda device, name: 1
    args = [Array() if i % 2 else i for i in range(12)]
    dtypes = [np.dtype(np.int32), np.dtype(np.float32)]
    times = []
    for _ in range(repeats):
        begin = perf_counter()
        compiling.launch("a kernel", dtypes, 1, *args)
        times.append(perf_counter() - begin)
    compiling.cupy, compiling.driver, compiling._function = own
    compiling._plans = threading.local()
    return min(times)


def made(name: str, tensors: int, comm: Any) -> GradientExchange:
    """Return the exchange of a method; with several tensors each is compressed."""
    return STEPS[name](comm, **({"small": 1} if tensors > 1 else {}))


def last(
    name: str, tensors: int, values: int, steps: int, comm: Any = MPI.COMM_SELF
) -> tuple[Any, Recorder]:
    """Return the counts and the record of the last of some steps: the first makes plans, and SIDCo adapts."""
    recorder = Recorder()
    compiling._plan = recorder.planned
    compiling._plans = threading.local()
    exchange = made(name, tensors, comm)
    for seed in range(steps):
        given = gradient(tensors, values, seed)
        recorder.bytes = 0
        with counted(cupy) as counts:
            exchange(given, out=given)
    compiling._plan = recorder.plan
    compiling._plans = threading.local()
    return counts, recorder


def instructions(architecture: str) -> list[dict[str, Any]]:
    """Return the instructions, registers and spilled bytes of kernels, by the compiler of CUDA."""
    library = nvrtc_libraries()[0]
    log, image = log_and_cubin(library, compiling.source(), architecture)
    registers = dict(
        re.findall(r"entry function '(\w+)'.*?Used (\d+) registers", log, re.DOTALL)
    )
    spilled = spills(log)
    return [
        {
            "kernel": name,
            "instructions": round(of_a_value(name, code), 1),
            "registers": int(registers[name]),
            "spilled": spilled[name],
        }
        for name, code in sorted(disassembled(image).items())
        if name in OF_A_THREAD
    ]


def of_a_value(name: str, code: Sequence[tuple[int, str]]) -> float:
    """Return the instructions of a kernel for each value."""
    found = path(code, WIDE.get(name), THROUGH.get(name, ()))
    loops = [(loop_of(code, found, text), trips) for text, trips in TRIPS.get(name, ())]
    count = sum(prod(trips for loop, trips in loops if i in loop) for i in found)
    tiles = loops[0][1] if name in TILED else 1
    return count / (OF_A_THREAD[name] * tiles)


def disassembled(image: bytes) -> dict[str, list[tuple[int, str]]]:
    """Return the places and texts of the instructions of each kernel of a cubin."""
    tool = next(
        Path(file.locate())
        for file in metadata.files("nvidia-cuda-cuobjdump") or []
        if file.name == "cuobjdump"
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        command = [str(tool), "-sass", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    functions = re.findall(
        r"Function : (\w+)\n(.*?)(?=Function :|\Z)", done.stdout, re.DOTALL
    )
    line = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);")
    return {
        name: [(int(place, 16), text) for place, text in line.findall(body)]
        for name, body in functions
    }


def path(
    code: Sequence[tuple[int, str]],
    wide: int | None = None,
    through: Sequence[str] = (),
) -> list[int]:
    """Return the numbers of the instructions of a path to the end: see the module.

    wide: its accesses of 128 bits; None for most. through: parts of the texts of
    instructions that it passes, in their order.
    """
    numbers = {place: i for i, (place, _) in enumerate(code)}
    following = [_followers(code, i, numbers) for i in range(len(code))]
    # from each instruction to the end, by the wide accesses and how many of the last ones
    # in `through` it passes: the length of the shortest path, and where it goes on
    best: list[dict[_Kind, tuple[int, int, _Kind]]] = [{} for _ in code]  # by kind
    backwards = False  # an end may lie before what jumps to it
    while not any(passed == len(through) for _, passed in best[0]):
        assert not (backwards and best[0]), f"no path passes {through}"
        for i in reversed(range(len(code))):
            text = code[i][1]
            own = _is_wide(text)
            here = [each in text for each in reversed(through)]
            near = [each for each in following[i] if each > i or backwards]
            ends = [
                (length, each, kind)
                for each in near
                for kind, (length, _, _) in best[each].items()
            ]
            if not following[i]:
                ends = [(0, -1, (0, 0))]
            known = set(best[i])
            for length, each, kind in sorted(ends, reverse=True):
                passed = kind[1] + any(here[kind[1] : kind[1] + 1])
                after = kind[0] + own, passed
                if after not in known:
                    best[i][after] = length + 1, each, kind
        backwards = True
    most = max(count for count, passed in best[0] if passed == len(through))
    assert most or through, "the shortest path is that of a thread without work"
    kind = most if wide is None else wide, len(through)
    found = []
    i = 0
    while i >= 0:
        found.append(i)
        _, i, kind = best[i][kind]
    return found


def loop_of(code: Sequence[tuple[int, str]], found: Sequence[int], text: str) -> range:
    """Return the innermost loop around the first instruction of a path that has a text."""
    numbers = {place: i for i, (place, _) in enumerate(code)}
    inside = next(i for i in found if text in code[i][1])
    bodies = [
        range(first, i + 1)
        for i in range(inside, len(code))
        for first in _followers(code, i, numbers)
        if first <= inside
    ]
    return min(bodies, key=len)


def _followers(
    code: Sequence[tuple[int, str]], i: int, numbers: dict[int, int]
) -> list[int]:
    """Return the numbers of the instructions that may follow one."""
    predicate, name, rest = _parts(code[i][1])
    following = [i + 1] if i + 1 < len(code) else []
    if name in ("EXIT", "RET"):
        return following if predicate else []
    if name != "BRA":
        return following
    target = [numbers[int(re.findall(r"0x[0-9a-f]+", rest)[-1], 16)]]
    is_conditional = predicate or re.match(r"!?U?P\d|UR", rest)
    return following + target if is_conditional else target


def _parts(text: str) -> tuple[str, str, str]:
    """Return the predicate of an instruction, its name without suffixes, and its operands."""
    found = re.match(r"(@!?U?P\w+\s+)?([\w]+)\S*\s*(.*)", text)
    assert found is not None
    return found[1] or "", found[2], found[3]


def _is_wide(text: str) -> bool:
    return ".128" in text and _parts(text)[1] in ("LDG", "STG", "LD", "ST")


def main() -> None:
    """Print the costs as JSON, or write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="the file to write")
    parser.add_argument("--architecture", help="count instructions for it: sm_90")
    parser.add_argument(
        "--repeats", type=int, default=200, help="timed steps, 0 for none"
    )
    options = parser.parse_args()
    found: dict[str, Any] = {
        "kernels": kernel_hash(),
        "steps": [
            step(name, tensors, options.repeats)
            for name in STEPS
            for tensors in TENSORS
        ],
        "launch_us": round(1e6 * launch_seconds(10_000), 1),
    }
    if options.architecture:
        found["architecture"] = options.architecture
        found["instructions"] = instructions(options.architecture)
    elif options.json and options.json.exists():
        before = json.loads(options.json.read_text())
        found |= {
            name: before[name]
            for name in ("architecture", "instructions")
            if name in before
        }
    text = json.dumps(found, indent=1) + "\n"
    print(text)
    if options.json:
        options.json.write_text(text)


if __name__ == "__main__":
    main()
