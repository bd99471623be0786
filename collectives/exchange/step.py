"""A step of the exchange: its buckets are started, settled, and committed or rolled back.

A rank with an error starts its bucket with the error: the collective raises it on this rank and CollectiveError on the
others, so no rank waits for ever. Operations that can fail on one rank run before the ranks agree on the step:
compression, and all processing of the sums in `settle`. `commit` follows and cannot fail. NumPy's floating-point errors
are off in a step, as ranks may have different settings; overflow is checked instead.

A skipped step is a step that fails: the error of a gradient that is not finite is NotFiniteError, for which the
collective raises StepSkippedError on all ranks.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from collectives.agreement import agree_to_keep, note_failure
from collectives.dense import dense_iallreduce
from collectives.exchange.flight import OPERATION, Collectives, Flight
from collectives.exchange.statistics import Statistics
from collectives.runtime import staging
from collectives.runtime.link import traffic
from mpicomp.arrays import check_apart
from mpicomp.bucket import Bucket, restore
from mpicomp.errors import StepSkippedError


class Step:
    """One step of an exchange: gradients and output buffers by name, and the buckets that were started."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        comm: Any,
        collectives: Collectives,
        *,
        average: bool | str,
        checked: bool,
        skips: bool,
    ) -> None:
        self.buckets, self._comm = buckets, comm
        self._average = average
        self._in_flight = partial(Flight, collectives=collectives, checked=checked, skips=skips)
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
            self.flights.append(self._in_flight(bucket))
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

    def settle(self, *, form: str) -> None:
        """Wait for the sums, do all that can fail, and agree with the other ranks to keep the step; else all raise."""
        self.leave(complete=True)
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
            self._averaging = True
            if any(flight.bucket.feedback.averaging_due for flight in self.flights):
                error = self._average_residuals(error)
            self._agreed = True
            agree_to_keep(error, self._comm, OPERATION)
        finally:
            del error

    def commit(self) -> dict[str, Any]:
        """Keep the entries that were not sent, and return the results by name, complete on any stream of a device."""
        results = {name: mean for flight in self.flights for name, mean in flight.commit().items()}
        self._complete()
        return results

    def skip(self, *, sparse: bool) -> dict[str, Any]:
        """Return the results of a step that all ranks skip, by name."""
        check_apart([array for flight in self.flights for array in flight.written])
        results = {name: mean for flight in self.flights for name, mean in flight.skip(sparse=sparse).items()}
        self._complete()
        return results

    def _complete(self) -> None:
        staging.complete(flight.bucket.tensors[0].xp for flight in self.flights)

    def statistics(self, wire_nbytes: int, residual_norm: float | None) -> Statistics:
        """Return the statistics of the step, summed over its messages."""
        names = Statistics._fields[:-2]
        sums = [sum([getattr(flight, name) for flight in self.flights]) for name in names]
        return Statistics._make([*sums, wire_nbytes, residual_norm])

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
                self.flights.append(self._in_flight(bucket))
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
