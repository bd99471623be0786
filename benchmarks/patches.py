r"""Patches of weights: bytes a change and seconds, beside other codecs; and seconds over a network beside MPI_Bcast.

    python benchmarks/patches.py --json docs/results/patches.json --weights build/weights.npz     # with PyTorch
    sudo python benchmarks/testbed/testbed.py up 8 100mbit
    sudo python benchmarks/testbed/testbed.py run \
        python -m mpi4py benchmarks/patches.py --broadcast build/weights.npz --json docs/results/patches-8.json
    python benchmarks/doc_tables.py

The weights are those of the race's GPT (experiments/race), trained for 400 steps of AdamW at
1e-3: float32 masters, of which the BF16 image is sent. Then 100 steps at each of three
rates; a row is the mean over every tenth of them, of the change that one step makes. The
last rows are the change of all 100 steps. Codecs run on one core, and are the best of some runs.

Others: "rows, columns, zstd" is the form of grail (one-covenant/grail, sparse_codec.py,
v3.1) as its documentation describes it: of each tensor the differences of row numbers and
of columns in a row, in the narrowest of its integers, and the new values, by zstd at level 1; needs zstandard.
"zlib": differences of positions in 32 bits, and the new values, at level 1. The bounds are
entropies: of the positions and of the counts of steps, alone, and given the exponent of the old weight.
"""

import argparse
import hashlib
import json
import pathlib
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import Patch, changes

ROOT = pathlib.Path(__file__).parents[1]
RATES = 1e-6, 3e-6, 1e-5
WARM_UP, STEPS, EVERY = 400, 100, 10
RUNS = 5
NAIVE = 6.0  # bytes of an int32 and a BF16

Bits = NDArray[np.uint16]
Weights = dict[str, Bits]
Pair = tuple[Weights, Weights]


def trained() -> dict[str, list[Pair]]:
    """Return by rate the weights before and after every tenth step, and at last before and after all steps."""
    sys.path.append(str(ROOT / "experiments" / "race"))
    import gpt
    import torch

    trainer = gpt.Trainer(0, 0, 1, gpt.TASKS["gpt"])

    def image() -> Weights:
        weights = trainer.arrays.items()
        return {name: bits(each.detach().to(torch.bfloat16)) for name, each in weights}

    trainer.optimise("adamw", 1e-3)
    for step in range(WARM_UP):
        trainer.step(step)
    start = {name: weight.detach().clone() for name, weight in trainer.arrays.items()}
    found: dict[str, list[Pair]] = {}
    for rate in RATES:
        with torch.no_grad():
            for name, weight in trainer.arrays.items():
                weight.copy_(start[name])
        trainer.optimise("adamw", rate)
        first = image()
        pairs = []
        for step in range(1, STEPS + 1):
            before = image() if step % EVERY == 0 else first
            trainer.step(WARM_UP + step)
            if step % EVERY == 0:
                pairs.append((before, image()))
        found[f"{rate:g}"] = [*pairs, (first, image())]
    return found


def tensors(weights: Weights) -> dict[str, Any]:
    """Return weights as tensors of PyTorch, in new memory."""
    import torch

    return {
        name: torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)
        for name, bits in weights.items()
    }


def bits(tensor: Any) -> Bits:
    """Return the bits of a tensor, which shares its memory."""
    import torch

    return tensor.view(torch.int16).numpy().view(np.uint16)  # type: ignore[no-any-return]


def best(function: Callable[..., Any], prepare: Callable[[], Any] = list) -> float:
    """Return the least seconds of some runs of a function, each on the arguments that `prepare` returns."""
    seconds = []
    for _ in range(RUNS):
        given = prepare()
        began = time.perf_counter()
        function(*given)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def measured(pair: Pair) -> dict[str, float]:
    """Return bytes a change, and GB of weights a second, of each codec."""
    before, after = pair
    changed = sum(int(np.count_nonzero(before[name] != after[name])) for name in before)
    nbytes = sum(bits.nbytes for bits in before.values())
    old, new = tensors(before), tensors(after)
    patch = changes(old, new)
    sent = bytes(patch)
    row = {
        "changed": changed / (nbytes / 2),
        "bytes": patch.nbytes / changed,
        "encode": best(lambda: changes(old, new)),
        "apply": best(
            lambda weights: Patch.from_bytes(sent).apply(weights),
            lambda: [tensors(before)],
        ),
    }
    for name, (encode, decode) in CODECS.items():
        coded = encode(before, after)
        weights = {each: bits.copy() for each, bits in before.items()}
        decode(coded, weights)
        assert all((weights[each] == after[each]).all() for each in after)
        row[f"{name} bytes"] = len(coded) / changed
        row[f"{name} encode"] = best(partial(encode, before, after))
        row[f"{name} apply"] = best(partial(decode, coded, weights))
    for name, value in row.items():
        if name.endswith(("encode", "apply")):
            row[name] = nbytes / value / 1e9
    plain, given = bounds(joined(before), joined(after))
    return {**row, "bound": plain, "bound given exponents": given, "naive bytes": NAIVE}


