"""A step of the exchange: its buckets are started, settled, and committed or rolled back.

A rank with an error starts its bucket with the error: the collective raises it on this rank and CollectiveError on the
others, so no rank waits for ever. Operations that can fail on one rank run before the ranks agree on the step:
compression, and all processing of the sums in `settle`. `commit` follows and cannot fail. NumPy's floating-point errors
are off in a step, as ranks may have different settings; overflow is checked instead.

A skipped step is a step that fails: the error of a gradient that is not finite is NotFiniteError, for which the
collective raises StepSkippedError on all ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from time import perf_counter
from typing import Any

import numpy as np

from collectives.agreement import agree_to_keep, note_failure, raise_together
from collectives.collective import unpack_sum
from collectives.dense import dense_iallreduce
from collectives.exchange.transfer import Array, Arrays, Transfer
from collectives.faults.ledger import CheckedTransfer
from collectives.runtime.engine import Request
from collectives.runtime.link import traffic
from collectives.votes import contributors
from mpicomp.arrays import check_apart
from mpicomp.compressors import Dense
from mpicomp.errors import NotFiniteError, StepSkippedError
from mpicomp.feedback.base import check_range
from mpicomp.pipeline import Pipeline, Snapshot
from mpicomp.vector import SparseVector, concatenate, split

OPERATION = "GradientExchange"  # what the ranks' agreements are called in errors
CONTRIBUTORS = "contributors"  # average: divide an entry by the number of ranks that sent it


@dataclass(frozen=True)
class Bucket:
    """Pipelines whose vectors, of one dtype, are sent in one message. dense: sent as an array.

    broadcast: of the server exchange, where `collective` sums at a root; None if all ranks get the sum.
    """

    pipelines: Sequence[Pipeline]
    collective: Callable[..., Any]
    dense: bool = False
    broadcast: Callable[..., Any] | None = None

    @property
    def root(self) -> int | None:
        """The rank at which the downlinks compress; None without."""
        downlink = self.pipelines[0].downlink
        return None if downlink is None else downlink.root

    @cached_property
    def names(self) -> set[str]:
        """The names of the bucket's tensors."""
        return {tensor.name for pipeline in self.pipelines for tensor in pipeline.tensors}

    @cached_property
    def bounds(self) -> list[int]:
        """First position of each vector in the message, and its length."""
        return [0, *accumulate(pipeline.bounds[-1] for pipeline in self.pipelines)]

    @cached_property
    def whole(self) -> list[tuple[int, int]]:
        """Ranges of the message in which every rank sends all values."""
        pairs = zip(self.pipelines, pairwise(self.bounds), strict=True)
        return [bounds for pipeline, bounds in pairs if isinstance(pipeline.compressor.chain()[-1], Dense)]


