"""One hash of all bits that steps of the exchange compute, to compare before and after a change that promises the same.

    mpirun -n 4 python -m mpi4py benchmarks/bits_of_everything.py

Groups of 1, 2 and 4 of the ranks take a few steps with every compressor and feedback,
collective, basis, average, dtype and layout (not with all combinations of them: pairs,
the rest alternates), rounds of local steps, and calls of collectives. Hashed are the
means, what feedbacks and compressors keep, and the messages, whose order does not
count. The last line is the hash of all; the lines before it, by part and by kind of
case, tell where two runs differ. `--cases FILE` writes a line for each case.
"""

import argparse
import os
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
from mpi4py import MPI

import collectives
from collectives import (
    GradientExchange,
    OuterLoop,
    Sum,
    compressed_allreduce,
    dense_allreduce,
    gtopk_allreduce,
    quantised_allreduce,
    sparse_allgather,
    sparse_allreduce,
)
from collectives.runtime.link import Link
from mpicomp import (
    AggregationAware,
    Dense,
    ErrorFeedback,
    Hadamard,
    MomentumCorrection,
    NoFeedback,
    Quantised,
    SparseVector,
    StepAhead,
    TopK,
    WarmUp,
)
from mpicomp.bases import Basis
from mpicomp_bench.bench.compressors import COMPRESSORS

SHAPES = {"a": (40, 8), "b": (7,), "c": (30, 30), "d": (257,), "e": (1,), "f": (64,)}
LENGTH = sum(int(np.prod(shape)) for shape in SHAPES.values())
DTYPES = np.float32, np.float64, np.float16
STEPS = 3
SIZES = 1, 2, 4


class Reversed(Basis):
    """A basis of a user: each chunk in reverse."""

    def _forward(self, vector, out):  # type: ignore[no-untyped-def]
        whole = vector.size // self.chunk * self.chunk
        values = vector.copy()
        rows = values[:whole].reshape(-1, self.chunk)
        out[:whole] = rows[:, ::-1].reshape(-1)
        out[whole:] = values[whole:][::-1]

    _inverse = _forward


def largest(vector, comm):  # type: ignore[no-untyped-def]
    """Sum by a collective of a user."""
    return Sum(*gtopk_allreduce(vector, comm, k=9))


FEEDBACKS = {
    "error": ErrorFeedback,
    "decay": partial(ErrorFeedback, decay=0.9),
    "in_place": partial(ErrorFeedback, in_place=True),
    "none": NoFeedback,
    "momentum": partial(MomentumCorrection, 0.9),
    "unmasked": partial(MomentumCorrection, 0.5, masking=False),
    "ahead": partial(StepAhead, 0.5),
    "ahead momentum": partial(StepAhead, 0.25, 0.9),
}
COMPRESS = {
    **COMPRESSORS,
    "Quota": partial(AggregationAware, metric="quota"),
    "WarmUp": lambda density: WarmUp(TopK(density), [0.25, 0.25]),
    "Lloyd of chunks": lambda density: Quantised(
        COMPRESSORS["ChunkedTopK"](density), "sign"
    ),
}
SPARSE = {
    "sparse": None,
    "gtopk": partial(gtopk_allreduce, k=20),
    "gtopk tree": partial(gtopk_allreduce, k=20, algorithm="tree"),
    "gather": sparse_allgather,
    "doubling": partial(sparse_allreduce, algorithm="recursive_doubling"),
    "both ways": partial(compressed_allreduce, compressor=TopK(0.1)),
    "own": largest,
}
FULL = {
    "dense": dense_allreduce,
    **{
        f"{bits} bits": partial(quantised_allreduce, bits=bits, block=32)
        for bits in (8, 4, 2, 1)
    },
    "long blocks": partial(quantised_allreduce, bits=4, block=512),
}
BASES = {"none": None, "walsh": Hadamard(16), "own": Reversed(10)}
LAYOUTS = (
    "array",
    "list",
    "named",
    "named out",
    "out",
    "same",
    "sparse",
    "named sparse",
    "overlapped",
)
AVERAGES = True, False, "sign", "contributors"


class Messages:
    """The sum of the hashes of the messages that this rank sends: their order does not count."""

    def __init__(self) -> None:
        self.total = 0
        send, reduce = Link.send, Link.reduce

        def sent(link: Link, buffer: Any, dest: int, *rest: Any, **more: Any) -> Any:
            self.add(dest, buffer)
            return send(link, buffer, dest, *rest, **more)

        def reduced(link: Link, array: Any, total: Any) -> Any:
            self.add(-1, array)
            return reduce(link, array, total)

        vars_of: Any = Link
        vars_of.send, vars_of.reduce = sent, reduced

    def add(self, dest: int, buffer: Any) -> None:
        """Count a message, to a rank."""
        digest = sha256(f"{dest} ".encode() + np.ascontiguousarray(buffer).tobytes())
        self.total += int.from_bytes(digest.digest()[:8], "little")

    def take(self) -> bytes:
        """Return what was counted since the last call."""
        total = self.total % 2**64
        self.total = 0
        return total.to_bytes(8, "little")


