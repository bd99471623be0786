"""Inputs that every rank can rebuild for every rank, and dense NumPy oracles. Values are integers: sums are exact."""

import inspect
import io
import itertools
import os
import zlib
from functools import partial, wraps

import numpy as np

from collectives import compressed_allreduce, gtopk_allreduce
from collectives.exchange.checkpoint import HEADER, header_of, pack
from mpicomp import (
    ErrorFeedback,
    MomentumCorrection,
    NoFeedback,
    SparseVector,
    StepAhead,
)
from mpicomp.compressors.common import Density, at_positions, finite_vector
from mpicomp.compressors.selection import Selection
from mpicomp.vector import add_up, intersection, top_k
from mpicomp_bench.bench.compressors import COMPRESSORS

LENGTH = 240
# like others for a test: each is one of them, quantised in another way
DOUBLES = "Quantised-float16", "Quantised-sign", "ChunkedTopK-two_bit", "SIDCo-gamma"


# Every feedback of the library, and its kinds; tests of all of them iterate over it.
FEEDBACKS = {
    "error feedback": ErrorFeedback,
    "decay": partial(ErrorFeedback, decay=0.5),
    "in place": partial(ErrorFeedback, in_place=True),
    "none": NoFeedback,
    "momentum": partial(MomentumCorrection, 0.5),
    "step ahead": partial(StepAhead, 0.5, 0.5),
}


# Those that forget some of what was not sent.
LOSSY = "none", "decay"


def feedbacks_but(*names):
    """Return all feedbacks but those with these names."""
    return {name: make for name, make in FEEDBACKS.items() if name not in names}


def compressors(chunk):
    """Return all compressors of `mpicomp bench compressors` but for doubles: by name, functions of a density."""
    makers = {name: make for name, make in COMPRESSORS.items() if name not in DOUBLES}
    return {**makers, "ChunkedTopK": partial(COMPRESSORS["ChunkedTopK"], chunk=chunk)}


def _random(rng, rank, size):
    return np.flatnonzero(rng.random(LENGTH) < 0.15), None


def _unequal(rng, rank, size):
    return np.sort(rng.choice(LENGTH, (rank * rank * 5) % 100, replace=False)), None


def _empty(rng, rank, size):
    return np.arange(0), None


def _one_holds_all(rng, rank, size):
    return np.arange(LENGTH if rank == size - 1 else 0), None


def _identical(rng, rank, size):
    positions = np.arange(3, LENGTH, 7)
    return positions, 1 + positions % 9


def _same_support(rng, rank, size):
    return np.arange(3, LENGTH, 7), None


def _disjoint(rng, rank, size):
    return np.arange(rank, LENGTH, 2 * size), None


def _nested(rng, rank, size):
    return np.arange(0, LENGTH, rank + 1), None


def _cancelling(rng, rank, size):
    positions = np.arange(0, LENGTH, 4)
    return positions, (1 + positions % 5) * (-1) ** rank


def _ties(rng, rank, size):
    positions = np.flatnonzero(rng.random(LENGTH) < 0.3)
    return positions, rng.choice([-1, 1], positions.size)


