"""The exchange itself: from the gradients of one rank to the mean over all of them."""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from collectives.agreement import gather_objects
from collectives.allreduce import sparse_allreduce
from collectives.collective import nonblocking_sum, with_votes
from collectives.exchange.layout import Layout, Parts
from collectives.exchange.statistics import Statistics, report
from collectives.exchange.step import CONTRIBUTORS, OPERATION, Bucket, Step
from collectives.faults.ledger import accounts, balance, name_step
from collectives.plan import CyclicLeader
from collectives.runtime.link import check_communicator, traffic
from mpicomp import checking
from mpicomp.compressors import Compressor
from mpicomp.errors import CollectiveError, StepSkippedError
from mpicomp.feedback import ErrorFeedback, Feedback, TwoWay
from mpicomp.pipeline import Pipeline, load_whole_state, restored_on_error, set_back, whole_state
from mpicomp.tensors import DICT, by_name, check_same_form, form_of, in_form, outs_by_name


class GradientExchange:
    """Exchange gradients between the ranks of `comm`: each gets the mean over the ranks of what was sent.

    comm: any mpi4py intracommunicator. compressor: picks what is sent. feedback: keeps the rest; one object for each
    exchange, `ErrorFeedback()` by default. collective: `sparse_allreduce`, `gtopk_allreduce`, `sparse_allgather`, with
    keyword arguments bound by `functools.partial`; it runs in its nonblocking form. Or a function of (vector, comm),
    where a rank that failed has an exception for a vector, to be raised on all ranks. It returns the same sum on all: a
    SparseVector, (sum, rejected), (sum, votes), a list of every rank's vector, or a Request for these.

    average: True divides the sum by the number of ranks, False does not; "contributors" divides each entry by the
    number of ranks that sent it, which `sparse_allreduce` and `sparse_allgather` count. All ranks count for all of what
    is sent dense, zeros too: small tensors, and those of `Dense`. downlink: compresses the mean once more, on all ranks
    alike. choose(name, array): returns (compressor, feedback) for a named tensor; without it each gets copies of the
    two that are given. small: named tensors with fewer numbers are sent dense. bucket_nbytes: the gradients of a
    message have about as many bytes. log: called with the `Statistics` of each step kept; its errors are warnings.

    nonfinite: "skip" skips a step on all ranks where a gradient of one has a NaN or an infinity, and takes one more
    pass over the gradients to see it: residuals stay, the means that come back are all NaN, so that an optimiser that
    looks skips it too (with sparse=True they are empty), and `finite` is False until a step is kept. "raise" raises.

    The object holds the residuals: use one for each model, and the same settings and calls on every rank. The settings,
    and the tensors, are compared in the first step. A step is kept by all ranks or by none. Raises TypeError or
    ValueError for bad arguments.

    >>> exchange = GradientExchange(MPI.COMM_WORLD, TopK(density=0.001))
    >>> mean = exchange(gradient)
    """

    def __init__(
        self,
        comm: Any,
        compressor: Compressor,
        feedback: Feedback | None = None,
        collective: Callable[[Any, Any], Any] = sparse_allreduce,
        *,
        average: bool | str = True,
        downlink: TwoWay | None = None,
        choose: Callable[[str, Any], Parts] | None = None,
        small: int = 1024,
        bucket_nbytes: int = 2**25,
        nonfinite: str = "raise",
        log: Callable[[Statistics], None] | None = None,
    ) -> None:
        feedback = ErrorFeedback() if feedback is None else feedback
        check_communicator(comm)
        collective = nonblocking_sum(with_votes(collective) if average == CONTRIBUTORS else collective)
        self.comm, self.compressor, self.feedback, self.average, self.log = comm, compressor, feedback, average, log
        self.steps = self.skipped = 0  # that were kept, and skipped
        self.finite = True  # the last step was kept, and not skipped
        self.statistics: Statistics | None = None  # of the last step
        self._total: Statistics | None = None  # of all steps
        settings = downlink, collective, choose, small, bucket_nbytes, average, nonfinite
        self._layout = Layout(compressor, feedback, *settings)
        self._checked = checking.asked()
        self._form: str | None = None  # of the gradients, once it is known
        self._names: set[str] = set()
        self._buckets: list[Bucket] = []
        self._step: Step | None = None  # that is under way

    def __call__(self, gradient: Any, *, out: Any = None, sparse: bool = False) -> Any:
        """Return the mean over the ranks of what was sent of `gradient`, as the same kind of array.

        gradient: one array of any shape; or a list or tuple of arrays of one dtype (then a list comes back), which are
        one vector: their entries compete for the places; or a dict of arrays by name, each compressed in its own right,
        as `start` and `finish` do: then all means come back, those of other names behind. In main memory or on a CUDA
        device; see `mpicomp.arrays` for the kinds. The same shapes and dtypes on every rank and in every step.

        out: as `gradient`, the output buffers: C-contiguous, of the same shapes and dtypes, or the gradient itself;
        they come back. A dict may leave out some. sparse: return the mean as a SparseVector, or a list or dict of those
        with indices into each array in C order: no pass over all values. See `SparseVector.add_to`.

        Raises KeyError, TypeError or ValueError for a bad gradient or `out`, and RuntimeError within a step, here, and
        `CollectiveError` on the other ranks; OverflowError on all of them when the sum leaves the range of the dtype.
        The residual, the gradient and `out` are then as they were before the call.
        """
        form = form_of(gradient)
        try:
            self._check_between_steps()
            arrays = by_name(gradient)
            if self._form is not None:
                check_same_form(form, arrays, self._form, self._names)
            outs = outs_by_name(out, gradient)
        except Exception as error:
            self._fail(error)
        step = self._begin()
        step.arrays, step.outs = arrays, outs
        return in_form(form, self._run(form, sparse), arrays)

    def register(self, tensors: Mapping[str, Any]) -> None:
        """Say which tensors there are, in the order in which their gradients will come; all ranks call it, once.

        tensors: arrays by name, of which kind, shape and dtype count. Without this call the first step does it.

        Raises TypeError or ValueError on a rank whose tensors are bad, and `CollectiveError` on the others, and so for
        what `choose` raises; CollectiveError on all when they differ, or the settings do. RuntimeError at once when the
        tensors are known, by this call or a first step: their residuals would be lost.
        """
        if self._buckets:
            raise RuntimeError("the tensors are registered: expected one call, before the first step")
        if self._step is not None:
            self._fail(RuntimeError("a step is under way: register the tensors before the first of them is started"))
        self._register(DICT, tensors)

    def start(self, name: str, array: Any, *, out: Any = None) -> None:
        """Give a tensor's gradient; its bucket is sent once it is full and those before it were sent.

        name: of a tensor, once a step. array: of the shape and dtype it had at first, or, once the tensors are known,
        None for zeros; do not change it before `finish`, which raises what is wrong with it. In the first step, without
        `register`, buckets are sent in `finish`. out: the output buffer, as in a call; it may be `array`.

        Raises KeyError, TypeError or ValueError at once for a name that is unknown, or was there in this step; the step
        goes on.
        """
        if self._step is not None and name in self._step.arrays:
            raise ValueError(f"{name!r} was started before in this step: expected each tensor once")
        if self._form is not None:
            check_same_form(DICT, {name: array}, self._form, self._names)
        step = self._begin()
        step.arrays[name] = array
        step.outs[name] = out
        try:
            with np.errstate(all="ignore"):  # they may be set differently by rank: see `step`
                step.leave()
        except BaseException as error:
            self._end_badly(error)
            raise

    def progress(self) -> None:
        """Move on what is in flight, without waiting, as `start` does: messages advance inside of calls only."""
        if self._step is not None:
            self._step.progress()

    def finish(self, *, sparse: bool = False) -> dict[str, Any]:
        """Wait for the sums of this step, and return the means by name, as the kinds of array that came at first.

        Once the tensors are known, one that was not started on this rank counts as zero here: one that the step did not
        use, or all of them on a rank that has no batch left. Entries of its residual may be sent. sparse: as in a call.

        Raises what a call does; the residuals of all tensors are then as they were, on all ranks.
        """
        self._begin()
        return self._run(DICT, sparse)

    def ahead(self, parameters: Any) -> Any:
        """Return where to evaluate the next gradient: `parameters` less the residual for `StepAhead`, else as they are.

        parameters: as the gradients: an array, a list, or a dict by name.
        """
        if not self._buckets:
            return parameters
        arrays = by_name(parameters)
        points = {name: point for pipeline in self._pipelines() for name, point in pipeline.ahead(arrays).items()}
        return in_form(form_of(parameters), points, arrays)

    @property
    def residual_norm(self) -> float:
        """Euclidean norm of all that this rank keeps; a pass over the residuals. Those in place are not in it."""
        return math.hypot(*[pipeline.feedback.residual_norm for pipeline in self._pipelines()])

    def report(self) -> str:
        """Return what the steps so far did on this rank, in lines to print: bytes and milliseconds, against dense."""
        itemsize = next((tensor.dtype.itemsize for tensor in self._pipelines()[0].tensors), 0)
        return report(self._total, self.steps, self.skipped, self.comm.size, itemsize)

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return copies of all that this rank's exchange remembers: arrays by name, which np.savez can store.

        Each rank saves its own, at any time: within a step it is the state before that step. A run resumed from it
        continues bitwise. Rank, number of ranks, `average`, `small` and the parts of each vector are in it as text; not
        the order of named tensors: `register` them in the same one first; nor residuals in place: save the gradients.
        """
        with set_back(self._step.snapshots() if self._step else []):
            return whole_state(self._pipelines(), self._layout.settings(self.comm))

    def load_state_dict(self, state: Mapping[str, Any], *, same_settings: bool = True) -> None:
        """Load all that `state_dict` returned on this rank of as many ranks; nothing changes where it raises.

        same_settings: False to take it up with other settings, such as another density or decay, on purpose.

        Raises ValueError for the state of another rank, number of ranks, or other settings, naming both, and for one
        that does not fit, or of which something is missing; RuntimeError within a step.
        """
        self._check_between_steps()
        load_whole_state(self._pipelines(), state, self._layout.settings(self.comm), same_settings=same_settings)

    def continue_on(self, comm: Any) -> None:
        """Go on with the ranks of another communicator, after `collectives.shrink`: each keeps its residuals.

        comm: of ranks that have this exchange, all of which call. The residuals of the ranks that are gone are lost
        with them; the mean is then over the ranks of `comm`. Raises RuntimeError within a step; CollectiveError on all
        ranks when they have not kept the same steps: go on from a checkpoint then; RankFailedError and
        CollectiveTimeoutError as a step does. The exchange is then as it was.
        """
        self._check_between_steps()
        kept = gather_objects(self.steps, comm, f"{OPERATION}.continue_on")
        if len(set(kept)) > 1:
            raise CollectiveError(f"the ranks have kept different numbers of steps, {kept}: go on from a checkpoint")
        for pipeline in self._pipelines():
            for part in pipeline.compressor.chain():
                if isinstance(part, CyclicLeader):
                    part.comm = comm
        self.comm = comm

    def reset(self) -> None:
        """Forget the residual on this rank: its mass is lost; and what a compressor knows of the ranks' sums.

        RuntimeError within a step.
        """
        self._check_between_steps()
        for pipeline in self._pipelines():
            pipeline.reset()

    def rescale(self, factor: float) -> None:
        """Multiply what is kept in gradient units by `factor`, the old learning rate over the new one.

        Raises RuntimeError within a step; what a feedback's `rescale` does, and nothing has changed then.
        """
        self._check_between_steps()
        with restored_on_error(self._pipelines()):
            for pipeline in self._pipelines():
                pipeline.rescale(factor)

    def _begin(self) -> Step:
        """Return the step that is under way; a new one where there is none."""
        if self._step is None:
            modes = {"checked": self._checked, "skips": self._layout.nonfinite == "skip"}
            self._step = Step(self._buckets, self.comm, average=self._layout.average, **modes)
        return self._step

    def _run(self, form: str, sparse: bool) -> dict[str, Any]:
        """Complete the step that is under way."""
        step = self._begin()
        try:
            if not self._buckets:
                step.buckets = self._register(form, step.arrays)
            with np.errstate(all="ignore"):  # they may be set differently by rank: see `step`
                step.settle(sparse=sparse)
        except BaseException as error:
            self._end_badly(error)
            if not isinstance(error, StepSkippedError):
                raise
            self.finite, self.skipped = False, self.skipped + 1
            return step.skip(sparse=sparse)
        self._step = None  # settled: an interrupt from here on leaves no step behind
        with np.errstate(all="ignore"):
            means = step.commit()
        self._end_step(step)
        return means

    def _register(self, form: str, arrays: Mapping[str, Any]) -> list[Bucket]:
        self._buckets = self._layout.buckets(form, arrays, self.comm)
        self._form, self._names = form, {name for bucket in self._buckets for name in bucket.names}
        return self._buckets

    def _check_between_steps(self) -> None:
        if self._step is not None:
            raise RuntimeError("a step is under way: call finish first")

    def _fail(self, error: Exception) -> NoReturn:
        """Take part in a step as a failed rank; raises."""
        try:
            if not self._buckets:
                self._step = None
                gather_objects(error, self.comm, OPERATION)  # as the others, which compare what they have
            self._begin()
            self._end_badly(error)
            raise error
        finally:
            del error

    def _end_badly(self, error: BaseException) -> None:
        """End a step that failed on all ranks, or, unless it is an Exception, on this one alone, which then leaves."""
        step, self._step = self._step, None
        if step is not None:
            step.roll_back(error)
        if self._checked and isinstance(error, Exception):
            name_step(error, self.steps, self.comm.rank)

    def _pipelines(self) -> list[Pipeline]:
        """Return the pipelines of all vectors; before the first step that of the one vector that may come."""
        found = [pipeline for bucket in self._buckets for pipeline in bucket.pipelines]
        return found or [self._layout.alone([])]

    def _end_step(self, step: Step) -> None:
        """Count a step that was kept, and tell what it did."""
        self.steps, self.finite = self.steps + 1, True
        if self._checked:
            balance(gather_objects(accounts(step.flights), self.comm, OPERATION), self.steps - 1)
        sent = traffic(self.comm).nbytes - step.traffic
        self.statistics = Statistics.of(step.flights, sent, self.residual_norm if self.log else None)
        self._total = self.statistics.plus(self._total)
        try:
            if self.log:
                self.log(self.statistics)
        except Exception as error:  # the other ranks have kept the step
            warnings.warn(f"log raised {error!r}: the step is kept", RuntimeWarning, stacklevel=2)