def gradients(rank: int, step: int, dtype: Any, seed: int) -> dict[str, Any]:
    """Return gradients by name: heavy tails, zeros and ties."""
    rng = np.random.default_rng([seed, step, rank])
    made = {}
    for name, shape in SHAPES.items():
        values = rng.standard_t(3, shape) + 2 * np.random.default_rng(
            seed
        ).standard_normal(shape)
        values[rng.random(shape) < 0.1] = 0
        ties = rng.random(shape) < 0.1
        values[ties] = np.sign(values[ties])
        made[name] = values.astype(dtype)
    return made


def content(part: Any) -> bytes:
    """Return the bits of a result, or of something that is kept."""
    if isinstance(part, SparseVector):
        return b"S%d" % part.length + content(part.indices) + content(part.values)
    if isinstance(part, dict):
        return b"".join(str(name).encode() + content(one) for name, one in part.items())
    if isinstance(part, list | tuple):
        return b"".join(map(content, part))
    if isinstance(part, np.ndarray):
        return f"{part.dtype}{part.shape}".encode() + part.tobytes()
    return repr(part).encode()


def kept(exchange: GradientExchange) -> bytes:
    """Return what feedbacks and compressors of an exchange keep."""
    parts = []
    for bucket in exchange.buckets:
        feedback = bucket.feedback
        parts += [feedback.residual, getattr(feedback, "velocity", None)]
        for run in bucket.selection.runs:
            for compressor in run.compressor.chain():
                parts += [getattr(compressor, name) for name in compressor.state]
    return content(parts)


def take(exchange: GradientExchange, layout: str, arrays: dict[str, Any]) -> Any:
    """Take a step in a layout; return the mean, and what was written."""
    values = [*arrays.values()]
    flat = np.concatenate([value.reshape(-1) for value in values])
    outs = {name: np.full_like(value, np.nan) for name, value in arrays.items()}
    if layout == "array":
        return exchange(flat), flat
    if layout == "list":
        return exchange(values), values
    if layout == "named":
        return exchange(arrays), arrays
    if layout == "named out":
        del outs["c"]
        return exchange(arrays, out=outs), arrays
    if layout == "out":
        out = np.full_like(flat, np.nan)
        return exchange(flat, out=out), out, flat
    if layout == "same":
        return exchange(arrays, out=arrays), arrays
    if layout == "sparse":
        return exchange(flat, sparse=True), flat
    if layout == "named sparse":
        return exchange(arrays, sparse=True), arrays
    for name in reversed(arrays):
        exchange.start(name, arrays[name])
    return exchange.finish(), arrays


