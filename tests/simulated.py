"""A network inside one process: the collectives' own generators, any number of ranks, no MPI.

Messages carry the round in which they were sent: one more than that of what their sender had sent or received before.
So the number of rounds of an algorithm is seen and not believed. Ranks advance in a random order that a seed fixes.

With `rendezvous` a rank waits as it does inside MPI: for one thing after the other; a message of several lines has left
when it is received, and where it answers another one (`messages.Reply`) it leaves when that one is known.
"""

from collections import defaultdict, deque

import numpy as np

from collectives.channel import Channel
from collectives.messages import LINE
from collectives.terms import Terms
from collectives.transport import Traffic
from collectives.tuning import Tuner


class Network:
    def __init__(self, size, nodes=None, seed=0, tuner=None, rendezvous=False):
        self.tuner, self.rendezvous = tuner or Tuner(), rendezvous
        self.seen = 0  # times that a receiver saw of a message, or took it
        self.boxes = defaultdict(deque)  # (source, dest, tag) -> messages
        self.reductions = []  # the arrays that came so far, for each Allreduce in order
        self.endpoints = [Endpoint(self, rank, size, tuple(nodes or [0] * size)) for rank in range(size)]
        self.rng = np.random.default_rng(seed)

    def run(self, steps_of, **terms):
        """Run steps_of(rank, channel) on every rank; return their results, and the rounds that it took."""
        channels = [Channel(endpoint, Terms("simulated", "one", **terms)) for endpoint in self.endpoints]
        ranks = {rank: steps_of(rank, channel) for rank, channel in enumerate(channels)}
        pending, results = dict.fromkeys(ranks, ()), [None] * len(ranks)
        while ranks:
            moved, before = False, self.seen
            for rank in self.rng.permutation(list(ranks)).tolist():
                if self.complete(pending[rank]):
                    moved = True
                    self.endpoints[rank].end_step()
                    try:
                        pending[rank] = deque(next(ranks[rank]))
                    except StopIteration as end:
                        results[rank] = end.value
                        del ranks[rank]
            assert moved or self.seen > before, f"ranks {list(ranks)} wait for ever"
        assert not any(self.boxes.values()), "messages that nobody received"
        return results, max(endpoint.clock for endpoint in self.endpoints)

    def complete(self, pending):
        if not self.rendezvous:
            return all([one.test() for one in pending])
        while pending and pending[0].test():
            pending.popleft()
        return not pending


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
        message = Message(buffer, self.sent, arrival, self.network.rendezvous and buffer.size > LINE)
        self.network.boxes[self.rank, dest, tag].append(message)
        return message

    def receive(self, source, tag, beside=None):
        return Arrival(self, source, self.network.boxes[source, self.rank, tag])

    def reduce(self, array, total=None):
        while len(self.network.reductions) <= self.reduced:
            self.network.reductions.append([])
        arrays = self.network.reductions[self.reduced]
        arrays.append(array.copy())
        self.reduced += 1
        return Reduction(arrays, self.size)


class Message:
    def __init__(self, buffer, sent, answered, long):
        self.buffer, self.sent, self.received = buffer.copy(), sent, False
        self.answered, self.long = answered if long else None, long

    def left(self):
        return self.answered is None or self.answered.known

    def test(self):
        return self.received or not self.long


class Arrival:
    def __init__(self, endpoint, source, box):
        self.endpoint, self.source, self.box, self.buffer, self.known = endpoint, source, box, None, False

    def test(self):
        if self.buffer is None and self.box:
            if not self.known:
                self.known = True
                self.endpoint.network.seen += 1
            if self.box[0].left():
                message = self.box.popleft()
                self.endpoint.network.seen += 1
                message.received, self.buffer = True, message.buffer
                self.endpoint.clock = max(self.endpoint.clock, message.sent)
        return self.buffer is not None


class Reduction:
    def __init__(self, arrays, size):
        self.arrays, self.size = arrays, size

    def test(self):
        return len(self.arrays) == self.size

    @property
    def total(self):
        return sum(self.arrays)
