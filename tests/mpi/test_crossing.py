"""Long messages: those that cross wait for each other, and all come in pieces; short ones here, called long."""

import numpy as np
import pytest
from cases import LENGTH, assert_equal, bits, contribution, contributions, window

from collectives import (
    DamagedMessageError,
    allreduce,
    gtopk_allreduce,
    gtopk_iallreduce,
    sparse_allgather,
    sparse_iallreduce,
    traffic,
)
from collectives.calls.first_call import link_of
from collectives.runtime import messages

SUMS = tuple(allreduce.ALGORITHMS)
SELECTIONS = tuple(gtopk_allreduce.algorithms)
CALLED_LONG = pytest.mark.parametrize(
    "long", [(64, 1 << 23), (64, 64), (128, 192), (1 << 17, 64)]
)


def call_long(monkeypatch, long):
    monkeypatch.setattr(messages, "BIDIRECTIONAL", long[0])
    monkeypatch.setattr(messages, "PIECE", long[1])


def all_of(comm, vector):
    """Return the bits that every collective makes of this vector and those of the other ranks."""
    sums = [
        bits(sparse_iallreduce(vector, comm, algorithm=name).wait()) for name in SUMS
    ]
    selections = [
        gtopk_iallreduce(vector, comm, 20, algorithm=name).wait() for name in SELECTIONS
    ]
    return [
        sums,
        [bits(p) for each in selections for p in each],
        [bits(p) for p in sparse_allgather(vector, comm)],
    ]


@CALLED_LONG
@pytest.mark.parametrize("pattern", ["random", "unequal", "one_holds_all"])
def test_the_bits_and_the_traffic_are_the_same(comm, long, pattern, monkeypatch):
    vector = contribution(pattern, comm.rank, comm.size)
    before = traffic(comm)
    expected = all_of(comm, vector)
    between = traffic(comm)
    call_long(monkeypatch, long)
    assert all_of(comm, vector) == expected
    after = traffic(comm)
    assert after.nbytes - between.nbytes == between.nbytes - before.nbytes
    assert after.messages - between.messages == between.messages - before.messages


@CALLED_LONG
def test_several_in_flight_end_in_any_order(comm, long, monkeypatch):
    call_long(monkeypatch, long)
    every = contributions("unequal", comm.size)
    started = [
        sparse_iallreduce(every[comm.rank], comm, algorithm=name) for name in SUMS
    ]
    started += [
        gtopk_iallreduce(every[comm.rank], comm, LENGTH, algorithm=name)
        for name in SELECTIONS
    ]
    for place in np.random.default_rng(comm.rank).permutation(len(started)):
        total = started[place].wait()
        assert_equal(
            total[0] if place >= len(SUMS) else total,
            sum(window(vector) for vector in every),
        )


class Watched:
    """A communicator that writes down what is started on it."""

    def __init__(self, comm):
        self.comm, self.events = comm, []

    def __getattr__(self, name):
        def call(*arguments):
            got = getattr(self.comm, name)(*arguments)
            if got is not None:
                self.events.append(name)
            return got

        return call


@pytest.mark.exactly(2)
@pytest.mark.parametrize("polls", [False, True])
@pytest.mark.parametrize("lines", [(2, 3), (2, 1), (1, 2), (1, 1)])
def test_a_long_message_leaves_when_the_other_is_known_and_before_it_is_received(
    comm, fresh, lines, polls, monkeypatch
):
    monkeypatch.setattr(messages, "BIDIRECTIONAL", 64)
    link, peer = link_of(fresh), 1 - comm.rank
    duplicate, link.comm = link.comm, Watched(link.comm)
    arrival = link.receive(peer, 5)
    sending = link.send(
        np.full(64 * lines[comm.rank], comm.rank, np.uint8), peer, 5, arrival
    )
    while polls and not (arrival.test() and sending.test()):
        pass
    arrival.wait()
    sending.wait()
    watched, link.comm = link.comm, duplicate
    assert arrival.buffer.tolist() == [peer] * 64 * lines[peer]
    leaves, received = ["Isend"] * (lines[comm.rank] > 1), ["Irecv"] * (lines[peer] > 1)
    assert watched.events == [
        "Isend",
        "Improbe" if polls else "Mprobe",
        *leaves,
        *received,
    ]


@pytest.mark.exactly(2)
@pytest.mark.parametrize("said", [-64, 0, 100])
def test_an_announcement_that_no_message_has_is_damage(comm, fresh, said):
    link, peer = link_of(fresh), 1 - comm.rank
    sending = link.comm.Isend(np.array([said]), peer, 5)
    with pytest.raises(DamagedMessageError, match=f"a size header of {said} bytes"):
        link.receive(peer, 5).wait()
    sending.Wait()
