"""A step of the exchange: its buckets are started, settled, and committed or rolled back.

A rank with an error starts its bucket with the error: the collective raises it on this rank and CollectiveError on the
others, so no rank waits for ever. Operations that can fail on one rank run before the ranks agree on the step:
compression, and all processing of the sums in `settle`. `commit` follows and cannot fail, except in the conversion of
means to another library's arrays: it writes to allocated memory, and swaps. NumPy's floating-point errors are off in a
step, as ranks may have different settings; overflow is checked instead.

Invariant: before `commit` no state that outlives the step changes, except compressors, whose earlier attributes are in
the snapshots of the flights.

A skipped step is a step that fails: the error of a gradient that is not finite is NotFiniteError, for which the
collective raises StepSkippedError on all ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.agreement import agree_to_keep, note_failure, raise_together
from collectives.collective import unpack_sum
from collectives.dense import dense_iallreduce
from collectives.faults import ledger
from collectives.runtime.engine import Request
from collectives.runtime.link import traffic
from collectives.votes import contributors
from mpicomp.arrays import adjacent, check_apart, kernels_for
from mpicomp.bucket import Bucket, restore
from mpicomp.errors import NotFiniteError, StepSkippedError
from mpicomp.feedback.base import check_range
from mpicomp.vector import SparseVector, split

Array = NDArray[Any]
Arrays = Mapping[str, Any]  # of any kind, by name
Collectives = tuple[Callable[..., Any], Callable[..., Any] | None]  # the sum, and in a server exchange the broadcast

OPERATION = "GradientExchange"  # what the ranks' agreements are called in errors
CONTRIBUTORS = "contributors"  # average: divide an entry by the number of ranks that sent it


class Flight:
    """A bucket in a step: owns the arrays of its vector until the step ends."""

    def __init__(self, bucket: Bucket, collectives: Collectives, *, checked: bool, skips: bool) -> None:
        self.bucket, self.length, self.snapshot = bucket, bucket.length, bucket.snapshot()
        dense: Collectives = dense_iallreduce, None
        self._collective, self._broadcast = dense if bucket.dense else collectives
        self.sent = self.received = self.rejected = self.nbytes = 0
        self.compress_seconds = self.communicate_seconds = self.restore_seconds = 0.0
        self.total: SparseVector | None = None  # the sum over the ranks, where this rank gets it
        self.outcome: Any = None  # a Request; what a collective that blocks returned; or why the step is skipped
        self.account: Any = ledger.Account(bucket) if checked else None  # of the debug mode
        self._refused = NotFiniteError if skips else ValueError if checked else None  # for what is not finite
        self.homes: list[Array] = []  # the gradients' own arrays, where they hold the residual
        self._changes: list[tuple[Array, SparseVector]] = []  # to be added to these
        self._given: list[Any] = [None] * len(bucket.tensors)  # the caller's output buffers
        self._outs: list[Array | None] = [None] * len(bucket.tensors)  # these as vectors
        self._serves = False  # on the root, once it has compressed the mean

    def start(self, arrays: Arrays, outs: Arrays, comm: Any, error: Exception | None = None) -> None:
        """Compress this rank's gradients, and start the collective; `wait` raises an error of this rank, on all ranks.

        error: of a rank that failed before; it is contributed in place of a vector.
        """
        with self._clocked("compress_seconds"):
            contribution = self._compressed(arrays, outs, comm, error)
        with self._clocked("communicate_seconds"):
            try:
                rooted = {} if self.bucket.root is None else {"root": self.bucket.root}
                self.outcome = self._collective(contribution, comm, **rooted)
            except Exception as raised:
                if raised is contribution:  # the frames of the collective would hold it, and it the gradient
                    raised.__traceback__ = None
                raise
            finally:
                del contribution

    def _compressed(self, arrays: Arrays, outs: Arrays, comm: Any, error: Exception | None) -> Any:
        """Return the collective's input, or this rank's error without its traceback, whose frames hold the gradient."""
        bucket = self.bucket
        try:
            if error is None:
                gradient = self._take(arrays, outs)
        except Exception as raised:  # whatever it is: the other ranks must learn of it
            error = raised.with_traceback(None)
        if bucket.compressor.communicates:
            raise_together(error, comm, OPERATION)
        try:
            if error is not None:
                return error
            if self.account is not None:
                self.account.expect(gradient)
            self._corrected, self._sent = bucket.feedback.compress(gradient, bucket.compressor)
            if self.account is not None:
                self.account.check_input(self._corrected)
            self.sent, self.nbytes, self._dtype = self._sent.nnz, self._sent.nbytes, self._sent.dtype
            return self._sent.to_dense() if bucket.dense else self._sent
        except Exception as raised:
            return raised.with_traceback(None)
        finally:
            del error

    def _take(self, arrays: Arrays, outs: Arrays) -> Any:
        """Return this rank's gradients as a vector or its parts, and store views of the output buffers."""
        bucket = self.bucket
        for place, tensor in enumerate(bucket.tensors):
            if (out := outs.get(tensor.name)) is not None:
                self._outs[place] = tensor.writable(out, f"out for {tensor.name}")
                self._given[place] = out
            if bucket.feedback.in_place:
                self.homes.append(tensor.residual_in(arrays.get(tensor.name)))
        gradient = bucket.take(arrays)
        if self._refused is not None:
            bucket.check_finite(arrays, self._refused)
        return gradient

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
        """Start the broadcast of the mean that the root's downlink compressed; all raise an error of the root."""
        if self._broadcast is None:
            return
        passed: Any = SparseVector.empty(0, self._dtype, beside=self._sent.values)  # on the device of the result
        if comm.rank == self.bucket.root:
            try:
                mean, _, _ = self._mean(comm.size, average=average)
                self._serves = True
                with self._clocked("compress_seconds"):
                    passed = self.bucket.compress_mean(mean)
            except Exception as raised:  # whatever it is: the other ranks must learn of it
                passed = raised.with_traceback(None)
        try:
            self.outcome = self._broadcast(passed, comm, self.bucket.root)
        finally:
            del passed

    def settle(self, ranks: int, *, average: bool | str, form: str) -> None:
        """Prepare to commit the mean (or sum). form: of the results, "dense", "sparse" or "vectors"."""
        bucket, feedback = self.bucket, self.bucket.feedback
        with self._clocked("restore_seconds"):
            if bucket.root is None:
                mean, rejected, votes = self._mean(ranks, average=average)
            else:
                mean, rejected, votes = self.wait(), None, None
                self.received = max(self.received, mean.nnz)
            self.rejected = rejected.nnz if rejected is not None else 0
            if form != "dense" and feedback.has_dense_result:
                raise ValueError(f"{type(feedback).__name__} returns a dense gradient: expected sparse=False")
            if form != "dense" and any(given is not None for given in self._given):
                raise ValueError("got out= and sparse=True: a sparse mean is returned, and not written to an array")
            if bucket.compressor.observes:
                bucket.compressor.observe(mean, None if votes is None else votes / ranks)
            self.mean, self._returned, self._form = mean, rejected, form
            for changes in feedback.settle(self._corrected, self._sent, rejected, mean):
                self._changes += zip(self.homes, split(changes, bucket.bounds), strict=True)
            self._buffers: list[Array] = []
            if form == "dense":
                self._prepare_buffers()
            elif form == "sparse":
                self._means = split(mean, bucket.bounds)

    def _prepare_buffers(self) -> None:
        """Allocate the means of tensors without an output buffer, and find out whether all are one vector."""
        tensors, bounds = self.bucket.tensors, self.bucket.bounds
        if all(out is None for out in self._outs):
            self._whole: Array | None = tensors[0].xp.zeros(self.length, tensors[0].dtype)
            self._buffers = [self._whole[first:end] for first, end in pairwise(bounds)]
            return
        self._buffers = [tensors[place].new() if out is None else out for place, out in enumerate(self._outs)]
        self._whole = adjacent(self._buffers)
        if self._whole is None and not self.bucket.feedback.has_dense_result and self.mean.nnz < self.length:
            self._means = split(self.mean, bounds)

    def _mean(self, ranks: int, *, average: bool | str) -> tuple[SparseVector, SparseVector | None, Array | None]:
        """Return the mean or the sum, the rejected entries, and the votes, from the result of the collective."""
        counting = self.bucket.compressor.observes or average == CONTRIBUTORS
        total, self.received, rejected, votes = unpack_sum(self.wait(), counting=counting)
        if average == CONTRIBUTORS and not self.bucket.dense:
            values = total.values / contributors(total, votes, ranks, self.bucket.compressor.whole)
        else:
            values = total.values / ranks if average else total.values
        mean = total.with_values(values.astype(self._dtype, copy=False))
        check_range(mean, "sum over the ranks")
        mean.check_order(mean.length)
        self.total = total
        return mean, rejected, votes

    @property
    def written(self) -> list[Array]:
        """The caller's arrays that `commit` writes to."""
        return [*self.homes, *(out for out in self._outs if out is not None)]

    def commit(self) -> dict[str, Any]:
        """Keep the entries that were not sent, and return the results by name; none for "vectors"."""
        bucket = self.bucket
        with self._clocked("restore_seconds"):
            bucket.feedback.commit()
            if self._serves and bucket.downlink is not None:
                bucket.downlink.commit()
            for home, changes in self._changes:
                kernels_for(home).scatter_add(home, changes.indices, changes.values)
            if self.account is not None:
                self.account.close(self.homes, self._sent, self._returned, self.mean, self.total)
            if self._form == "dense":
                self._write(bucket.feedback.result(self.mean))
                return self._results()
            return dict(zip(bucket.names_of_tensors, self._means, strict=True)) if self._form == "sparse" else {}

    def skip(self, *, sparse: bool) -> dict[str, Any]:
        """Return the results of a skipped step by name: zeros, or with `sparse` empty vectors."""
        if sparse:
            return {each.name: each.nothing for each in self.bucket.tensors}
        pairs = zip(self.bucket.tensors, self._outs, strict=True)
        self._buffers = [tensor.new() if out is None else out for tensor, out in pairs]
        for buffer in self._buffers:
            buffer.fill(0)
        return self._results()

    def _results(self) -> dict[str, Any]:
        """Return the results by name: the caller's buffers, or new arrays of the kinds of the gradients."""
        rows = zip(self.bucket.tensors, self._buffers, self._given, strict=True)
        return {each.name: each.wrap(new.reshape(each.shape)) if given is None else given for each, new, given in rows}

    def _write(self, result: SparseVector | Array) -> None:
        """Write the result of the feedback to the output buffers, in one call if they are adjacent."""
        if isinstance(result, SparseVector) and result.nnz == self.length:
            result = result.values
        if self._whole is not None:
            pairs: list[tuple[Array, Any]] = [(self._whole, result)]
        elif isinstance(result, SparseVector):
            pairs = list(zip(self._buffers, self._means, strict=True))
        else:
            pairs = [
                (out, result[span[0] : span[1]])
                for out, span in zip(self._buffers, pairwise(self.bucket.bounds), strict=True)
            ]
        fresh = all(given is None for given in self._given)
        for out, part in pairs:
            if not isinstance(part, SparseVector):
                np.copyto(out, part, casting="same_kind")
                continue
            if not fresh:  # a new one is zero
                kernels_for(out).clear(out)
            kernels_for(out).scatter(out, part.indices, part.values)

    @contextmanager
    def _clocked(self, name: str) -> Iterator[None]:
        began = perf_counter()
        yield
        vars(self)[name] += perf_counter() - began


