"""What calls on a GPU cost, counted without one: launches, waits, bytes, instructions, and the host's time.

    python benchmarks/gpu_costs.py --json docs/results/gpu_costs.json
    python benchmarks/gpu_costs.py --architecture sm_90 --json ... # instructions too: NVRTC and cuobjdump, by pip
                                                    # nvidia-cuda-nvrtc nvidia-cuda-cuobjdump

Calls run on the tests' stand-in for CuPy, one rank: it counts kernels and operations of
CuPy, copies, and waits for the device. bytes: of all arrays that kernels of the library
get as arguments, or by an address in a table, each once a kernel; those of CuPy's
operations are not seen. host_us: the least processor time of a step on a few values
without that of emulated kernels; NumPy's arrays are in the place of CuPy's, so compare
them with each other.

instructions: of machine code (SASS), on a path from the entry of a kernel to its end:
that of most accesses of 128 bits, and among these the shortest; a loop is counted once,
so they are of one tile or block; predicated instructions count. They are divided by the
values of a thread in `OF_A_THREAD`.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "cuda")]

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
    "Top-k": lambda **how: GradientExchange(MPI.COMM_SELF, TopK(0.01), **how),
    "bits=4": lambda **how: GradientExchange(MPI.COMM_SELF, bits=4, **how),
    "chunks, two bits": lambda **how: GradientExchange(
        MPI.COMM_SELF, Quantised(ChunkedTopK(4, 256), "two_bit"), **how
    ),
    "SIDCo": lambda **how: GradientExchange(MPI.COMM_SELF, SIDCo(0.01), **how),
    "AdaComp": lambda **how: GradientExchange(MPI.COMM_SELF, AdaComp(50), **how),
}
# values of a thread: float32, blocks of 256
OF_A_THREAD = {
    **{f"quantise_{bits}_f4": 16 for bits in (8, 4, 2, 1)},
    **{f"dequantise_{bits}_f4": 32 for bits in (8, 4, 2, 1)},
    "compact_u4": 16,
    "add_compact_u4": 16,
    "first_reaching_u4": 16,
    "largest_in_chunks_i4_u4": 16,
    "combine_f4_f4_f4": 1,
}


class Recorder:
    """Record what kernels get, and the time that they take here."""

    def __init__(self) -> None:
        self.bytes = 0
        self.seconds = 0.0
        self.plan = compiling._plan

    def planned(self, device: int, name: str, arguments: int) -> Callable[..., None]:
        """Return what starts a kernel, in the place of the library's."""
        start = self.plan(device, name, arguments)

        def recorded(blocks: int, threads: int, args: Sequence[Any]) -> None:
            self.bytes += sum(_sizes(args))
            begin = thread_time()
            start(blocks, threads, args)
            self.seconds += thread_time() - begin

        return recorded


def _sizes(args: Sequence[Any]) -> Iterator[int]:
    """Yield the bytes of the arrays in arguments, and of the memory that their tables name."""
    arena = sys.modules["cupy._memory"].arena
    for arg in args:
        if isinstance(arg, cupy.ndarray):
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
    counts, recorder, _ = last(name, tensors, VALUES, 3)
    found = {
        "call": name,
        "tensors": tensors,
        "launches": counts.launches,
        "waits": counts.synchronisations,
        "uploads": counts.uploads,
        "reads": round(recorder.bytes / (4 * VALUES), 2),
    }
    if repeats:
        found["host_us"] = round(1e6 * last(name, tensors, FEW, repeats)[2])
    return found


def last(
    name: str, tensors: int, values: int, steps: int
) -> tuple[Any, Recorder, float]:
    """Return the counts and the record of the last of some steps, and the least time of all.

    The first step makes plans, and SIDCo adapts.
    """
    recorder = Recorder()
    compiling._plan = recorder.planned
    compiling._plans = threading.local()
    exchange = STEPS[name](**({"small": 1} if tensors > 1 else {}))
    times = []
    for seed in range(steps):
        given = gradient(tensors, values, seed)
        recorder.bytes, recorder.seconds = 0, 0.0
        begin = thread_time()
        with counted(cupy) as counts:
            exchange(given, out=given)
        times.append(thread_time() - begin - recorder.seconds)
    compiling._plan = recorder.plan
    compiling._plans = threading.local()
    return counts, recorder, min(times)


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
            "instructions": round(shortest(code) / OF_A_THREAD[name], 1),
            "registers": int(registers[name]),
            "spilled": spilled[name],
        }
        for name, code in sorted(disassembled(image).items())
        if name in OF_A_THREAD
    ]


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


def shortest(code: Sequence[tuple[int, str]]) -> int:
    """Return the instructions of a path to the end: see the module."""
    numbers = {place: i for i, (place, _) in enumerate(code)}
    following = [_followers(code, i, numbers) for i in range(len(code))]
    best: list[tuple[int, int] | None] = [None] * len(code)
    backwards = False  # an end may lie before what jumps to it
    while best[0] is None:
        for i in reversed(range(len(code))):
            near = [each for each in following[i] if each > i or backwards]
            ends = [found for each in near if (found := best[each])]
            if not following[i]:
                ends = [(0, 0)]
            if ends and best[i] is None:
                wide, length = max(ends, key=lambda end: (end[0], -end[1]))
                best[i] = wide + _is_wide(code[i][1]), length + 1
        backwards = True
    return best[0][1]


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
    is_conditional = predicate or re.match(r"!?U?P\d", rest)
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
    parser.add_argument("--repeats", type=int, default=20, help="timed steps")
    options = parser.parse_args()
    found: dict[str, Any] = {
        "kernels": kernel_hash(),
        "steps": [
            step(name, tensors, options.repeats)
            for name in STEPS
            for tensors in TENSORS
        ],
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
