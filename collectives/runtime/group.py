"""A group: the ranks of an operation, and all communication functions that an algorithm uses.

A message is one of `mpicomp.codec`, and zeros up to a multiple of 64 bytes (a line);
several may be concatenated. The receiver of a damaged one, by its structure or, in the
debug mode, its CRC-32, cannot continue the schedule, and gives up as after a deadline
(`DamagedMessageError`). `mpicomp_bench.network` implements this protocol without MPI.
"""

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from collectives.faults.errors import DamagedMessageError
from collectives.planning import schedule
from collectives.planning.choice import Case
from collectives.runtime import staging
from collectives.runtime.messages import (
    LINE,
    NOTHING,
    Arrival,
    Pending,
    Sending,
    Steps,
)
from mpicomp.arrays import Buffer
from mpicomp.arrays.device import on_device, to_device_of, to_numpy
from mpicomp.codec import (
    BYTES,
    CODECS,
    CRC_AT,
    ERROR,
    FEW_BITS,
    HEADER_NBYTES,
    TEXT,
    Coding,
    Header,
    decode,
    decode_few_bits,
    encode,
    encode_few_bits,
    fill_text,
    plain,
    quick,
    read_header,
    smallest,
)
from mpicomp.errors import CodecError, kept
from mpicomp.few_bits import FewBits
from mpicomp.vector import SparseVector

if TYPE_CHECKING:
    from collectives.runtime.link import Link

# What is sent: vectors of the same kind on all ranks of an operation.
V = TypeVar("V", SparseVector, FewBits)
# A vector, and the count that is sent with it.
PartOf = tuple[V, int]
Part = PartOf[SparseVector]


class DisagreementError(Exception):
    """Raised inside an operation if the call signatures differ, or a rank has an error."""


# Bytes of a packet of a network: to shorten a message of this size takes longer than to
# send it.
SHORT_NBYTES = 1 << 10
# Bytes that a link carries in the time of a few messages.
PIECE_OVERHEAD = 1 << 14