class Flight:
    """A bucket in a step: its transfers, and the collective in flight."""

    def __init__(self, bucket: Bucket, *, checked: bool, skips: bool) -> None:
        self.bucket, self.length = bucket, bucket.bounds[-1]
        self.sent = self.received = self.rejected = self.nbytes = 0
        self.compress_seconds = self.communicate_seconds = self.restore_seconds = 0.0
        self.total: SparseVector | None = None  # the sum over the ranks, where this rank gets it
        self.outcome: Any = None  # a Request; what a collective that blocks returned; or why the step is skipped
        self._refused = NotFiniteError if skips else ValueError if checked else None  # for what is not finite
        self.transfers = [(CheckedTransfer if checked else Transfer)(pipeline) for pipeline in bucket.pipelines]

    def start(self, arrays: Arrays, outs: Arrays, comm: Any, error: Exception | None = None) -> None:
        """Compress this rank's gradients, and start the collective; `wait` raises an error of this rank, on all ranks.

        error: of a rank that failed before; it is contributed in place of a vector.
        """
        with self._clocked("compress_seconds"):
            contribution = self._compressed(arrays, outs, comm, error)
        with self._clocked("communicate_seconds"):
            try:
                rooted = {} if self.bucket.root is None else {"root": self.bucket.root}
                self.outcome = self.bucket.collective(contribution, comm, **rooted)
            except Exception as raised:
                if raised is contribution:  # the frames of the collective would hold it, and it the gradient
                    raised.__traceback__ = None
                raise
            finally:
                del contribution

    def test(self) -> bool:
        """Advance the collective, without waiting; return whether it has ended."""
        return self.outcome.test() if isinstance(self.outcome, Request) else True

    def wait(self) -> Any:
        """Return the result of the collective; if it fails, it raises on all ranks."""
        with self._clocked("communicate_seconds"):
            if isinstance(self.outcome, Exception):
                raise self.outcome
            return self.outcome.wait() if isinstance(self.outcome, Request) else self.outcome

    def has_failed(self) -> bool:
        """Wait for the collective, and return whether it failed, the same on all ranks."""
        if isinstance(self.outcome, Request) and not self.outcome.failed:  # to raise it again would add this frame
            with suppress(Exception):
                self.outcome.wait()
        return self.outcome.failed if isinstance(self.outcome, Request) else isinstance(self.outcome, Exception)

    def pass_down(self, comm: Any, *, average: bool | str) -> None:
        """Start the broadcast of the mean that the root's downlinks compressed; all raise an error of the root."""
        if self.bucket.broadcast is None:
            return
        passed: Any = self._outline  # says on which device this rank wants the result
        if comm.rank == self.bucket.root:
            try:
                mean, _, _ = self._mean(comm.size, average=average)
                parts = zip(self.transfers, self.cut(mean), strict=True)
                with self._clocked("compress_seconds"):
                    passed = concatenate([transfer.compress_mean(part) for transfer, part in parts])
            except Exception as raised:  # whatever it is: the other ranks must learn of it
                passed = raised.with_traceback(None)
        try:
            self.outcome = self.bucket.broadcast(passed, comm, self.bucket.root)
        finally:
            del passed

    def settle(self, ranks: int, *, average: bool | str, sparse: bool) -> None:
        """Pass every transfer its part of the mean, or sum."""
        with self._clocked("restore_seconds"):
            if self.bucket.root is None:
                mean, rejected, votes = self._mean(ranks, average=average)
            else:
                mean, rejected, votes = self.wait(), None, None
                self.received = max(self.received, mean.nnz)
            self.rejected = rejected.nnz if rejected is not None else 0
            shares = None if votes is None else mean.with_values(votes / ranks)
            parts = self.cut(mean), self.cut(rejected), self.cut(shares)
            for transfer, part, returned, share in zip(self.transfers, *parts, strict=True):
                transfer.receive(part, returned, None if share is None else share.values, sparse=sparse)

    def _mean(self, ranks: int, *, average: bool | str) -> tuple[SparseVector, SparseVector | None, Array | None]:
        """Return the mean or the sum, the rejected entries, and the votes, from the result of the collective."""
        observed = any(pipeline.compressor.observes for pipeline in self.bucket.pipelines)
        counting = observed or average == CONTRIBUTORS
        total, self.received, rejected, votes = unpack_sum(self.wait(), counting=counting)
        if average == CONTRIBUTORS and not self.bucket.dense:
            values = total.values / contributors(total, votes, ranks, self.bucket.whole)
        else:
            values = total.values / ranks if average else total.values
        mean = total.with_values(values.astype(self._dtype, copy=False))
        check_range(mean, "sum over the ranks")
        mean.check_order(mean.length)
        self.total = total
        return mean, rejected, votes

    def commit(self) -> dict[str, Any]:
        """Keep the entries that were not sent, and return the results by name."""
        means: dict[str, Any] = {}
        with self._clocked("restore_seconds"):
            for transfer in self.transfers:
                means |= transfer.commit()
        return means

    def _compressed(self, arrays: Arrays, outs: Arrays, comm: Any, error: Exception | None) -> Any:
        """Return the collective's input, or this rank's error without its traceback, whose frames hold the gradient."""
        for transfer in self.transfers if error is None else ():  # each, as a step that is skipped fills all buffers
            try:
                transfer.take(arrays, outs, self._refused)
            except Exception as raised:  # whatever it is: the other ranks must learn of it
                if error is None or isinstance(error, NotFiniteError):  # no skip where something else is wrong
                    error = raised.with_traceback(None)
        if any(pipeline.compressor.communicates for pipeline in self.bucket.pipelines):
            raise_together(error, comm, OPERATION)
        vectors = []
        for transfer in self.transfers:
            if error is None or transfer.pipeline.compressor.communicates:  # the other ranks call that in any case
                try:
                    vectors.append(transfer.compress())
                except Exception as raised:
                    error = error or raised.with_traceback(None)
        try:
            if error is not None:
                return error
            vector = concatenate(vectors)
            self.sent, self.nbytes, self._dtype = vector.nnz, vector.nbytes, vector.dtype
            self._outline = SparseVector.empty(0, vector.dtype, beside=vector.values)
            return vector.to_dense() if self.bucket.dense else vector
        except Exception as raised:
            return raised.with_traceback(None)
        finally:
            del error

    def cut(self, vector: SparseVector | None) -> Sequence[Any]:
        """Return the part of each transfer of a vector of the whole message."""
        return [None] * len(self.transfers) if vector is None else split(vector, self.bucket.bounds)

    @contextmanager
    def _clocked(self, name: str) -> Iterator[None]:
        began = perf_counter()
        yield
        vars(self)[name] += perf_counter() - began