def joined(weights: Weights) -> Bits:
    """Return all weights as one vector."""
    return np.concatenate([bits.reshape(-1) for bits in weights.values()])


def entropy(counts: Iterable[int]) -> float:
    """Return the bits of a sequence with these numbers of each symbol."""
    numbers = np.array([count for count in counts if count], np.float64)
    return float((numbers * np.log2(numbers.sum() / numbers)).sum())


def bounds(old: Bits, new: Bits) -> tuple[float, float]:
    """Return entropies in bytes a change, alone and given the exponent of the old weight."""
    is_changed = old != new
    steps = in_order(new) - in_order(old)
    total = int(np.count_nonzero(is_changed))

    def bits_of(some: NDArray[np.bool_]) -> float:
        own = is_changed & some
        count = int(np.count_nonzero(own))
        _, counts = np.unique(steps[own], return_counts=True)
        return entropy([count, int(np.count_nonzero(some)) - count]) + entropy(
            counts.tolist()
        )

    exponents = old >> 7 & 255
    given = sum(bits_of(exponents == each) for each in np.unique(exponents))
    return bits_of(np.ones(old.size, np.bool_)) / 8 / total, given / 8 / total


def in_order(bits: Bits) -> NDArray[np.int64]:
    """Return bit patterns as integers in the order of the numbers."""
    signed = bits.view(np.int16).astype(np.int64)
    return np.where(signed < 0, signed ^ 0x7FFF, signed)


def zlib_encode(before: Weights, after: Weights) -> bytes:
    """Return differences of positions and values, by zlib."""
    old, new = joined(before), joined(after)
    places = np.flatnonzero(old != new)
    gaps = np.diff(places, prepend=0).astype(np.int32)
    return zlib.compress(gaps.tobytes() + new[places].tobytes(), 1)


def zlib_decode(coded: bytes, weights: Weights) -> None:
    """Write what `zlib_encode` coded."""
    plain = np.frombuffer(zlib.decompress(coded), np.uint8)
    count = plain.size // 6
    places = np.cumsum(plain[: 4 * count].view(np.int32), dtype=np.int64)
    values = plain[4 * count :].view(np.uint16)
    first = 0
    for bits in weights.values():
        low, high = np.searchsorted(places, (first, first + bits.size))
        bits.reshape(-1)[places[low:high] - first] = values[low:high]
        first += bits.size


def narrow(numbers: NDArray[np.int64], short: type) -> NDArray[Any]:
    """Return numbers in a short dtype if they fit it, else in 32 bits."""
    fits = not numbers.size or numbers.max() <= np.iinfo(short).max
    return numbers.astype(short if fits else np.int32)


def rows_encode(before: Weights, after: Weights) -> bytes:
    """Return rows, columns and values of each tensor, by zstd."""
    import zstandard

    heads, parts = [], []
    for name, old in before.items():
        new = after[name].reshape(-1)
        places = np.flatnonzero(old.reshape(-1) != new)
        rows, columns = np.divmod(places, old.shape[-1] if old.ndim > 1 else 1)
        row_steps = np.diff(rows, prepend=0)
        column_steps = np.diff(columns, prepend=0)
        starts = row_steps != 0
        column_steps[starts] = columns[starts]
        coded = narrow(row_steps, np.uint8), narrow(column_steps, np.uint16)
        heads.append([name, places.size, *(str(each.dtype) for each in coded)])
        parts += [each.tobytes() for each in (*coded, new[places])]
    head = json.dumps(heads).encode()
    plain = len(head).to_bytes(4, "little") + head + b"".join(parts)
    return zstandard.ZstdCompressor(level=1).compress(plain)