class Step:
    """One step of an exchange: gradients and output buffers by name, and the buckets that were started."""

    def __init__(
        self, buckets: Sequence[Bucket], comm: Any, collectives: Collectives, *, average: bool | str, **modes: bool
    ) -> None:
        self.buckets, self._comm, self._collectives, self._average, self._modes = (
            buckets,
            comm,
            collectives,
            average,
            modes,
        )
        self.arrays: dict[str, Any] = {}
        self.outs: dict[str, Any] = {}
        self.flights: list[Flight] = []
        self.traffic = traffic(comm).nbytes  # of this rank, when it began
        self._averaging = self._agreed = False  # the ranks have come to average residuals, to agree to keep the step

    def leave(self, *, complete: bool = False) -> None:
        """Start the full buckets in order (complete: all buckets), and advance those in flight."""
        for bucket in self.buckets[len(self.flights) :]:
            if not (complete or all(name in self.arrays for name in bucket.names_of_tensors)):
                break
            self._launch(bucket)
            try:
                self.flights[-1].start(self.arrays, self.outs, self._comm)
            except StepSkippedError as skipped:  # of ranks that agree at once; `settle` raises it, as where they do not
                self.flights[-1].outcome = skipped.with_traceback(None)
        self.progress()

    def _launch(self, bucket: Bucket) -> None:
        self.flights.append(Flight(bucket, self._collectives, **self._modes))

    def progress(self) -> None:
        """Advance the buckets in flight, without waiting."""
        for flight in self.flights:
            if not flight.test():
                break  # what is in flight moves on together: to test each would look at all for each

    def settle(self, *, form: str) -> None:
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
            check_apart([array for flight in self.flights for array in flight.written])
            for flight in self.flights:
                flight.settle(self._comm.size, average=self._average, form=form)
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
        check_apart([array for flight in self.flights for array in flight.written])
        return {name: mean for flight in self.flights for name, mean in flight.skip(sparse=sparse).items()}

    def snapshots(self) -> list[Any]:
        """Return the compressors' attributes before the step."""
        return [snapshot for flight in self.flights for snapshot in flight.snapshot]

    def roll_back(self, error: BaseException) -> None:
        """End a step that failed, and restore the state before it.

        An Exception was raised on all ranks, which complete their buckets in flight. Anything else, such as an
        interrupt, is of this rank alone, which abandons its buckets.
        """
        traceback = error.__traceback__
        if isinstance(error, Exception):
            for bucket in self.buckets[len(self.flights) :]:
                self._launch(bucket)
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
        restore(self.snapshots())
        error.__traceback__ = traceback  # raised again above, it holds this frame, which holds it

    def _average_residuals(self, error: Exception | None) -> Exception | None:
        """Average the residuals over the ranks if that is due; if a mean is out of range, each rank keeps its own.

        Returns this rank's error; raises on all ranks if one had an error before.
        """
        self._averaging = True
        for flight in self.flights:
            feedback = flight.bucket.feedback
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
