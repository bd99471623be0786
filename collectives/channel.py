"""What travels in one operation: sparse vectors, each under the terms that all ranks must share.

A block is an envelope of 32 bytes, a payload (a codec message, none for what has no entries, or the text of a report),
and zeros up to a whole line:

    offset 0   i64  bytes of the block
           8   i64  count of the sender, or of its block of ranks: how many entries may stay, say
          16   i64  digest of the terms
          24   u8   1 for the last word of a rank that knows that the operation cannot be done; else 0
          25   u8   zeros behind the payload
          28   u32  CRC-32 of the block with zeros here, in the debug mode (`collectives.checking`); else 0

A message is one block, or several behind each other. MPI and what is below it see to it that messages arrive whole:
without the debug mode nothing is added to that. A block that is damaged nevertheless is told from a sound one where its
structure shows it, and in the debug mode always: `DamagedMessageError`. What the rank missed it cannot make up for, so
it does not go on through the schedule, but gives up as at a deadline (`deadline`).
"""

import json
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from copy import copy
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from collectives import schedule
from collectives.messages import LINE, Arrival, Buffer, Sending, Steps
from collectives.terms import Terms, digest
from collectives.transport import Endpoint, Turn
from collectives.tuning import Tuner
from mpicomp.arrays import namespace, on_device, read_fields, to_numpy, write_fields
from mpicomp.codec import CODECS, decode, encoded_nbytes, fill
from mpicomp.errors import CodecError, DamagedMessageError
from mpicomp.vector import SparseVector

_ENVELOPE = struct.Struct("<qqqBB2xI")  # one half of a line
_CRC, _CRC_AT = struct.Struct("<I"), 28
_NAP = 2e-5  # seconds


class Offer(NamedTuple):
    """What a rank, or a block of ranks that agree, brings to a step: a vector, and how many entries may stay."""

    vector: SparseVector
    k: int = 0


class DisagreementError(Exception):
    """Say inside an operation that its terms are not those of all ranks, or that a rank has an error."""


