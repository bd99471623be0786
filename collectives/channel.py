"""What travels in one operation: sparse vectors, each under the terms that all ranks must share.

A block is an envelope of 32 bytes, a payload (a codec message, or the text of a report), and zeros up to a whole line:

    offset 0   i64  bytes of the block
           8   i64  bytes of the payload
          16   i64  k of the sender, or of its block of ranks
          24   u8   operation, 25 u8 algorithm, 26 u8 state (0 sound, 1 broken), 27 u8 whether k was asked for
          28   4x   zero

A message is one block, or several behind each other.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from collectives import schedule
from collectives.agreement import ALGORITHMS, OPERATIONS, Steps, Terms
from collectives.transport import LINE, Buffer, Endpoint
from mpicomp.codec import decode, encode, encoded_nbytes
from mpicomp.errors import CodecError
from mpicomp.vector import SparseVector

_ENVELOPE = struct.Struct("<qqqBBBB4x")


class Offer(NamedTuple):
    """What a rank, or a block of ranks that agree, brings to a step: a vector, and how many entries may stay."""

    vector: SparseVector
    k: int = 0


class Channel:
    """One operation's way to the other ranks; `broken` once this rank knows that the operation cannot be done.

    error: the reason why this rank brings no sound offer of its own; the channel is then broken from the start.
    """

    def __init__(self, endpoint: Endpoint, terms: Terms, error: Exception | None = None) -> None:
        self.rank, self.size = endpoint.rank, endpoint.size
        self.core = schedule.core_size(endpoint.size)
        self.terms, self.error, self.broken = terms, error, error is not None
        self.endpoint, self._tag = endpoint, endpoint.take_tag()

    def exchange(self, offer: Offer, partner: int) -> Steps[Offer]:
        """Send `offer` to the partner, and return the partner's."""
        arrival = self.endpoint.receive(partner, self._tag)
        yield arrival, self.endpoint.send(self.pack(offer), partner, self._tag)
        return self.unpack(arrival.buffer)

    def send(self, offer: Offer, dest: int) -> Steps[None]:
        """Send `offer` to a rank that receives."""
        yield (self.endpoint.send(self.pack(offer), dest, self._tag),)

    def receive(self, source: int) -> Steps[Offer]:
        """Return what a rank sends."""
        arrival = self.endpoint.receive(source, self._tag)
        yield (arrival,)
        return self.unpack(arrival.buffer)

    def gather_all(self, block: Buffer) -> Steps[list[Buffer]]:
        """Return every rank's block, in rank order: ceil(lg P) rounds, each block travels to each rank once."""
        held = [block]
        for dest, source, blocks in schedule.dissemination(self.rank, self.size):
            arrival = self.endpoint.receive(source, self._tag)
            yield arrival, self.endpoint.send(np.concatenate(held[:blocks]), dest, self._tag)
            held += split(arrival.buffer)
        turn = self.size - self.rank  # held starts with this rank's own block
        return held[turn:] + held[:turn]

    def pack(self, offer: Offer) -> Buffer:
        """Return the block that carries `offer`; a broken channel sends word of that instead, and no entries."""
        if self.broken:
            return self.frame(np.empty(0, np.uint8))
        nbytes = encoded_nbytes(offer.vector)
        block = self._sealed(nbytes, offer.k)
        encode(offer.vector, block[_ENVELOPE.size :])
        return block

    def unpack(self, block: Buffer) -> Offer:
        """Return the offer in a block; an empty one, and the channel is broken, when the terms are not this rank's."""
        _, _, k, operation, algorithm, broken, k_asked = _ENVELOPE.unpack_from(block.data)
        try:
            vector = self._nothing() if broken else decode(payload(block))
        except CodecError:
            broken, vector = True, self._nothing()
        asked = k if k_asked else None
        theirs = (operation, algorithm, vector.length, str(vector.dtype), asked)
        if broken or theirs != (*self._codes(), self.terms.length, self.terms.dtype, self.terms.k):
            self.broken = True
            return Offer(self._nothing(), 0)
        return Offer(vector, k)

    def frame(self, content: Buffer) -> Buffer:
        """Return `content` as the payload of a block."""
        block = self._sealed(content.size, 0)
        block[_ENVELOPE.size : _ENVELOPE.size + content.size] = content
        return block

    def _sealed(self, payload_nbytes: int, k: int) -> Buffer:
        """Return a block with its envelope written and room for the payload."""
        used = _ENVELOPE.size + payload_nbytes
        block = np.empty(-(-used // LINE) * LINE, np.uint8)
        asked = self.terms.k is not None
        _ENVELOPE.pack_into(block.data, 0, block.size, payload_nbytes, k, *self._codes(), self.broken, asked)
        block[used:] = 0
        return block

    def _codes(self) -> tuple[int, int]:
        return OPERATIONS.index(self.terms.operation), ALGORITHMS.index(self.terms.algorithm)

    def _nothing(self) -> SparseVector:
        return SparseVector.empty(self.terms.length, self.terms.dtype)


def payload(block: Buffer) -> Buffer:
    """Return the payload of a block."""
    nbytes = _ENVELOPE.unpack_from(block.data)[1]
    if not 0 <= nbytes <= block.size - _ENVELOPE.size:
        raise CodecError(f"the envelope says {nbytes} bytes, and {block.size - _ENVELOPE.size} are there")
    return block[_ENVELOPE.size : _ENVELOPE.size + nbytes]


def split(message: Buffer) -> Iterator[Buffer]:
    """Yield the blocks of a message one by one."""
    while message.size:
        nbytes = _ENVELOPE.unpack_from(message.data)[0]
        if nbytes < LINE or nbytes % LINE or nbytes > message.size:
            raise CodecError(f"a block says that it has {nbytes} bytes, and {message.size} are there")
        yield message[:nbytes]
        message = message[nbytes:]
