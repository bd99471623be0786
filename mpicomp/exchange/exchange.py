"""The exchange itself: from the gradients of one rank to the mean over all of them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any, NoReturn, TypeVar

import numpy as np

from mpicomp import checking
from mpicomp.compressors import Compressor
from mpicomp.compressors.protocol import chain, failed
from mpicomp.errors import CollectiveError
from mpicomp.exchange.bucket import Bucket, Collective
from mpicomp.exchange.checked import CheckedBucket, balance, in_step
from mpicomp.exchange.checks import check_collective, check_outs, check_pair, check_part, check_sizes, each_its_own
from mpicomp.exchange.flat import flattened, sound
from mpicomp.exchange.layout import Array, Rules, Station, Tensor, agreed, build, check_same, described
from mpicomp.exchange.pipeline import Pipeline
from mpicomp.exchange.statistics import Statistics
from mpicomp.feedback import Feedback
from mpicomp.feedback.common import wide
from mpicomp.vector import SparseVector

Chooser = Callable[[str, Any], tuple[Compressor, Feedback]]
T = TypeVar("T")


class GradientExchange:
    """Exchange gradients between the ranks of `comm`: what each rank hands over comes back as the ranks' mean.

    comm: any mpi4py intracommunicator. compressor: picks what travels. feedback: keeps the rest; one object for each
    exchange. collective: `gtopk_allreduce`, `sparse_allgather`, `sparse_allreduce`, or anything that gives every rank
    the same sum, all keyword arguments bound (`functools.partial`); a nonblocking one, such as `sparse_iallreduce`,
    lets buckets travel while later gradients are still being computed. average: divide the sum by the number of ranks.

    dense: `dense_allreduce` or its nonblocking twin: for small tensors, and for feedback that averages residuals.
    downlink: compresses the mean once more, on all ranks alike (`TwoWay`). log: called with the `Statistics` of each
    step, which then have the norm of the residual. agree: `collectives.agree`, where ranks may die and the others go
    on (`continue_on`): then a step is kept by all that live, or by none.

    For named tensors (see `start`), with the rules of `mpicomp.exchange.layout`: choose(name, array) returns
    (compressor, feedback) for a tensor; without it each gets copies of the two that are given. small: tensors with
    fewer numbers are not compressed one by one. bucket_nbytes: the gradients of a bucket have about as many bytes.

    The object holds the residuals, so use one for each model, for one vector or for named tensors, and the same
    settings and calls on every rank: for named tensors the settings are compared, in the debug mode always.
    `statistics` tells what the last step did. Raises TypeError for a part that is none, ValueError for sizes out of
    range. What `log` raises comes out of a step that is done.
    """

    def __init__(
        self,
        comm: Any,
        compressor: Compressor,
        feedback: Feedback,
        collective: Collective,
        *,
        average: bool = True,
        dense: Collective | None = None,
        downlink: Any = None,
        choose: Chooser | None = None,
        small: int = 1024,
        bucket_nbytes: int = 2**25,
        log: Callable[[Statistics], None] | None = None,
        agree: Callable[[bool, Any], bool] | None = None,
    ) -> None:
        check_part("comm", comm, ("size",), "an mpi4py communicator")
        check_pair(compressor, feedback, dense)
        check_collective(collective)
        check_sizes(small=small, bucket_nbytes=bucket_nbytes)
        if downlink is not None:
            check_part("downlink", downlink, ("compress", "keep"), "TwoWay(TopK(density=0.01))")
        self.comm, self.compressor, self.feedback = comm, compressor, feedback
        self.collective, self.average, self.dense, self.log = collective, average, dense, log
        self.steps = 0  # that were kept
        self._agree, self._checked = agree, checking.asked()
        self._bucket: type[Bucket] = CheckedBucket if self._checked else Bucket
        self.statistics: Statistics | None = None
        self._own = Pipeline(compressor, feedback, downlink)
        self._choose, self._small, self._bucket_nbytes = choose, small, bucket_nbytes
        self._stations: list[Station] = []
        self._names: set[str] = set()
        self._one = False  # it has exchanged one vector
        self._arrays: dict[str, Any] = {}  # of this step, from `start` to `finish`
        self._outs: dict[str, Any] = {}  # where their means go
        self._started = 0  # stations of this step
        self._spare: Array | None = None  # for the arrays of a list, and their mean, where `out` is given

    def __call__(self, gradient: Any, *, out: Any = None) -> Any:
        """Return the mean over the ranks of what travelled of `gradient`, as the same kind of array.

        gradient: one array of any shape; or a list or tuple of arrays of one dtype (then a list comes back), which are
        one vector: their entries compete with each other for the places; or a dict of arrays by name, each selected in
        its own right, as `start` and `finish` do: then all means come back, those of other names behind. In main
        memory or on a CUDA device; see `mpicomp.arrays` for the kinds. The same shapes, in the same order, and dtypes
        on every rank (of an array or a list the total length and the dtype are compared).

        out: as `gradient`, the arrays to write the mean to, which then come back: contiguous, of the same shapes and
        dtypes, or the gradient itself. New memory costs more than a pass over it. For a list, whose arrays are put
        together for a step, the exchange then keeps the memory for that as well. A dict may leave out some.

        Raises ValueError or TypeError for a bad gradient or `out` here, `CollectiveError` on the other ranks;
        OverflowError on all of them when the sum leaves the range of the dtype. The residual, and `out`, are then as
        they were before the call.
        """
        if isinstance(gradient, Mapping):
            return self._exchange_named(gradient, {} if out is None else out)
        if self._stations:
            self._fail(_not_named())
        flat, whole, restore = flattened(gradient, out, self._spare)
        if self._arrays:
            flat, self._arrays, self._outs = _not_named(), {}, {}
        bucket = self._bucket([self._own], [flat.size if not isinstance(flat, Exception) else 0], self.collective)
        try:
            if self._own.talks and not self._one:  # before it talks: a rank with named tensors meets the others here
                self._meet(lambda: None, _ONE_VECTOR)
            bucket.start([flat], self.comm)
            bucket.settle(self.comm, average=self.average)
            self._agree_to_keep()
        except BaseException as error:
            bucket.abandon(wait=isinstance(error, Exception))
            self._heard(error)
            raise
        finally:  # an error may be held, and the gradient must not be with it
            del flat
        (result,) = bucket.commit([whole])
        self._spare, self._one = whole if isinstance(gradient, list | tuple) else None, True
        self._end_step([bucket])
        return restore(result)

    def register(self, tensors: Mapping[str, Any]) -> None:
        """Say which tensors there are, in the order in which their gradients will come; all ranks call it, once.

        tensors: arrays by name; their kinds, shapes and dtypes are looked at. Without this call the first step does it.

        Raises TypeError or ValueError on a rank whose tensors are bad, and `CollectiveError` on the others, and so for
        what `choose` raises; CollectiveError on all when they differ, or the settings do. RuntimeError at once when the
        tensors are known, by this call or a first step: what is owed of them would be lost.
        """
        if self._stations:
            raise RuntimeError("the tensors are registered: expected one call, before the first step")
        if self._arrays:
            self._fail(RuntimeError("a step is under way: register the tensors before the first of them is started"))
        self._register(tensors)

    def start(self, name: str, array: Any, *, out: Any = None) -> None:
        """Hand over a tensor's gradient; its bucket leaves once it is full and those before it have left.

        name: of a tensor, once a step. array: of the shape and dtype it had at first, or None for zeros; do not change
        it before `finish`, which raises what is wrong with it. In the first step, without `register`, buckets leave in
        `finish`. out: where `finish` writes the mean to, as in a call of the exchange; it may be `array`.

        Raises KeyError or ValueError at once for a name that is unknown, or was there in this step; the step goes on.
        """
        self._check_name(name)
        self._arrays[name] = array
        if out is not None:
            self._outs[name] = out
        try:
            self._leave(lambda station: station.names <= self._arrays.keys())
        except BaseException as error:
            self._end_badly(error)
            raise

    def progress(self) -> None:
        """Move on what is in flight, without waiting, as `start` does: messages advance inside of calls only."""
        for station in self._stations[: self._started]:
            if not station.bucket.test():
                break  # what is in flight moves on together: to test each would look at all for each

    def finish(self) -> dict[str, Any]:
        """Wait for the sums of this step, and return the means by name, as the kinds of array that came at first.

        A tensor that was not started on this rank counts as zero here: one that the step did not use, or all of them
        on a rank that has no batch left. What the residual holds of it may travel.

        Raises what a call does; the residuals of all tensors are then as they were, on all ranks.
        """
        try:
            if not self._stations:
                self._register(self._arrays)
            self._leave(lambda station: True)
            for station in self._stations:
                station.bucket.settle(self.comm, average=self.average)
            self._agree_to_keep()
        except BaseException as error:
            self._end_badly(error)
            raise
        means: dict[str, Any] = {}
        self._arrays, self._outs, self._started = {}, {}, 0
        for station in self._stations:
            means |= station.commit()
        self._end_step([station.bucket for station in self._stations])
        return means

    def ahead(self, parameters: Any) -> Any:
        """Return where to evaluate the next gradient: `parameters` less the residual for `StepAhead`, else as they are.

        parameters: as the gradients: an array, a list, or a dict by name.
        """
        if not isinstance(parameters, Mapping):
            flat, _, restore = flattened(parameters)
            return restore(_ahead(self._own, sound(flat)))
        points: dict[str, Any] = {}
        for station in self._stations:
            flats = zip(station.bucket.pipelines, station.flats(parameters), strict=True)
            points |= station.restore([_ahead(pipeline, sound(flat)) for pipeline, flat in flats])
        return points if self._stations else dict(parameters)

    @property
    def residual_norm(self) -> float:
        """Euclidean norm of all that this rank keeps; a pass over the residuals."""
        return float(np.sqrt(sum(_squared(pipeline.feedback) for pipeline in self._pipelines())))

    def state_dict(self) -> dict[str, Array]:
        """Return copies of all that this rank's exchange remembers: arrays by name, which np.savez can store.

        Each rank saves its own. Settings are not in it, nor is the order of named tensors: `register` them in the same
        order before `load_state_dict`. A run that is taken up so continues bit for bit. For each vector `holds` names
        what was saved, so that nothing goes missing unnoticed. RuntimeError within a step.
        """
        self._check_between_steps()
        return {
            f"{vector}/{name}": array
            for vector, pipeline in self._vectors().items()
            for name, array in pipeline.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned, all of it; ValueError when it does not fit, and nothing changes then."""
        self._check_between_steps()
        vectors, got = self._vectors(), {key.rpartition("/")[0] for key in state}
        if got != vectors.keys():
            raise ValueError(f"the state is of {sorted(got)}: expected {sorted(vectors)}; register named tensors first")
        before = [pipeline.state_dict() for pipeline in vectors.values()]
        try:
            for vector, pipeline in vectors.items():
                mine = {key.rpartition("/")[2]: state[key] for key in state if key.rpartition("/")[0] == vector}
                pipeline.load_state_dict(mine)
            for station in self._stations:
                station.check_lengths()
        except Exception:
            for pipeline, held in zip(vectors.values(), before, strict=True):
                pipeline.load_state_dict(held)
            raise
        self._one = not self._stations and len(state) > len(vectors)

    def continue_on(self, comm: Any) -> None:
        """Go on with the ranks of another communicator, after `collectives.shrink`: each keeps its residuals.

        comm: of ranks that have this exchange, all of which call. What the ranks that are gone owed is lost with them;
        the mean is then over the ranks of `comm`. Raises RuntimeError within a step; CollectiveError on all ranks when
        they have not kept the same steps (the collective compares lengths), which `agree` prevents: go on from a
        checkpoint then; RankFailedError and CollectiveTimeoutError as a step does. The exchange is then as it was.
        """
        self._check_between_steps()
        self._check_steps(comm)
        for pipeline in {id(each): each for each in (self._own, *self._pipelines())}.values():
            for part in chain(pipeline.compressor):
                if hasattr(part, "comm"):
                    part.comm = comm
        self.comm = comm

    def _check_steps(self, comm: Any) -> None:
        """Compare how many steps the ranks have kept, as the length of a sum of nothing.

        By the collective, not by the communicator: so deadlines hold, and all hear of a rank that dies.
        """
        try:
            outcome = self.collective(SparseVector.empty(self.steps, np.float64), comm)
            if hasattr(outcome, "wait"):
                outcome.wait()
        except CollectiveError as error:
            if type(error) is not CollectiveError:  # a deadline, or a death
                raise
            raise CollectiveError(
                f"the ranks have kept different numbers of steps, here the length: {error}; go on from a checkpoint; "
                "with agree=collectives.agree a step is kept by all ranks or none"
            ) from None

    def reset(self) -> None:
        """Forget what is owed, on this rank: its mass is lost; and what a compressor knows of the ranks' sums.

        RuntimeError within a step.
        """
        self._check_between_steps()
        for pipeline in self._pipelines():
            pipeline.reset()

    def rescale(self, factor: float) -> None:
        """Multiply what is owed in gradient units by `factor`, the old learning rate over the new one.

        Raises RuntimeError within a step; what a feedback's `rescale` does, and nothing has changed then.
        """
        self._check_between_steps()
        before = [pipeline.state_dict() for pipeline in self._pipelines()]
        try:
            for pipeline in self._pipelines():
                pipeline.feedback.rescale(factor)
                if pipeline.downlink is not None and not hasattr(pipeline.feedback, "ahead"):  # else it owes updates
                    pipeline.downlink.rescale(factor)
        except Exception:
            for pipeline, held in zip(self._pipelines(), before, strict=True):
                pipeline.load_state_dict(held)
            raise

    def _exchange_named(self, gradients: Mapping[str, Any], outs: Mapping[str, Any]) -> dict[str, Any]:
        try:
            arrays = dict(gradients.items())
            for name in arrays:
                self._check_name(name)
            check_outs(outs, arrays)
        except Exception as error:
            self._fail(error)
        for name, array in arrays.items():
            self.start(name, array, out=outs.get(name))
        means = self.finish()
        return {name: means[name] for name in arrays} | means

    def _settings(self) -> dict[str, str]:
        """Return what all ranks must have set alike, as text."""
        settings = {"small": self._small, "bucket_nbytes": self._bucket_nbytes, "average": self.average}
        settings |= {"dense": self.dense is not None, "downlink": self._own.downlink is not None}
        return {name: repr(value) for name, value in settings.items()}

    def _register(self, tensors: Mapping[str, Any]) -> None:
        found = self._meet(lambda: self._found(tensors))
        order = agreed(found, self._settings(), self.comm)
        make = partial(self._pipeline, tensors)
        rules = Rules(make, self.collective, self.dense, self._small, self._bucket_nbytes, self._bucket)
        self._stations = self._meet(lambda: each_its_own(build(order, rules)))
        self._names = {tensor.name for tensor in order}

    def _found(self, tensors: Mapping[str, Any]) -> list[Tensor]:
        if self._one:
            raise TypeError("this exchange has one vector, not named tensors: use another exchange for them")
        if not tensors:
            raise ValueError("got no tensor: expected at least one array by name")
        for name in tensors:
            self._check_kind_of(name)
        return [described(name, array)[0] for name, array in tensors.items()]

    def _meet(self, prepare: Callable[[], T], length: int = 0) -> T:
        """Return what `prepare` does, on all ranks, or raise on all: by a sum of nothing, of a length.

        By the collective, not by the communicator: so ranks that call something else are told, and deadlines hold.
        """
        try:
            ready = prepare()
        except Exception as error:
            outcome = failed(self.collective, error, self.comm)
        else:
            outcome = self.collective(SparseVector.empty(length, np.float64), self.comm)
        try:
            if hasattr(outcome, "wait"):
                outcome.wait()
        finally:
            del outcome  # else the error, its traceback and this frame hold each other
        return ready

    def _check_name(self, name: Any) -> None:
        self._check_kind_of(name)
        if name in self._arrays:
            raise ValueError(f"{name!r} was started before in this step: expected each tensor once")
        if self._names and name not in self._names:
            raise KeyError(f"{name!r} is none of the tensors of the first step: use another exchange for another model")

    @staticmethod
    def _check_kind_of(name: Any) -> None:
        if not isinstance(name, str):
            raise TypeError(f"a tensor has the name {name!r}: expected a string")

    def _check_between_steps(self) -> None:
        if self._arrays or self._started:
            raise RuntimeError("a step is under way: call finish first")

    def _fail(self, error: Exception) -> NoReturn:
        """Take part in a step as a failed rank; raises. Where all of it is in flight it goes on, to be finished."""
        try:
            if not self._stations:
                self._arrays, self._outs = {}, {}
                try:
                    self._meet(partial(_throw, error))
                finally:
                    self._heard(error)
            elif self._started < len(self._stations):
                self._start_failed(error)
                self._abandon()
                self._heard(error)
            raise error
        finally:
            del error

    def _start_failed(self, error: Exception) -> None:
        """Start the buckets that are left with an error: other ranks may have them in flight, and wait."""
        try:
            for station in self._stations[self._started :]:
                self._started += 1
                with suppress(Exception):
                    station.bucket.start([error for _ in station.groups], self.comm)
        finally:
            del error  # else it, its traceback and this frame hold each other

    def _end_badly(self, error: BaseException) -> None:
        """End a step that failed on all ranks, or, unless it is an Exception, on this one alone, which then leaves."""
        if isinstance(error, Exception):
            self._start_failed(CollectiveError("an earlier bucket of this step failed"))
        self._abandon(wait=isinstance(error, Exception))
        self._heard(error)

    def _agree_to_keep(self) -> None:
        """Return when all ranks that live are where this one is; raise on all of them where one is not."""
        if self._agree is not None and not self._agree(True, self.comm):
            raise _UndoneError("a rank died, or failed, before the step was kept: the step is undone on all ranks")

    def _heard(self, error: BaseException) -> None:
        """Take part in the agreement with a step that failed here, and say where that was."""
        if self._agree is not None and isinstance(error, Exception) and not isinstance(error, _UndoneError):
            with suppress(CollectiveError):  # the error that is there says more
                self._agree(False, self.comm)
        if self._checked and isinstance(error, Exception):
            in_step(error, self.steps, self.comm.rank)

    def _leave(self, ready: Callable[[Station], bool]) -> None:
        """Start the buckets whose turn it is, and move on what is in flight."""
        for station in self._stations[self._started :]:
            if not ready(station):
                break
            self._started += 1
            station.start(self._arrays, self._outs, self.comm)
        self.progress()

    def _abandon(self, *, wait: bool = True) -> None:
        """End a step that failed: all is as before it."""
        for station in reversed(self._stations):
            station.abandon(wait=wait)
        self._arrays, self._outs, self._started = {}, {}, 0

    def _pipeline(self, tensors: Mapping[str, Any], tensor: Tensor | None) -> Pipeline:
        """Return the pipeline of a tensor, or of small ones together."""
        if self._choose is not None and tensor is not None:
            chosen = self._choose(tensor.name, tensors[tensor.name])
            if not (isinstance(chosen, tuple) and len(chosen) == 2):
                raise TypeError(f"choose returned {chosen!r} for {tensor.name!r}: expected (compressor, feedback)")
            check_pair(*chosen, self.dense)
            return Pipeline(*chosen, deepcopy(self._own.downlink))
        return Pipeline(*deepcopy((self.compressor, self.feedback, self._own.downlink)))

    def _pipelines(self) -> list[Pipeline]:
        return [pipeline for station in self._stations for pipeline in station.bucket.pipelines] or [self._own]

    def _vectors(self) -> dict[str, Pipeline]:
        """Return the pipelines by what they serve: a tensor, small ones together, or the one gradient."""
        named = {
            vector: pipeline
            for station in self._stations
            for vector, pipeline in zip(station.bucket.vectors, station.bucket.pipelines, strict=True)
        }
        return named or {"gradient": self._own}

    def _end_step(self, buckets: Sequence[Bucket]) -> None:
        """Average residuals where that is due, and tell what the step did."""
        if self._checked:
            self._balance(buckets)
        self.steps += 1
        for pipeline in (pipeline for bucket in buckets for pipeline in bucket.pipelines):
            if getattr(pipeline.feedback, "averaging_due", False):
                self._average(pipeline.feedback)
        self._tell(buckets)

    def _average(self, feedback: Any) -> None:
        """Give every rank the mean of the residuals; where their sum is out of range all keep their own for now."""
        own = feedback.residual
        total = self.dense(own.astype(wide(own.dtype), copy=False), self.comm)  # type: ignore[misc]
        total = total.wait() if hasattr(total, "wait") else total
        if np.isfinite(total).all():
            feedback.averaged((total / self.comm.size).astype(own.dtype, copy=False))

    def _balance(self, buckets: Sequence[Any]) -> None:
        """Let all ranks compare what left them with what came, each through calls that move on what is in flight."""
        accounts = self._meet(lambda: [account for bucket in buckets for account in bucket.accounts])
        settings, brought = zip(*self.comm.allgather((self._settings(), accounts)), strict=True)
        check_same("settings", settings)
        balance(brought, self.steps)

    def _tell(self, buckets: Sequence[Bucket]) -> None:
        self.statistics = Statistics(
            length=sum(bucket.bounds[-1] for bucket in buckets),
            **{name: sum(getattr(bucket, name) for bucket in buckets) for name in _SUMMED},
            residual_norm=self.residual_norm if self.log else None,
        )
        if self.log:
            self.log(self.statistics)


_ONE_VECTOR = 1  # the length of the sum of nothing by which ranks meet whose exchange has no named tensors

_SUMMED = (
    "sent",
    "received",
    "rejected",
    "nbytes",
    "compress_seconds",
    "communicate_seconds",
    "restore_seconds",
)


class _UndoneError(CollectiveError):
    """Say that all ranks have agreed not to keep a step."""


def _not_named() -> TypeError:
    return TypeError("this exchange has named tensors: expected a dict; use another exchange for one vector")


def _throw(error: Exception) -> NoReturn:
    try:
        raise error
    finally:
        del error


def _ahead(pipeline: Pipeline, flat: Array) -> Array:
    ahead = getattr(pipeline.feedback, "ahead", None)
    return flat if ahead is None else ahead(flat)


def _squared(feedback: Feedback) -> float:
    residual = getattr(feedback, "residual", None)
    if residual is None:
        return 0.0
    kept = residual.astype(wide(residual.dtype), copy=False)  # squares leave the range of float16
    return float(np.vdot(kept, kept))
