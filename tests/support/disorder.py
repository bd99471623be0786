"""Transports that do to messages what a network may: put in the place of the library's Link, below the algorithms.

`Disordered` holds messages back for a random number of looks, so that those to
different peers, and of different operations, overtake each other; and it cuts them into
pieces that travel in any order. What MPI promises stays: between two ranks the messages
of one operation arrive in the order in which they were sent, whole. `Damaging` changes
one message on its way.
"""

import time
from collections import defaultdict
from contextlib import contextmanager

import numpy as np
from mpi4py import MPI

from collectives.calls import first_call
from collectives.calls.first_call import link_of
from collectives.runtime.link import Link
from collectives.runtime.messages import LINE, NOTHING, Arrival

PIECES, LOOKS = 4, 12  # at most


class Disordered(Link):
    """An link whose messages come late, out of order and in pieces; `seed` and the rank fix how."""

    seed = 0

    def __init__(self, duplicate, *settings, **named):
        super().__init__(duplicate, *settings, **named)
        self.rng = np.random.default_rng([self.seed, self.rank])
        self.outbox = []  # [looks left, piece, dest, tag, its message]
        # messages so far, by peer and tag
        self.sent, self.awaited = defaultdict(int), defaultdict(int)
        self.heard = {}  # (source, tag, number) -> the pieces that are here
        self.looks = self.overtaken = self.cut = 0

    def send(self, buffer, dest, tag, arrival=None, line=NOTHING):
        self.traffic.messages += 1
        self.traffic.nbytes += buffer.size
        lines, number = buffer.size // LINE, self.sent[dest, tag]
        self.sent[dest, tag] += 1
        count = int(self.rng.integers(1, min(PIECES, lines) + 1)) if lines else 1
        cuts = (
            np.sort(self.rng.choice(np.arange(1, lines), count - 1, replace=False))
            * LINE
            if count > 1
            else []
        )
        message = Message(self, count)
        for place, part in enumerate(np.split(buffer, cuts)):
            head = np.zeros(LINE, np.uint8)
            head[:24].view(np.int64)[:] = number, place, count
            self.outbox.append(
                [
                    int(self.rng.integers(LOOKS)),
                    np.concatenate([head, part]),
                    dest,
                    tag,
                    message,
                ]
            )
        self.cut += count > 1
        self.look()
        return message

    def receive(self, source, tag, like=None):
        number = self.awaited[source, tag]
        self.awaited[source, tag] += 1
        return Pieces(self, source, tag, number)

    def look(self):
        """Let go what has waited long enough, in a random order."""
        self.looks += 1
        due = [entry for entry in self.outbox if entry[0] <= 0]
        for place in self.rng.permutation(len(due)):
            _, piece, dest, tag, message = due[place]
            self.overtaken += self.outbox[0] is not due[place]
            self.outbox = [entry for entry in self.outbox if entry is not due[place]]
            message.requests.append(
                (self.comm.Isend([piece, MPI.BYTE], dest, tag), piece)
            )
        for entry in self.outbox:
            entry[0] -= 1


class Message:
    """A message on its way out: complete when all of its pieces have left."""

    def __init__(self, link, count):
        self.link, self.count, self.requests = link, count, []

    def test(self):
        self.link.look()
        return len(self.requests) == self.count and all(
            [request.Test() for request, _ in self.requests]
        )

    def wait(self):
        wait(self)


class Pieces(Arrival):
    """A message on its way in, in pieces, which may be those of a later one."""

    def __init__(self, link, source, tag, number):
        super().__init__(link.comm, source, tag)
        self.link, self.key = link, (source, tag, number)
        self.done = False

    def test(self):
        self.link.look()
        if not self.done:
            self.take()
            pieces = self.link.heard.get(self.key, {})
            if pieces and len(pieces) == next(iter(pieces.values()))[0]:
                self.buffer = np.concatenate(
                    [pieces[place][1] for place in sorted(pieces)]
                )
                self.done = True
                del self.link.heard[self.key]
        return self.done

    def take(self):
        """Take in every piece from this source and operation that is there."""
        source, tag, _ = self.key
        status = MPI.Status()
        while (message := self.link.comm.Improbe(source, tag, status)) is not None:
            piece = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            message.Recv([piece, MPI.BYTE])
            number, place, count = piece[:24].view(np.int64).tolist()
            self.link.heard.setdefault((source, tag, number), {})[place] = (
                count,
                piece[LINE:],
            )

    def wait(self):
        wait(self)


def wait(pending):
    while not pending.test():
        time.sleep(2e-5)


class Damaging(Link):
    """An link that hands the `which`-th message to `change` before it leaves; on the rank `culprit` only."""

    culprit, which = 0, 0

    @staticmethod
    def change(buffer):
        return buffer

    def send(self, buffer, dest, tag, arrival=None, line=NOTHING):
        if self.rank == self.culprit and self.traffic.messages == self.which:
            buffer = self.change(buffer.copy())
        return super().send(buffer, dest, tag, arrival, line)


@contextmanager
def over(kind, comm, **settings):
    """Return a duplicate of a communicator whose link is of a kind, with these settings, for a while."""
    duplicate = comm.Dup()
    sound, first_call.Link = first_call.Link, type(kind.__name__, (kind,), settings)
    try:
        link_of(duplicate)
    finally:
        first_call.Link = sound
    yield duplicate
    duplicate.Free()