class Channel:
    """One operation's way to the other ranks, or to some of them.

    error: the reason why this rank brings no sound offer of its own.
    beside: an array that lives where what arrives is to live, main memory or a device; what others have is up to them.
    codec: how vectors are written; "auto" is what the communicator's `Tuner` says: without a profile "quick" inside a
    node, where copying is faster than coding, else "smallest".
    """

    reserved: Turn | None = None  # the place in the queue that the operation's `turn` is to have

    def __init__(
        self,
        endpoint: Endpoint,
        terms: Terms,
        error: Exception | None = None,
        *,
        codec: str = "auto",
        beside: Any = None,
    ) -> None:
        self.beside = beside
        self.terms, self.error, self.last = terms, error, dict[int, Buffer]()  # last words of other ranks
        self._digest = digest(terms)
        self.endpoint, self._tag, self.codec = endpoint, endpoint.take_tag(), codec
        self._seat(range(endpoint.size), endpoint.nodes)

    def _seat(self, ranks: Sequence[int], marks: tuple[int, ...]) -> None:
        self._ranks, self._marks = ranks, marks
        self.rank, self.size = ranks.index(self.endpoint.rank), len(ranks)
        self.core = schedule.core_size(self.size)
        by_link = partial(self.endpoint.tuner.coding, apart=len(self.nodes()) > 1)
        self._coding = by_link if self.codec == "auto" else CODECS[self.codec]

    def among(self, ranks: Sequence[int]) -> "Channel":
        """Return the channel between some of its ranks only, numbered in this order; this rank is one of them."""
        inner = copy(self)
        inner._seat([self._ranks[rank] for rank in ranks], tuple([self._marks[rank] for rank in ranks]))
        return inner

    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each node: those that share memory; the nodes in the order of their first ranks."""
        return schedule.groups(self._marks)

    def node_sizes(self) -> tuple[int, ...]:
        """Return the number of ranks on each node."""
        return schedule.group_sizes(self._marks)

    @property
    def tuner(self) -> Tuner:
        """What chooses for this communicator, alike on all ranks."""
        return self.endpoint.tuner

    @property
    def root(self) -> int:
        """The root that the ranks agreed on."""
        return self.terms.root or 0

    @property
    def number(self) -> int:
        """Which operation on the communicator it is, counted from 0; every rank counts alike."""
        return self._tag

    def turn(self) -> Turn:
        """Queue up for MPI's own collectives; call it before the first yield, so that all ranks queue alike."""
        return self.reserved or Turn(self.endpoint.turns)

    def agree(self) -> Steps[None]:
        """Compare the terms before anything else: ceil(lg P) messages of a line; raises DisagreementError.

        For schedules in which a rank does not hear of every other one, or which themselves depend on the terms.
        """
        yield from self.gather(Offer(self.nothing))

    def exchange(self, offer: Offer, partner: int) -> Steps[Offer]:
        """Send `offer` to the partner, and return the partner's."""
        arrival = self._arrival(partner, self.beside)
        yield arrival, self._sending(self.pack(offer), partner, arrival)
        return self.unpack(arrival.buffer, arrival.source)

    def send(self, offer: Offer, dest: int) -> Steps[None]:
        """Send `offer` to a rank that receives."""
        yield (self._sending(self.pack(offer), dest),)

    def receive(self, source: int) -> Steps[Offer]:
        """Return what a rank sends."""
        arrival = self._arrival(source, self.beside)
        yield (arrival,)
        return self.unpack(arrival.buffer, arrival.source)

    def gather(self, offer: Offer) -> Steps[list[Offer]]:
        """Return every rank's offer, in rank order."""
        blocks = yield from self.gather_all(self.pack(offer))
        return [self.unpack(block) for block in blocks]

    def gather_all(self, block: Buffer) -> Steps[list[Buffer]]:
        """Return every rank's block, in rank order: ceil(lg P) rounds, each block travels to each rank once."""
        held = [block]
        for dest, source, blocks in schedule.dissemination(self.rank, self.size):
            arrival = self._arrival(source, block)
            yield arrival, self._sending(np.concatenate(held[:blocks]), dest, arrival if source == dest else None)
            came = list(split(arrival.buffer))
            if came:
                self._keep_last(_opened(came[0]), came[0], arrival.source)
            if len(came) != blocks:
                if any(self._checked(each)[2] != self._digest for each in came):
                    raise DisagreementError
                raise DamagedMessageError(f"a message arrived damaged: of {blocks} blocks {len(came)} are there")
            held += came
        turn = self.size - self.rank  # held starts with this rank's own block
        return held[turn:] + held[:turn]

    def gather_texts(self, text: str) -> Steps[list[str]]:
        """Return every rank's text, in rank order."""
        blocks = yield from self.gather_all(self.frame(text.encode()))
        for each in blocks:
            self._checked(each)
        return [payload(each).tobytes().decode() for each in blocks]

    def all_to_all(self, offers: Sequence[Offer]) -> Steps[list[Offer]]:
        """Send the j-th offer to rank j, and return what the ranks offer this one, in rank order. One step."""
        received = list(offers)  # its own among them
        arrivals = {source: self._arrival(source, self.beside) for source in schedule.hearing(self.rank, self.size)}
        sendings = [
            self._sending(self.pack(offers[dest]), dest, arrivals[dest] if source == dest else None)
            for dest, source in schedule.rotation(self.rank, self.size)
        ]
        yield (*arrivals.values(), *sendings)
        agreed = True
        for source, arrival in arrivals.items():
            try:
                received[source] = self.unpack(arrival.buffer, arrival.source)
            except DisagreementError:
                agreed = False  # among the others there may be last words
        if not agreed:
            raise DisagreementError
        return received

    def last_words(self, text: str) -> Steps[list[str]]:
        """Say a last word to every rank, and return that of each, in rank order. For all ranks, where they disagree.

        What else a rank has sent before its last word is received here and dropped: so ranks that were in different
        rounds, or schedules, end together, and nothing stays in flight.
        """
        block = self.frame(text.encode(), last=True)
        others = [rank for rank in range(self.size) if rank != self.rank]
        sendings = [self._sending(block, rank) for rank in others]
        if others:
            yield LastWords(self, [rank for rank in others if rank not in self.last]), *sendings
        return [payload(self.last.get(rank, block)).tobytes().decode() for rank in range(self.size)]

    def pack(self, offer: Offer) -> Buffer:
        """Return the block that carries `offer`."""
        if offer.vector is self.nothing:  # the terms say all of it: a payload would take longer than what it is for
            return self._stamped(self._sealed(0, offer.k, namespace(offer.vector.values)))
        coding = self._coding(offer.vector)
        nbytes = encoded_nbytes(offer.vector, coding)
        block = self._sealed(nbytes, offer.k, namespace(offer.vector.values))
        fill(block[_ENVELOPE.size : _ENVELOPE.size + nbytes], offer.vector, coding)
        return self._stamped(block)

    def unpack(self, block: Buffer, source: int | None = None) -> Offer:
        """Return the offer in a block, which `source` sent; DisagreementError when the terms are not this rank's."""
        envelope = self._checked(block)
        if source is not None:
            self._keep_last(envelope, block, source)
        if envelope[2] != self._digest:
            raise DisagreementError
        nbytes, k, _, _, padding, _ = envelope
        if nbytes != block.size:
            raise DamagedMessageError(f"a message arrived damaged: a block of {block.size} bytes says it has {nbytes}")
        if nbytes - padding == _ENVELOPE.size:
            return Offer(self.nothing, k)
        try:
            return Offer(decode(block[_ENVELOPE.size : nbytes - padding]), k)
        except CodecError as error:
            raise DamagedMessageError(f"a message arrived damaged: {error}") from None

    def frame(self, content: bytes, *, last: bool = False) -> Buffer:
        """Return `content` as the payload of a block, in main memory."""
        block = self._sealed(len(content), 0, np, last=last)
        block.data[_ENVELOPE.size : _ENVELOPE.size + len(content)] = content
        return self._stamped(block)

    def _sealed(self, payload_nbytes: int, k: int, xp: Any, *, last: bool = False) -> Buffer:
        """Return a block made by the module `xp`, with its envelope written and room for the payload."""
        used = _ENVELOPE.size + payload_nbytes
        block: Buffer = xp.empty(-(-used // LINE) * LINE, np.uint8)
        write_fields(block, _ENVELOPE, block.size, k, self._digest, last, block.size - used, 0)
        block[used:] = 0
        return block

    def _stamped(self, block: Buffer) -> Buffer:
        """Write the checksum into a block that is complete, where blocks have one."""
        if self.endpoint.checked:
            write_fields(block[_CRC_AT:], _CRC, _checksum(block))
        return block

    def _keep_last(self, envelope: tuple[int, ...], block: Buffer, source: int) -> None:
        """Keep a block that is the last word of a rank, and raise DisagreementError."""
        if envelope[3]:
            self.last[source] = self.last_word(block)
            raise DisagreementError

    def last_word(self, block: Buffer) -> Buffer:
        """Return a block that says that it is a last word, in main memory; DamagedMessageError where it can be none."""
        self._checked(block)
        block = to_numpy(block)
        try:
            json.loads(payload(block).tobytes())
        except ValueError:
            raise DamagedMessageError("a message arrived damaged: it is said to be a last word") from None
        return block

    def _checked(self, block: Buffer) -> tuple[int, ...]:
        """Return the envelope of a block; DamagedMessageError where the block as a whole shows that it is damaged."""
        if block.size < LINE:
            raise DamagedMessageError("a message arrived damaged: there is nothing in it")
        envelope = _opened(block)
        if self.endpoint.checked and envelope[-1] != _checksum(block):
            raise DamagedMessageError("a message arrived damaged: its checksum is another one")
        return envelope

    def _arrival(self, source: int, beside: Any) -> Arrival:
        return self.endpoint.receive(self._ranks[source], self._tag, beside)

    def _sending(self, block: Buffer, dest: int, arrival: Arrival | None = None) -> Sending:
        return self.endpoint.send(block, self._ranks[dest], self._tag, arrival)

    @cached_property
    def nothing(self) -> SparseVector:
        """The vector of this operation's length, width and dtype without an entry. It travels as an empty payload."""
        what = self.terms.length or 0, self.terms.dtype or "float32", self.terms.width
        return SparseVector.empty(*what, beside=self.beside) if on_device(self.beside) else _nothing(*what)


class LastWords:
    """The last words of some ranks, in whatever order they come, and what those ranks had sent before."""

    def __init__(self, channel: Channel, ranks: Sequence[int]) -> None:
        self._channel = channel
        self._arrivals = {rank: channel._arrival(rank, None) for rank in ranks}

    def awaited(self) -> list[int]:
        """Return the ranks that have not said theirs yet."""
        return list(self._arrivals)

    def test(self) -> bool:
        """See `Pending.test`."""
        for rank, arrival in list(self._arrivals.items()):
            while arrival.test() and not self._said(rank, arrival.buffer):
                arrival = self._arrivals[rank] = self._channel._arrival(rank, None)
        return not self._arrivals

    def wait(self) -> None:
        """See `Pending.wait`; it looks again and again: a rank may wait for any of these messages to be received."""
        while not self.test():
            time.sleep(_NAP)

    def _said(self, rank: int, message: Buffer) -> bool:
        """Return whether a message is the last word of a rank, and keep it if so."""
        if message.size < LINE or not _opened(message)[3]:
            return False
        self._channel.last[rank] = self._channel.last_word(message)
        del self._arrivals[rank]
        return True


@lru_cache(maxsize=256)
def _nothing(length: int, dtype: str, width: int | None) -> SparseVector:
    return SparseVector.empty(length, dtype, width)


def payload(block: Buffer) -> Buffer:
    """Return the payload of a block."""
    padding = _opened(block)[4]
    return block[_ENVELOPE.size : block.size - padding]


def _checksum(block: Buffer) -> int:
    """Return the CRC-32 of a block without the field that it stands in."""
    block = to_numpy(block)
    return zlib.crc32(block[_CRC_AT + _CRC.size :].data, zlib.crc32(block[:_CRC_AT].data))


def split(message: Buffer) -> Iterator[Buffer]:
    """Yield the blocks of a message one by one; DamagedMessageError where they do not fill it."""
    while message.size:
        nbytes = _opened(message)[0] if message.size >= LINE else 0
        if nbytes < LINE or nbytes % LINE or nbytes > message.size:
            said = f"a block says that it has {nbytes} bytes, and {message.size} are there"
            raise DamagedMessageError(f"a message arrived damaged: {said}")
        yield message[:nbytes]
        message = message[nbytes:]


def _opened(block: Buffer) -> tuple[int, ...]:
    """Return the fields of a block's envelope."""
    return read_fields(block, _ENVELOPE)
