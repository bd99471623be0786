"""The faults of published code, one by one: each test fails on a library that has the fault.

Device buffers that are staged message by message have no test yet: arrays on a device
are refused (test_arrays.py). What a rank that contributes another length, dtype or k
gets instead of a hang is the table in test_arguments.py.
"""

import pathlib
import re
import time

import numpy as np
import pytest
from cases import (
    assert_equal,
    assert_same_bits,
    bits,
    contribution,
    contributions,
    select,
    window,
)

import collectives
from collectives import (
    GradientExchange,
    allreduce,
    gtopk_allreduce,
    sparse_allreduce,
    traffic,
)
from collectives.calls.first_call import link_of
from collectives.runtime.engine import of_process
from mpicomp import ErrorFeedback, SparseVector, TopK

SUMS = pytest.mark.parametrize("algorithm", allreduce.ALGORITHMS)
SELECTIONS = pytest.mark.parametrize("algorithm", gtopk_allreduce.algorithms)


def test_a_barrier_every_round():
    """Ranks meet at the first call on a communicator, and at the end of a script of the launcher, once each."""
    paths = pathlib.Path(collectives.__file__).parent.rglob("*.py")
    once = "__main__.py", "first_call.py"
    sources = "".join(path.read_text() for path in paths if path.name not in once)
    assert not re.search(r"(?i)\.i?barrier\b", sources)


@pytest.mark.exactly(4)
def test_ranks_that_need_nothing_of_a_late_one_do_not_wait_for_it(comm):
    """In the first round of a butterfly ranks 2 and 3 meet each other only; rank 0 comes late."""
    link = link_of(comm)
    if comm.rank == 0:
        comm.recv(source=2)  # comes only when rank 2 is in its second round
    before = link.traffic.messages
    request = collectives.gtopk_iallreduce(
        contribution("random", comm.rank, comm.size), comm, 9
    )
    if comm.rank == 2:
        while link.traffic.messages - before < 2:
            assert not request.test()
        comm.send(None, 0)
    request.wait()


@SUMS
def test_indices_as_floats(comm, algorithm):
    """Neighbours above 2^24 are one number in float32, above 2^53 in float64."""
    if algorithm == "dense_mpi" and comm.size > 2:
        return  # takes seconds, and is as on two ranks
    first = 2**24 if algorithm == "dense_mpi" else 2**62
    vector = SparseVector([first, first + 1, first + 3], [1.0, 2.0, 4.0], first + 4)
    total = sparse_allreduce(vector, comm, algorithm=algorithm)
    kept = np.flatnonzero(total.values)
    assert total.indices[kept].tolist() == [first, first + 1, first + 3]
    assert total.values[kept].tolist() == [comm.size, 2 * comm.size, 4 * comm.size]


@pytest.mark.parametrize("algorithm", ["split_allgather", "node_lanes"])
@pytest.mark.parametrize("length", [2**31 - 1, 2**62])
def test_sums_of_boundaries_that_overflow(comm, algorithm, length):
    """P times the length is beyond 32 bits, and beyond 64; shares at both ends of the index space."""
    positions = np.r_[0:200, length - 200 : length]
    total = sparse_allreduce(
        SparseVector(positions, np.ones(400, np.float32), length),
        comm,
        algorithm=algorithm,
    )
    assert total.indices.tolist() == positions.tolist()
    assert (total.values == comm.size).all()


def test_the_world_in_place_of_the_communicator(comm):
    """Two halves at once, in reversed order of the ranks, over several collectives."""
    half = comm.Split(comm.rank % 2, -comm.rank)
    mine = contribution("random", half.rank, half.size)
    whole = sum(window(vector) for vector in contributions("random", half.size))
    for algorithm in allreduce.ALGORITHMS:
        assert_equal(sparse_allreduce(mine, half, algorithm=algorithm), whole)
    assert_equal(gtopk_allreduce(mine, half, 9, algorithm="exact")[0], select(whole, 9))
    half.Free()


@SUMS
def test_sends_that_nobody_waits_for(comm, algorithm, monkeypatch):
    """Every request of MPI's that a collective makes has ended when it returns."""
    link, made = link_of(comm), []
    send = link.send

    def recording(*message):
        made.append(send(*message))
        return made[-1]

    monkeypatch.setattr(link, "send", recording)
    sparse_allreduce(
        contribution("random", comm.rank, comm.size), comm, algorithm=algorithm
    )
    assert comm.size == 1 or made
    # null: it has ended
    assert not any(request for sending in made for request in sending._requests)
    assert not of_process()._in_flight


@pytest.mark.parametrize("late", [0, -1])
@SUMS
def test_sums_in_the_order_of_arrival(comm, algorithm, late):
    """Whichever rank comes late, the sum of real numbers has the same bits."""
    values = np.random.default_rng(comm.rank).standard_normal(300).astype(np.float32)
    vector = SparseVector(np.arange(300), values, 300)
    one = sparse_allreduce(vector, comm, algorithm=algorithm)
    if comm.rank == late % comm.size:
        time.sleep(0.02)
    other = sparse_allreduce(vector, comm, algorithm=algorithm)
    assert bits(one) == bits(other)
    assert_same_bits(comm, other)


@pytest.mark.at_least(2)
def test_hundreds_of_silently_dense_steps(comm):
    """The first step of an exchange sends as little as the tenth, beside the settings that the ranks compare."""
    exchange = GradientExchange(
        comm, TopK(density=0.01), ErrorFeedback(), gtopk_allreduce
    )
    gradient, sent = (
        np.random.default_rng(comm.rank).standard_normal(100_000).astype(np.float32),
        [],
    )
    for _ in range(10):
        before = traffic(comm).nbytes
        exchange(gradient)
        sent.append(traffic(comm).nbytes - before)
    assert max(sent) <= 1.05 * min(sent) + 4096
    assert sent[0] < 0.1 * gradient.nbytes * (comm.size - 1)