def steps(
    comm: Any, seed: int, layout: str, dtype: Any, messages: Messages, **settings: Any
) -> Iterator[tuple[str, bytes]]:
    """Yield the bits of some steps, by part; of an error its type."""
    try:
        with np.errstate(all="ignore"):
            exchange = GradientExchange(comm, **settings)
            for step in range(STEPS):
                arrays = gradients(comm.rank, step, dtype, seed)
                if settings.get("nonfinite") == "skip" and step == 1 and comm.rank == 0:
                    arrays["c"][3, 3] = np.inf
                yield "means", content(take(exchange, layout, arrays))
                yield "kept", kept(exchange)
                yield "messages", messages.take()
                counts = exchange.statistics
                yield "counts", content([*counts[:5], counts.wire_nbytes])
    except Exception as error:
        yield "errors", f"{type(error).__name__}: {error}".encode()
        messages.take()


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a kind and settings."""
    number = 0

    def case(
        kind: str, layouts: Any = LAYOUTS, **settings: Any
    ) -> tuple[str, dict[str, Any]]:
        nonlocal number
        number += 1
        settings.setdefault("dtype", DTYPES[number % 3])
        settings.setdefault("layout", layouts[number % len(layouts)])
        if settings["layout"].startswith(("named", "same", "over")):
            settings.setdefault("small", (0, 50)[number % 2])
            settings.setdefault("bucket_nbytes", (None, 2000)[number % 4 // 2])
        return kind, settings

    for compressor in COMPRESS.values():
        for feedback in FEEDBACKS.values():
            for basis in BASES.values() if number % 2 else (None,):
                yield case(
                    "methods",
                    compressor=compressor(0.05),
                    feedback=feedback(),
                    basis=basis,
                )
    for name, collective in SPARSE.items():
        for layout in LAYOUTS:
            for average in AVERAGES:
                settings = {
                    "layout": layout,
                    "average": average,
                    "collective": collective,
                }
                yield case(name, compressor=TopK(0.03), **settings)
        for feedback in FEEDBACKS.values():
            for basis in BASES.values():
                settings = {
                    "feedback": feedback(),
                    "basis": basis,
                    "collective": collective,
                }
                yield case(name, compressor=TopK(k=5), **settings)
    for name, collective in FULL.items():
        for layout in LAYOUTS:
            for dtype in DTYPES:
                average = AVERAGES[number % 3]
                settings = {"layout": layout, "dtype": dtype, "average": average}
                yield case(name, compressor=Dense(), collective=collective, **settings)
        for feedback in FEEDBACKS.values():
            for basis in BASES.values():
                settings = {"feedback": feedback(), "basis": basis}
                yield case(name, compressor=Dense(), collective=collective, **settings)
    for collective in (*SPARSE.values(), *FULL.values()):
        for layout in LAYOUTS:
            compressor = Dense() if collective in FULL.values() else TopK(0.1)
            settings = {"layout": layout, "nonfinite": "skip", "collective": collective}
            yield case("skipped", compressor=compressor, **settings)


def of_loops(comm: Any, messages: Messages) -> Iterator[tuple[str, bytes]]:
    """Yield the bits of local steps."""
    number = 0
    for momentum, nesterov in ((0.0, False), (0.9, False), (0.9, True)):
        for delay in (0, 1):
            for settings in (
                {"compressor": TopK(0.1)},
                {"compressor": TopK(0.1), "average": "contributors"},
                {"bits": 4},
                {"compressor": Dense(), "collective": dense_allreduce},
                {"bits": 1, "feedback": ErrorFeedback(decay=0.5)},
                {"compressor": Quantised(TopK(0.1), "sign")},
            ):
                number += 1
                for dtype in DTYPES:
                    parameters = gradients(0, 0, dtype, 7)
                    exchange = GradientExchange(
                        comm, small=(0, 50)[number % 2], **settings
                    )
                    loop = OuterLoop(
                        exchange, parameters, 2, 0.5, momentum, nesterov, delay
                    )
                    for step in range(5):
                        for name, value in gradients(comm.rank, step, dtype, 3).items():
                            parameters[name] -= dtype(0.01) * value
                        loop.step()
                    yield "means", content(parameters)
                    yield "kept", kept(exchange)
                    yield "messages", messages.take()


def of_collectives(comm: Any, messages: Messages) -> Iterator[tuple[str, bytes]]:
    """Yield the bits of calls of collectives."""
    for number, dtype in enumerate(DTYPES):
        array = np.concatenate(
            [
                value.reshape(-1)
                for value in gradients(comm.rank, 1, dtype, number).values()
            ]
        )
        vector = TopK(0.05).compress(array)
        for bits in (8, 4, 2, 1):
            for block in (32, 1024):
                yield "means", content(quantised_allreduce(array, comm, bits, block))
                out = np.empty_like(array), array.copy()
                yield (
                    "means",
                    content(quantised_allreduce(out[1], comm, bits, block, out=out)),
                )
        yield "means", content(dense_allreduce(array, comm))
        yield "means", content(sparse_allreduce(vector, comm))
        yield "means", content(compressed_allreduce(vector, comm, TopK(k=3)))
        yield "means", content(collectives.sparse_reduce_scatter(vector, comm))
        yield "messages", messages.take()


def main() -> None:
    """Run all cases, and print the hashes on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", metavar="FILE", help="write a line for each case")
    parser.add_argument("--every", type=int, default=1, help="take every nth case")
    options = parser.parse_args()
    os.environ.pop("MPICOMP_CHECK", None)
    messages = Messages()
    world = MPI.COMM_WORLD
    hashes: dict[tuple[str, str], Any] = {}
    lines = []
    for size in [size for size in SIZES if size <= world.size]:
        comm = world.Split(0 if world.rank < size else MPI.UNDEFINED)
        if comm == MPI.COMM_NULL:
            world.Barrier()
            continue
        dense_allreduce(
            np.zeros(1, np.float32), comm
        )  # the first call has messages of its own
        messages.take()
        runs = [
            (kind, steps, {"seed": seed, **settings})
            for seed, (kind, settings) in enumerate(cases())
        ]
        runs += [("local steps", of_loops, {}), ("calls", of_collectives, {})]
        for number, (kind, run, settings) in list(enumerate(runs))[:: options.every]:
            own = sha256()
            for part, bits in run(comm, messages=messages, **settings):
                own.update(bits)
                for key in (kind, part), ("all", part):
                    hashes.setdefault(key, sha256()).update(bits)
            shown = {name: value for name, value in settings.items() if name != "seed"}
            lines.append(f"{size} {number} {own.hexdigest()[:12]} {kind} {shown}")
        comm.Free()
        world.Barrier()
    mine = {key: value.hexdigest() for key, value in hashes.items()}
    everyone = world.gather((mine, lines))
    if world.rank:
        return
    every = sorted({key for hashed, _ in everyone for key in hashed})
    for key in every:
        texts = [hashed.get(key, "") for hashed, _ in everyone]
        print(sha256("".join(texts).encode()).hexdigest()[:16], *key)
    whole = repr([sorted(hashed.items()) for hashed, _ in everyone])
    print(sha256(whole.encode()).hexdigest()[:16], "everything")
    if options.cases:
        with open(options.cases, "w") as file:
            for rank, (_, written) in enumerate(everyone):
                file.writelines(f"rank {rank} of {line}\n" for line in written)


if __name__ == "__main__":
    main()