class Step:
    """One step of an exchange: gradients and output buffers by name, and the buckets that were started."""

    def __init__(self, buckets: Sequence[Bucket], comm: Any, *, average: bool | str, **modes: bool) -> None:
        self.buckets, self._comm, self._average, self._modes = buckets, comm, average, modes
        self.arrays: dict[str, Any] = {}
        self.outs: dict[str, Any] = {}
        self.flights: list[Flight] = []
        self.traffic = traffic(comm).nbytes  # of this rank, when it began
        self._averaging = self._agreed = False  # the ranks have come to average residuals, to agree to keep the step

    def leave(self, *, complete: bool = False) -> None:
        """Start the full buckets in order (complete: all buckets), and advance those in flight."""
        for bucket in self.buckets[len(self.flights) :]:
            if not (complete or bucket.names <= self.arrays.keys()):
                break
            self.flights.append(Flight(bucket, **self._modes))
            try:
                self.flights[-1].start(self.arrays, self.outs, self._comm)
            except StepSkippedError as skipped:  # of ranks that agree at once; `settle` raises it, as where they do not
                self.flights[-1].outcome = skipped.with_traceback(None)
        self.progress()

    def progress(self) -> None:
        """Advance the buckets in flight, without waiting."""
        for flight in self.flights:
            if not flight.test():
                break  # what is in flight moves on together: to test each would look at all for each

    def settle(self, *, sparse: bool) -> None:
        """Wait for the sums, do all that can fail, and agree with the other ranks to keep the step; else all raise."""
        self.leave(complete=True)
        for flight in self.flights:
            flight.wait()
        for flight in self.flights:
            flight.pass_down(self._comm, average=self._average)
        for flight in self.flights:
            flight.wait()
        error: Exception | None = None
        try:
            check_apart([array for transfer in self._transfers() for array in transfer.written])
            for flight in self.flights:
                flight.settle(self._comm.size, average=self._average, sparse=sparse)
        except Exception as raised:  # this rank's alone, perhaps
            error = raised.with_traceback(None)
        try:
            error = self._average_residuals(error)
            self._agreed = True
            agree_to_keep(error, self._comm, OPERATION)
        finally:
            del error

    def commit(self) -> dict[str, Any]:
        """Keep the entries that were not sent, and return the results by name."""
        return {name: mean for flight in self.flights for name, mean in flight.commit().items()}

    def skip(self, *, sparse: bool) -> dict[str, Any]:
        """Return the results of a step that all ranks skip, by name."""
        check_apart([array for transfer in self._transfers() for array in transfer.written])
        return {name: mean for each in self._transfers() for name, mean in each.skip(sparse=sparse).items()}

    def snapshots(self) -> list[Snapshot]:
        """Return the compressors' attributes before the step; of a shared one as its first vector found it."""
        return [snapshot for transfer in reversed(self._transfers()) for snapshot in transfer.snapshots]

    def roll_back(self, error: BaseException) -> None:
        """End a step that failed, and restore the state before it.

        An Exception was raised on all ranks, which complete their buckets in flight. Anything else, such as an
        interrupt, is of this rank alone, which abandons its buckets.
        """
        traceback = error.__traceback__
        if isinstance(error, Exception):
            for bucket in self.buckets[len(self.flights) :]:
                self.flights.append(Flight(bucket, **self._modes))
                with suppress(Exception):
                    self.flights[-1].start({}, {}, self._comm, error)
            known = any([flight.has_failed() for flight in self.flights])
            if self.flights and not self._agreed:
                if not (known or self._averaging):  # the other ranks may average residuals
                    with suppress(Exception):
                        self._average_residuals(error)
                note_failure(error, self._comm, OPERATION, known=known)
        for flight in self.flights:
            flight.outcome = None  # a Request that failed, its error, the traceback and the step hold each other
        for compressor, snapshot in self.snapshots():
            compressor.restore(snapshot)
        error.__traceback__ = traceback  # raised again above, it holds this frame, which holds it

    def _average_residuals(self, error: Exception | None) -> Exception | None:
        """Average the residuals over the ranks if that is due; if a mean is out of range, each rank keeps its own.

        Returns this rank's error; raises on all ranks if one had an error before.
        """
        self._averaging = True
        for transfer in self._transfers():
            feedback = transfer.pipeline.feedback
            if feedback.averaging_due:
                try:
                    contribution: Any = error or feedback.settled_residual
                except Exception as raised:
                    contribution = raised  # it is raised on all ranks
                total = dense_iallreduce(contribution, self._comm).wait()
                try:
                    if np.isfinite(total).all():
                        feedback.average(total / self._comm.size)
                except Exception as raised:
                    error = raised.with_traceback(None)
        return error

    def _transfers(self) -> list[Transfer]:
        return [transfer for flight in self.flights for transfer in flight.transfers]
