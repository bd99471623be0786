"""The exchange itself: from the gradients of one rank to the mean over all of them."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from collectives.agreement import gather_objects
from collectives.allreduce import sparse_allreduce
from collectives.collective import nonblocking_sum
from collectives.exchange.layout import Layout, Parts
from collectives.exchange.statistics import Statistics, report
from collectives.exchange.step import OPERATION, Bucket, Step
from collectives.faults.ledger import accounts, balance, name_step
from collectives.plan import CyclicLeader
from collectives.runtime.link import check_communicator, traffic
from mpicomp import checking
from mpicomp.compressors import Compressor
from mpicomp.compressors.base import check_compressor
from mpicomp.compressors.common import check_number
from mpicomp.errors import CollectiveError
from mpicomp.feedback import ErrorFeedback, Feedback, TwoWay
from mpicomp.feedback.base import check_feedback
from mpicomp.pipeline import Pipeline, restored_on_error
from mpicomp.tensors import DICT, by_name, check_same_form, form_of, in_form, outs_by_name


class GradientExchange:
    """Exchange gradients between the ranks of `comm`: each gets the mean over the ranks of what was sent.

    comm: any mpi4py intracommunicator. compressor: picks what is sent. feedback: keeps the rest; one object for each
    exchange, `ErrorFeedback()` by default. collective: `sparse_allreduce`, `gtopk_allreduce`, `sparse_allgather`, with
    keyword arguments bound by `functools.partial`; it runs in its nonblocking form. Or any function that takes
    (vector, comm), in place of the vector also an exception, which it raises on all ranks, and that gives every rank
    the same sum: a SparseVector, (sum, rejected), (sum, votes), a list of every rank's vector, or a Request for these.

    average: divide the sum by the number of ranks. downlink: compresses the mean once more, on all ranks alike.
    choose(name, array): returns (compressor, feedback) for a named tensor; without it each gets copies of the two that
    are given. small: named tensors with fewer numbers are sent dense. bucket_nbytes: the gradients of a message have
    about as many bytes. log: called with the `Statistics` of each step, once it is kept.

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
        average: bool = True,
        downlink: TwoWay | None = None,
        choose: Callable[[str, Any], Parts] | None = None,
        small: int = 1024,
        bucket_nbytes: int = 2**25,
        log: Callable[[Statistics], None] | None = None,
    ) -> None:
        feedback = ErrorFeedback() if feedback is None else feedback
        check_communicator(comm)
        check_compressor(compressor)
        check_feedback(feedback, compressor)
        check_number("small", small, least=0)
        check_number("bucket_nbytes", bucket_nbytes, least=0)
        if not isinstance(downlink, TwoWay | None):
            raise TypeError(f"downlink is {downlink!r}: expected an object such as TwoWay(TopK(density=0.01)), or None")
        collective = nonblocking_sum(collective)
        self.comm, self.compressor, self.feedback, self.log = comm, compressor, feedback, log
        self.steps = 0  # that were kept
        self.statistics: Statistics | None = None  # of the last step
        self._total: Statistics | None = None  # of all steps
        self._layout = Layout(compressor, feedback, downlink, collective, choose, small, bucket_nbytes, average)
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
        if self._total is None:
            return "no step yet"
        itemsize = self._pipelines()[0].tensors[0].dtype.itemsize
        return report(self._total, self.steps, self.comm.size, itemsize)

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return copies of all that this rank's exchange remembers: arrays by name, which np.savez can store.

        Each rank saves its own. Settings are not in it, nor is the order of named tensors: `register` them in the same
        order before `load_state_dict`; nor residuals in place: save the gradient arrays. A run resumed from it
        continues bitwise. For each vector `holds` names what was saved, so that a missing part is noticed.
        RuntimeError within a step.
        """
        self._check_between_steps()
        return {
            f"{pipeline.name}/{name}": array
            for pipeline in self._pipelines()
            for name, array in pipeline.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned, all of it; ValueError when it does not fit, and nothing changes then."""
        self._check_between_steps()
        got, names = {key.rpartition("/")[0] for key in state}, {pipeline.name for pipeline in self._pipelines()}
        if got != names:
            raise ValueError(f"the state is of {sorted(got)}: expected {sorted(names)}; register named tensors first")
        with restored_on_error(self._pipelines()):
            for pipeline in self._pipelines():
                mine = [key for key in state if key.rpartition("/")[0] == pipeline.name]
                pipeline.load_state_dict({key.rpartition("/")[2]: state[key] for key in mine})

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
            self._step = Step(self._buckets, self.comm, average=self._layout.average, checked=self._checked)
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
            raise
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
        self.steps += 1
        if self._checked:
            everyone = gather_objects(accounts(step.flights), self.comm, OPERATION)
            balance(everyone, self.steps - 1, self.comm.size if self._layout.average else 1)
        sent = traffic(self.comm).nbytes - step.traffic
        self.statistics = Statistics.of(step.flights, sent, self.residual_norm if self.log else None)
        self._total = self.statistics.plus(self._total)
        if self.log:
            self.log(self.statistics)