def _blocks(rng, rank, size):
    return np.arange(LENGTH * rank // size, LENGTH * (rank + 1) // size), None


PATTERNS = {
    pattern.__name__[1:]: pattern
    for pattern in (
        _random,
        _unequal,
        _empty,
        _one_holds_all,
        _identical,
        _same_support,
        _disjoint,
        _nested,
        _cancelling,
        _ties,
        _blocks,
    )
}


def combinations(choices):
    """Yield every other combination of several choices, which has each of them; all in make test-all, and of one."""
    has_all = len(choices) == 1 or os.environ.get("MPI_TEST_ALL")
    for numbered in itertools.product(*map(enumerate, choices.values())):
        places, values = zip(*numbered, strict=True)
        if has_all or sum(places) % 2 == 0:
            yield dict(zip(choices, values, strict=True))


def for_each(**choices):
    """Run a test for combinations of choices, in one go: parameters of pytest cost more than a small collective.

    A failure says in which case it was.
    """

    def looped(test):
        @wraps(test)
        def run(**fixtures):
            for case in combinations(choices):
                try:
                    test(**fixtures, **case)
                except Exception as error:
                    raise AssertionError(f"{case}: {error}") from error

        signature = inspect.signature(test)
        own = [
            parameter
            for name, parameter in signature.parameters.items()
            if name not in choices
        ]
        run.__signature__ = signature.replace(parameters=own)
        return run

    return looped


def contribution(pattern, rank, size, dtype=np.float32, length=LENGTH, offset=0):
    """Return what `rank` of `size` contributes: integers of magnitude 1 to 9 at indices moved by `offset`."""
    rng = np.random.default_rng([zlib.crc32(pattern.encode()), size, rank])
    positions, values = PATTERNS[pattern](rng, rank, size)
    if values is None:
        values = rng.integers(1, 10, positions.size) * rng.choice(
            [-1, 1], positions.size
        )
    return SparseVector(positions + offset, values.astype(dtype), length)


def contributions(pattern, size, **options):
    return [contribution(pattern, rank, size, **options) for rank in range(size)]


def window(vector, offset=0):
    """Return the LENGTH dense values from `offset` on, in float64; nothing may stand outside of them."""
    dense = np.zeros(LENGTH)
    dense[vector.indices - offset] = vector.values
    return dense


def select(dense, k):
    """Return the k largest magnitudes of a dense vector in place, zeros elsewhere; ties to the lowest index."""
    order = np.lexsort((np.arange(dense.size), -np.abs(dense)))[:k]
    kept = np.zeros_like(dense)
    kept[order] = dense[order]
    return kept


def combine(one, other):
    """Return the k largest of the sum of two (vector, k), and k: the larger one."""
    k = max(one[1], other[1])
    return select(one[0] + other[0], k), k


def butterfly_sum(dense, counts):
    """Return what gTop-k by recursive doubling gives for the ranks' dense vectors; `counts` is every rank's k."""

    held = [(select(vector, k), k) for vector, k in zip(dense, counts, strict=True)]
    core = 2 ** int(np.log2(len(held)))
    for rank in range(core, len(held)):
        held[rank - core] = combine(held[rank - core], held[rank])
    distance = 1
    while distance < core:
        held = [combine(held[rank], held[rank ^ distance]) for rank in range(core)]
        distance *= 2
    return held[0][0]


def bits(vector):
    """Return everything that two equal vectors have in common, byte for byte."""
    return (
        vector.length,
        str(vector.dtype),
        vector.indices.tobytes(),
        vector.values.tobytes(),
    )


def assert_same_bits(comm, vector):
    everywhere = comm.allgather(bits(vector))
    assert everywhere.count(everywhere[0]) == comm.size, "the ranks hold different bits"


def assert_equal(vector, dense, offset=0):
    vector.validate()
    np.testing.assert_array_equal(window(vector, offset), dense)


def noisy_gradients(rank, length=50_000):
    """Yield a rank's gradients: a signal that all ranks share, heavy-tailed, and noise of its own in every round."""
    signal, rng = (
        np.random.default_rng(0).standard_t(3, length),
        np.random.default_rng([1, rank]),
    )
    while True:
        yield signal + 3 * rng.standard_normal(length)


def compressed_sum(compressor):
    """Return the collective that compresses the sum as well."""
    return partial(compressed_allreduce, compressor=compressor)


def gathering(vector, group, k):
    """Gather all vectors everywhere, add them up, and select: one round of ceil(lg P), and P k entries."""
    parts = yield from group.gather(vector, vector.nnz)
    total = add_up([theirs for theirs, _ in parts])
    result, dropped = top_k(total, max(count for _, count in parts) if k is None else k)
    return result, intersection(vector, dropped)


def declare_gathering(monkeypatch):
    """Declare `gathering` as an algorithm of gTop-k for the time of a test."""
    monkeypatch.setattr(gtopk_allreduce, "algorithms", dict(gtopk_allreduce.algorithms))
    gtopk_allreduce.algorithm()(gathering)


def normals(shapes, rank, step, dtype=np.float32):
    """Return a rank's gradients of a step by name, drawn from a normal distribution."""
    rng = np.random.default_rng([step, rank])
    return {
        name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()
    }


def integers(shapes, rank, step, dtype=np.float32):
    """Return a rank's gradients of a step by name, integers of magnitude up to 9."""
    rng = np.random.default_rng([step, rank])
    return {
        name: rng.integers(-9, 10, shape).astype(dtype)
        for name, shape in shapes.items()
    }


def is_last(comm):
    return comm.rank == comm.size - 1


def state_of(exchange):
    """Return the bits of the state of an exchange, by name."""
    return {name: array.tobytes() for name, array in exchange.state_dict().items()}


def through_a_file(state):
    """Return a state as it comes back from a file."""
    file = io.BytesIO()
    np.savez(file, **state)
    file.seek(0)
    return dict(np.load(file))


def take_step(feedback, compressor, gradient):
    """Take a step of a feedback method on one rank, and return the vector that is sent."""
    selection = Selection([None], [0, gradient.size], [compressor])
    correction = feedback.correct(gradient)
    sent = selection.select(correction)
    feedback.prepare_residual(correction, sent)()
    return sent


class RandomK(Density):
    """A user's compressor with a state: in each step other random positions, the same on all ranks."""

    state = {"step": (0, 2**62)}

    def __init__(self, density=None, *, k=None, seed=0):
        super().__init__(density, k=k)
        self.seed, self.step = seed, 0

    def compress(self, corrected, *, gradient=None):
        dense = finite_vector(corrected)
        rng, count = (
            np.random.default_rng([self.seed, self.step]),
            min(dense.size, self.counts([dense.size])[0]),
        )
        positions = np.sort(rng.choice(dense.size, count, replace=False, shuffle=False))
        self.step += 1
        return at_positions(dense, positions)


def with_header(state, loop=None, **changes):
    """Return a state whose header, and the facts of its loop, have other values."""
    header = header_of(state) | changes
    if loop is not None:
        header["loop"] |= loop
    return state | {HEADER: pack(header)}