class Group:
    """Some ranks of a communicator in one operation, numbered from 0.

    signature: the arguments that must be the same on all ranks, by name, with
    "operation" and "algorithm". error: of a rank without a valid contribution. codec: a
    name of `mpicomp.codec.CODECS`, or "auto". like: an array; received vectors are
    placed on its device. runs_user_code: the algorithm does. algorithm: that runs; "auto"
    until it is chosen. by_node: the ranks of each node (that share memory), in the order
    of their first ranks.
    """

    def __init__(
        self,
        link: "Link",
        signature: Mapping[str, Any],
        error: BaseException | None = None,
        *,
        codec: str = "auto",
        like: Any = None,
        runs_user_code: bool = False,
    ) -> None:
        self.link = link
        self.signature = signature
        self.error = error
        self.like = like
        self.codec = codec
        self.runs_user_code = runs_user_code
        self.algorithm = signature.get("algorithm", "")
        # The messages of this round, which an operation that breaks off has to keep.
        self.posted: list[Arrival | Sending] = []
        # Pinned memory that the device may still copy from, and functions that wait for
        # these copies.
        self.landings: list[tuple[Buffer, Callable[[], None]]] = []
        # The reports of error notifications that have arrived, by rank of the
        # communicator.
        self.reports: dict[int, dict[str, Any]] = {}
        # The number of the operation on the communicator, which is the same on all
        # ranks.
        self.number = link.take_number()
        self._tag = self.number % link.tags
        self._digest = _digest(tuple(signature), tuple(signature.values()))
        self.rank = link.rank
        self.size = link.size
        self._ranks: Sequence[int] = range(link.size)  # of the communicator
        self._nodes = link.nodes
        self.by_node = link.by_node

    def coding(self, vector: SparseVector) -> Coding:
        """Return the formats in which a message of this operation has a vector."""
        if self.codec != "auto":
            return CODECS[self.codec](vector)
        if vector.nbytes <= SHORT_NBYTES:
            return plain(vector)
        return smallest(vector) if len(self.by_node) > 1 else quick(vector)

    def subgroup(self, ranks: Sequence[int]) -> "Group":
        """Return the group of some ranks, numbered in this order; includes this rank."""
        inner = copy(self)
        inner.rank = list(ranks).index(self.rank)
        inner.size = len(ranks)
        inner._ranks = [self._ranks[rank] for rank in ranks]
        inner._nodes = tuple([self._nodes[rank] for rank in ranks])
        inner.by_node = schedule.groups(inner._nodes)
        return inner

    def case(self, length: int, entries: float, **about: Any) -> Case:
        """Return the sum of vectors of `length` with so many entries each, over this group, for `choose`."""
        per_node = -(-self.size // len(self.by_node))
        return Case(self.size, length, entries, per_node, **about)

    def node(self) -> "Group":
        """Return the group of the ranks that share memory with this one."""
        return self.subgroup(
            next(ranks for ranks in self.by_node if self.rank in ranks)
        )

    def lane(self, node: "Group") -> "Group":
        """Return the group of the ranks that have this rank's number in their nodes; each node has one."""
        return self.subgroup([ranks[node.rank] for ranks in self.by_node])

    @cached_property
    def nothing(self) -> SparseVector:
        """A vector of this operation's length, width and dtype, without entries."""
        signature = self.signature
        return SparseVector.empty(
            signature.get("length", 0),
            signature.get("dtype", "float32"),
            signature.get("width"),
            like=self.like,
        )

    def join_queue(self) -> None:
        """Queue for `reduce`; before the first yield of the operation, so the order is the same on all ranks."""
        if self.number not in self.link.queue:
            self.link.queue.append(self.number)

    def leave_queue(self) -> None:
        """Leave the queue for MPI's own collectives, if the operation is still in it."""
        if self.number in self.link.queue:
            self.link.queue.remove(self.number)

    def fail(self, error: Exception | None) -> NoReturn:
        """End the operation on all ranks, which all detect it, with the error of this rank, if it has one."""
        self.error = error
        raise DisagreementError

    def contribute(self, error: BaseException) -> None:
        """End the operation on all ranks with an error of this rank, its first; before the operation is started."""
        self.error = self.error or error

    @property
    def is_broken(self) -> bool:
        """Whether another rank broke off in the middle of the schedule."""
        return any([report["broken"] for report in self.reports.values()])

    def send_report(self, report: str) -> list[Sending]:
        """Send an error notification to every other rank, as the last message to it; waits for none."""
        message = self._pack_bytes(report.encode(), ERROR)
        return [
            self._sending(message, rank)
            for rank in range(self.size)
            if rank != self.rank
        ]

    def discard(self) -> None:
        """Receive and drop what has arrived of an operation that broke off here: its senders may wait for that."""
        for message in self.posted:
            with suppress(DamagedMessageError):
                message.test()
        while self.link.discard(self._tag):
            pass

    @contextmanager
    def raise_on_all(self) -> Iterator[None]:
        """Raise an error of the block on all ranks; all ranks must send to all others after it."""
        try:
            yield
        except Exception as error:
            self.fail(kept(error))

    def compare_calls(self) -> Steps[None]:
        """Compare the call signatures first, in ceil(lg P) messages of one line; see `Collective.algorithm`."""
        yield from self.gather(self.nothing)

    def exchange(self, vector: V, partner: int, count: int = 0) -> Steps[PartOf[V]]:
        """Send a vector to the partner, and return the partner's."""
        return self.shift(vector, partner, partner, count)

    def shift(
        self, vector: V, dest: int, source: int, count: int = 0
    ) -> Steps[PartOf[V]]:
        """Send a vector to `dest` and return the vector from `source`, in one step; they may be the same rank."""
        arrival = self._arrival(source, self.like)
        yield arrival, self._sending(self.pack(vector, count), dest, arrival)
        return self._received(arrival)

    def send(self, vector: V, dest: int, count: int = 0) -> Steps[None]:
        """Send a vector to a rank; may wait until that rank receives, so ranks in a cycle use `shift`."""
        yield (self._sending(self.pack(vector, count), dest),)

    def receive(self, source: int) -> Steps[tuple[Any, int]]:
        """Receive a vector from a rank, and return it."""
        arrival = self._arrival(source, self.like)
        yield (arrival,)
        return self._received(arrival)

    def relay(self, buffer: Buffer, root: int) -> Steps[None]:
        """Broadcast a buffer in host memory, of one size on all ranks, in pieces along a chain of the ranks.

        The last rank has it size - 2 pieces after the time of one transfer. The pieces are
        of the length at which these and the time of the messages are least.
        """
        previous = (self.rank - 1) % self.size
        following = (self.rank + 1) % self.size
        piece = 1 + math.isqrt(buffer.size * PIECE_OVERHEAD // self.size)
        sendings: tuple[Pending, ...] = ()
        for first in range(0, buffer.size, piece):
            part = buffer[first : first + piece]
            if self.rank == root:
                yield sendings
            else:
                arrival = self._arrival(previous)
                yield arrival, *sendings
                part[:], _ = self._received(arrival)
            if following != root:
                message = self._pack_bytes(part, BYTES)
                sendings = (self._sending(message, following),)
        yield sendings

    def gather(self, vector: SparseVector, count: int = 0) -> Steps[list[Part]]:
        """Return every rank's vector, in rank order, this rank's as it is: ceil(lg P) rounds."""
        if self.size == 1:
            return [(vector, count)]
        messages = yield from self._gather_messages(self.pack(vector, count))
        return [
            (vector, count) if rank == self.rank else self.unpack(message)
            for rank, message in enumerate(messages)
        ]

    def gather_objects(self, value: Any) -> Steps[list[Any]]:
        """Return every rank's value, serialisable as JSON, in rank order: ceil(lg P) rounds."""
        messages = yield from self._gather_messages(
            self._pack_bytes(json.dumps(value).encode(), TEXT)
        )
        return [self._object(message) for message in messages]

    def all_to_all(
        self, vectors: Sequence[V], count: int = 0
    ) -> Steps[list[PartOf[V]]]:
        """Send the j-th vector to rank j, and return the received vectors, in rank order. One step.

        A vector that is sent to several ranks is encoded once.
        """
        received = [(vector, count) for vector in vectors]  # its own among them
        if self.size == 1:
            return received
        arrivals: dict[int, Arrival] = {
            source: self._arrival(source, self.like)
            for source in schedule.hearing(self.rank, self.size)
        }
        rotation = [*schedule.rotation(self.rank, self.size)]
        packed: dict[int, Buffer] = {}
        for dest, _ in rotation:
            vector = vectors[dest]
            if id(vector) not in packed:
                packed[id(vector)] = self.pack(vector, count)
        lines = dict(zip(packed, self.link.lines([*packed.values()]), strict=True))
        sendings: list[Sending] = []
        for dest, source in rotation:
            sent = id(vectors[dest])
            sendings.append(
                self._sending(packed[sent], dest, arrivals[source], lines[sent])
            )
        yield (*arrivals.values(), *sendings)
        agreed = True
        for source, arrival in arrivals.items():
            try:
                received[source] = self._received(arrival)
            except DisagreementError:
                # The other arrivals may contain error notifications, so all are
                # received.
                agreed = False
        if not agreed:
            raise DisagreementError
        return received

    def reduce(self, array: NDArray[Any], total: NDArray[Any]) -> Steps[None]:
        """Sum by MPI's own Allreduce from one host array to another, when it is this operation's turn."""
        self.join_queue()
        if self.size == 1:
            total[...] = array
            self.leave_queue()
            return
        queue = self.link.queue
        if queue[0] != self.number:
            yield (Pending(lambda: queue[0] == self.number),)
        summing = self.link.reduce(array, total)
        self.leave_queue()
        yield (summing,)

    def exchange_reports(self, report: str) -> Steps[list[dict[str, Any]]]:
        """Send an error notification to every rank, and return the reports of all ranks, in rank order.

        Earlier messages are received and discarded: ranks in different rounds or
        schedules end together, none stays in flight. If a rank broke off, the others
        may have no report, and are returned with this one.
        """
        sendings = self.send_report(report)
        arrivals = {
            rank: self._arrival(rank)
            for rank in range(self.size)
            if rank != self.rank and rank not in self.reports
        }

        def is_complete() -> bool:
            for rank, arrival in [*arrivals.items()]:
                while arrival.test():
                    if self._is_report(arrival.buffer, rank):
                        del arrivals[rank]
                        break
                    arrival = arrivals[rank] = self._arrival(rank)
            return not arrivals or self.is_broken

        yield Pending(is_complete), *sendings
        own = json.loads(report)
        return [self.reports.get(rank, own) for rank in range(self.size)]

    def pack(self, vector: SparseVector | FewBits, count: int = 0) -> Buffer:
        """Return a vector as a message."""
        if isinstance(vector, FewBits):
            message = encode_few_bits(vector, count=count, signature=self._digest)
        else:
            message = encode(
                vector,
                self.coding(vector),
                count=count,
                signature=self._digest,
                line=LINE,
            )
        return self._with_checksum(message)

    def _received(self, arrival: Arrival) -> tuple[Any, int]:
        contents, count = self.unpack(
            arrival.buffer, arrival.source, arrival.copy, arrival.line
        )
        # The device reads the copy after the arrival is released, so its pinned memory
        # is kept.
        if arrival.copy is not None and isinstance(contents, FewBits):
            self.landings.append((arrival.buffer, staging.copied()))
        return contents, count

    def unpack(
        self,
        message: Buffer,
        source: int | None = None,
        copy: Any = None,
        line: Buffer = NOTHING,
    ) -> tuple[Any, int]:
        """Return the contents of a message from `source`; DisagreementError if its signature is not this rank's.

        copy: of the message, on the device of the vector; made here if it is missing.
        line: the first of a message on a device, in host memory, if it is known.
        """
        header = self._header(message, line)
        if header.kind == ERROR and source is not None:
            self.reports[source] = self._object(message)
            raise DisagreementError
        if header.signature != self._digest:
            raise DisagreementError
        if _padded(header.nbytes) != message.size:
            raise _damaged(f"{message.size} bytes of {header.nbytes}")
        if header.kind == BYTES:
            return message[HEADER_NBYTES : header.nbytes], header.sender_count
        # A vector without entries has the dtype and the width of the operation.
        if (
            header.kind != FEW_BITS
            and not header.entries
            and "length" in self.signature
        ):
            return self.nothing, header.sender_count
        try:
            if copy is None:
                copy = message
                if on_device(self.like):
                    copy = to_device_of(message, self.like)
            if header.kind == FEW_BITS:
                return decode_few_bits(copy, header), header.sender_count
            return decode(copy, header, message), header.sender_count
        except CodecError as error:
            raise _damaged(error) from None

    def _gather_messages(self, message: Buffer) -> Steps[list[Buffer]]:
        """Return every rank's message, in rank order; each rank receives each message once."""
        if on_device(message) and not self.link.direct:
            message = staging.to_pinned(message)
        held = [message]
        for dest, source, count in schedule.dissemination(self.rank, self.size):
            arrival = self._arrival(source, message)
            yield arrival, self._sending(np.concatenate(held[:count]), dest, arrival)
            received = list(split(arrival.buffer))
            if received and self._is_report(received[0], arrival.source):
                raise DisagreementError
            if len(received) != count:
                if any(
                    self._header(part).signature != self._digest for part in received
                ):
                    raise DisagreementError
                raise _damaged(f"{len(received)} of {count} parts")
            held += received
        # The list `held` starts with this rank's own message.
        own = self.size - self.rank
        return held[own:] + held[:own]

    def _pack_bytes(self, contents: bytes | Buffer, kind: int) -> Buffer:
        message = np.zeros(_padded(HEADER_NBYTES + len(contents)), np.uint8)
        return self._with_checksum(fill_text(message, contents, kind, self._digest))

    def _with_checksum(self, message: Buffer) -> Buffer:
        """Write the checksum into a complete message, in the debug mode."""
        if self.link.checked:
            message[CRC_AT : CRC_AT + 4] = to_device_of(
                np.array([_checksum(message)], np.uint32).view(np.uint8), message
            )
        return message

    def _is_report(self, message: Buffer, source: int) -> bool:
        """Return whether a message is the error notification of a rank of the communicator, and store it then."""
        if message.size < LINE or _read_header(message).kind != ERROR:
            return False
        self.reports[source] = self._object(message)
        return True

    def _object(self, message: Buffer) -> Any:
        """Return the object in a message of text; DamagedMessageError if there is none."""
        header = self._header(message)
        try:
            return json.loads(
                to_numpy(message)[HEADER_NBYTES : header.nbytes].tobytes()
            )
        except ValueError:
            raise _damaged("its text is not JSON") from None

    def _header(self, message: Buffer, line: Buffer = NOTHING) -> Header:
        """Return the header of a message; DamagedMessageError if size, header or checksum are not valid."""
        header = _read_header(message, line if line.size else None)
        if self.link.checked and header.crc != _checksum(message):
            raise _damaged("its checksum differs")
        return header

    def _arrival(self, source: int, like: Any = None) -> Arrival:
        arrival = self.link.receive(self._ranks[source], self._tag, like)
        self.posted.append(arrival)
        return arrival

    def _sending(
        self,
        message: Buffer,
        dest: int,
        arrival: Arrival | None = None,
        line: Buffer = NOTHING,
    ) -> Sending:
        sending = self.link.send(message, self._ranks[dest], self._tag, arrival, line)
        self.posted.append(sending)
        return sending


def vectors_of(parts: Iterable[PartOf[V]]) -> list[V]:
    """Return the vectors of parts, without their counts."""
    return [vector for vector, _ in parts]


def split(buffer: Buffer) -> Iterator[Buffer]:
    """Yield the messages in a buffer one by one; DamagedMessageError if they do not fill it."""
    while buffer.size:
        nbytes = _padded(_read_header(buffer).nbytes)
        if nbytes > buffer.size:
            raise _damaged(f"{buffer.size} bytes of {nbytes}")
        yield buffer[:nbytes]
        buffer = buffer[nbytes:]


@lru_cache(maxsize=256)
def _digest(names: tuple[str, ...], values: tuple[Any, ...]) -> int:
    signature = repr((names, values)).encode()
    return int.from_bytes(
        blake2b(signature, digest_size=8).digest(), "little", signed=True
    )


def _padded(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


def _read_header(message: Buffer, line: Buffer | None = None) -> Header:
    try:
        return read_header(message, line)
    except CodecError as error:
        raise _damaged(error) from None


def _damaged(what: CodecError | str) -> DamagedMessageError:
    return DamagedMessageError(f"received a damaged message: {what}")


def _checksum(message: Buffer) -> int:
    """Return the CRC-32 of a message, without the checksum's own field."""
    message = to_numpy(message)
    return zlib.crc32(message[CRC_AT + 4 :].data, zlib.crc32(message[:CRC_AT].data))