def rows_decode(coded: bytes, weights: Weights) -> None:
    """Write what `rows_encode` coded."""
    import zstandard

    plain = zstandard.ZstdDecompressor().decompress(coded)
    at = 4 + int.from_bytes(plain[:4], "little")
    for name, count, *dtypes in json.loads(plain[4:at]):
        arrays = []
        for dtype in (*dtypes, "uint16"):
            arrays.append(np.frombuffer(plain, dtype, count, at))
            at += arrays[-1].nbytes
        row_steps, column_steps, values = arrays
        bits = weights[name]
        sums = np.cumsum(column_steps, dtype=np.int64)
        starts = np.flatnonzero(row_steps)
        behind = np.zeros(count, np.int64)
        behind[starts] = np.diff(sums[starts] - column_steps[starts], prepend=0)
        columns = sums - np.cumsum(behind)
        places = np.cumsum(row_steps, dtype=np.int64) * (
            bits.shape[-1] if bits.ndim > 1 else 1
        )
        bits.reshape(-1)[places + columns] = values


CODECS = {"rows": (rows_encode, rows_decode), "zlib": (zlib_encode, zlib_decode)}


def all_codecs(json_path: str, weights_path: str) -> None:
    """Train, measure, and write the results, and the weights of one step for `broadcast`."""
    rows = []
    for rate, pairs in trained().items():
        *steps, whole = pairs
        found = [measured(pair) for pair in steps]
        mean = {name: float(np.mean([row[name] for row in found])) for name in found[0]}
        rows.append({"rate": rate, "steps": 1, **mean})
        rows.append({"rate": rate, "steps": STEPS, **measured(whole)})
        print(rows[-2:], flush=True)
        if rate == f"{RATES[0]:g}" and weights_path:
            pathlib.Path(weights_path).parent.mkdir(parents=True, exist_ok=True)
            versions = zip(("before", "after"), steps[0], strict=True)
            arrays = {
                f"{when}/{name}": bits
                for when, weights in versions
                for name, bits in weights.items()
            }
            np.savez(weights_path, **arrays)
    size = sum(bits.size for bits in whole[0].values())
    write(json_path, {"weights": size, "rows": rows})


def write(path: str, result: dict[str, Any]) -> None:
    """Write results as JSON."""
    if path:
        pathlib.Path(path).write_text(json.dumps(result, indent=1) + "\n")


def broadcast(json_path: str, weights_path: str) -> None:
    """Time the patch of one step and MPI_Bcast of all weights, on all ranks; compare SHA-256."""
    from mpi4py import MPI

    from collectives import sparse_bcast

    comm = MPI.COMM_WORLD
    with np.load(weights_path) as file:
        versions = [
            {
                name.partition("/")[2]: file[name]
                for name in file.files
                if name.startswith(when)
            }
            for when in ("before", "after")
        ]
    expected = joined(versions[1])
    seconds: dict[str, list[float]] = {"patch": [], "making": [], "model": []}
    nbytes = 0
    for _ in range(RUNS + 1):  # the first one compiles kernels and connects ranks
        mine = tensors(versions[0])
        new = tensors(versions[1])
        comm.Barrier()
        began = time.perf_counter()
        patch = changes(mine, new) if comm.rank == 0 else None
        seconds["making"].append(time.perf_counter() - began)
        comm.Barrier()
        began = time.perf_counter()
        nbytes = sparse_bcast(patch, comm, out=mine).nbytes
        seconds["patch"].append(time.perf_counter() - began)
        check(comm, joined({name: bits(each) for name, each in mine.items()}), expected)
        model = expected.copy() if comm.rank == 0 else np.zeros_like(expected)
        comm.Barrier()
        began = time.perf_counter()
        comm.Bcast(model)
        seconds["model"].append(time.perf_counter() - began)
        check(comm, model, expected)
    # of the rank that waits longest
    slowest = {
        name: float(np.median([max(comm.allgather(each)) for each in taken[1:]]))
        for name, taken in seconds.items()
    }
    if comm.rank == 0:
        result = {
            "ranks": comm.size,
            "bytes": {"patch": nbytes, "model": expected.nbytes},
            "seconds": slowest,
        }
        print(json.dumps(result, indent=1))
        write(json_path, result)


def check(comm: Any, got: Bits, expected: Bits) -> None:
    """Raise unless the SHA-256 of the weights is that of the new ones, on all ranks."""
    digests = comm.allgather(hashlib.sha256(got.tobytes()).hexdigest())
    assert {*digests} == {hashlib.sha256(expected.tobytes()).hexdigest()}, digests


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", default="", help="where to write the results")
    parser.add_argument("--weights", default="", help="where to write weights, as .npz")
    parser.add_argument("--broadcast", default="", help="weights to send on all ranks")
    options = parser.parse_args()
    if options.broadcast:
        broadcast(options.json, options.broadcast)
    else:
        all_codecs(options.json, options.weights)


if __name__ == "__main__":
    main()
