"""A network inside one process: the collectives' own generators, any number of ranks, no MPI.

Messages carry the round in which they were sent: one more than that of what their sender had sent or received before.
So the number of rounds of an algorithm is seen and not believed. Ranks advance in a random order that a seed fixes.
"""

from collections import defaultdict, deque

import numpy as np

from collectives.channel import Channel
from collectives.terms import Terms
from collectives.transport import Traffic
from collectives.tuning import Tuner


class Network:
    def __init__(self, size, nodes=None, seed=0, tuner=None):
        self.tuner = tuner or Tuner()
        self.boxes = defaultdict(deque)  # (source, dest, tag) -> (buffer, round)
        self.reductions = []  # the arrays that came so far, for each Allreduce in order
        self.endpoints = [Endpoint(self, rank, size, tuple(nodes or [0] * size)) for rank in range(size)]
        self.rng = np.random.default_rng(seed)

    def run(self, steps_of, **terms):
        """Run steps_of(rank, channel) on every rank; return their results, and the rounds that it took."""
        channels = [Channel(endpoint, Terms("simulated", "one", **terms)) for endpoint in self.endpoints]
        ranks = {rank: steps_of(rank, channel) for rank, channel in enumerate(channels)}
        pending, results = dict.fromkeys(ranks, ()), [None] * len(ranks)
        while ranks:
            moved = False
            for rank in self.rng.permutation(list(ranks)).tolist():
                if all([one.test() for one in pending[rank]]):
                    moved = True
                    self.endpoints[rank].end_step()
                    try:
                        pending[rank] = next(ranks[rank])
                    except StopIteration as end:
                        results[rank] = end.value
                        del ranks[rank]
            assert moved, f"ranks {list(ranks)} wait for ever"
        assert not any(self.boxes.values()), "messages that nobody received"
        return results, max(endpoint.clock for endpoint in self.endpoints)


class Endpoint:
    def __init__(self, network, rank, size, nodes):
        self.network, self.rank, self.size, self.nodes = network, rank, size, nodes
        self.traffic, self.turns, self.reduced = Traffic(), deque(), 0
        self.tuner, self.checked = network.tuner, False
        self.clock, self.sent = 0, 0  # the last round that this rank took part in, and that it sent in

    def end_step(self):
        self.clock = max(self.clock, self.sent)

    def take_tag(self):
        return 0

    def send(self, buffer, dest, tag, arrival=None):
        self.sent = self.clock + 1
        self.traffic.messages += 1
        self.traffic.nbytes += buffer.size
        self.network.boxes[self.rank, dest, tag].append((buffer.copy(), self.sent))
        return Done()

    def receive(self, source, tag, beside=None):
        return Arrival(self, self.network.boxes[source, self.rank, tag])

    def reduce(self, array, total=None):
        while len(self.network.reductions) <= self.reduced:
            self.network.reductions.append([])
        arrays = self.network.reductions[self.reduced]
        arrays.append(array.copy())
        self.reduced += 1
        return Reduction(arrays, self.size)


class Done:
    def test(self):
        return True


class Arrival:
    def __init__(self, endpoint, box):
        self.endpoint, self.box, self.buffer = endpoint, box, None

    def test(self):
        if self.buffer is None and self.box:
            self.buffer, sent = self.box.popleft()
            self.endpoint.clock = max(self.endpoint.clock, sent)
        return self.buffer is not None


class Reduction:
    def __init__(self, arrays, size):
        self.arrays, self.size = arrays, size

    def test(self):
        return len(self.arrays) == self.size

    @property
    def total(self):
        return sum(self.arrays)
