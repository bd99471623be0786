"""GradientExchange: from the gradients of one rank to the mean over all ranks."""

import math
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import partial
from itertools import count
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from collectives.calls.all_or_none import (
    all_or_none,
    check_same,
    contributed,
    gather_objects,
    outcome_of,
)
from collectives.calls.positions import Position
from collectives.calls.replicas import EVERY, REMEDY, Comparison
from collectives.exchange.checkpoint import (
    check_state,
    header_of,
    load_whole_state,
    restored_on_error,
    whole_state,
)
from collectives.exchange.forms import by_name, check_same_form, in_form, outs_by_name
from collectives.exchange.layout import Choose, Layout
from collectives.exchange.reduction import CONTRIBUTORS, OPERATION, SIGN, reduction
from collectives.exchange.skips import Skips
from collectives.exchange.statistics import Statistics, report
from collectives.exchange.step import Step
from collectives.faults.interrupts import defer_interrupt
from collectives.runtime.engine import of_process
from collectives.runtime.link import attached, check_communicator, faults_of
from mpicomp.arrays import ByName
from mpicomp.bases import Basis
from mpicomp.bucket import Bucket
from mpicomp.compressors import Compressor, Dense
from mpicomp.compressors.base import set_back
from mpicomp.errors import warn
from mpicomp.feedback import ErrorFeedback, Feedback, StepAhead
from mpicomp.settings import CheckedKeywords, SetOnce, to_choice, to_integer
from mpicomp.state import SharedStateError
from mpicomp.tensors import DICT, Form

# Ranks may have different settings of NumPy's floating-point errors; see `step`.
_NO_WARNINGS = partial(np.errstate, all="ignore")


class GradientExchange(CheckedKeywords):
    """Exchange gradients between the ranks of `comm`: each gets the mean of the vectors sent by all ranks.

    The object holds the residuals: use one for each model, and the same settings and calls
    on every rank; compressors and feedbacks may differ. The first step compares settings and
    tensors between the ranks. A step is kept by all ranks or by none.

    A call takes an array, a list of arrays that are compressed as one vector, or a dict of
    arrays that are compressed separately: float16, float32, float64, or bfloat16, which is
    exchanged as float32. `start` and `finish` take named arrays one by one. `state_dict`
    saves the residuals, and `hold` leaves frozen layers out.

    Args:
        comm: any mpi4py intracommunicator.
        compressor: selects the entries to send; each named tensor gets a copy. For gradients
            in a dict also a function of the name and the shape of a tensor that returns its
            compressor. None is allowed with `bits` and with collectives of dense arrays.
        feedback: keeps the entries that are not sent, by default `ErrorFeedback()`; each
            named tensor gets a copy.
        collective: sums what the ranks send, by default `sparse_allreduce`. Also
            `gtopk_allreduce`, `sparse_allgather` or `compressed_allreduce`; the dense sums
            `quantised_allreduce` and `dense_allreduce`, in place of a compressor. Its arguments
            are bound, as in `partial(gtopk_allreduce, k=1000)`. One of your own: docs/exchange.md.
        average: True divides the sum by the number of ranks, False does not. "contributors"
            divides each entry by the number of ranks that sent it, which `sparse_allreduce`
            counts; tensors that are sent dense are divided by the number of ranks. "sign"
            returns the sign of the sum, 1, -1 or 0.
        basis: an orthonormal basis, such as `Hadamard()`, whose coefficients of each tensor
            are compressed; the residual stays in it, and the mean is transformed back to a
            dense array. None, the default, compresses the values.
        bits: 8, 4, 2 or 1: send every value in so many bits, by `quantised_allreduce` in place
            of compressor and collective; the rounding error is the next residual.
        small: named tensors with fewer values are sent dense; by default 1024, and 0 in a
            basis and for dense sums.
        bucket_nbytes: bytes of the named gradients that are sent together, at most: a larger
            one is sent alone, and the `small` ones together. By default 2^25 on one node, and
            2^30 for tensors that are on a device on all ranks. Between nodes as few as
            latency and rate of the links allow, as the last bucket is sent when all
            gradients are computed.
        nonfinite: "raise" raises on all ranks if a gradient of any rank contains NaN or an
            infinity, or the sum leaves the range of its dtype. "skip" skips the step on all
            ranks, which takes one more pass over the gradients: residuals do not change, and
            all means are zero (empty with sparse=True).
        most_skips: the number of steps skipped in a row, at least 1, after which all ranks
            warn once, and name the ranks and the values.
        log: a function that is called with the `Statistics` of each step that was kept, for
            which it takes a pass over the residuals; an error in it becomes a warning.

    Attributes:
        comm: the communicator.
        compressor: as passed, a copy.
        feedback: as passed, a copy; that of each tensor is another copy.
        finite: whether the last step was kept, and not skipped; the same on all ranks.
        steps: the number of steps that were kept, also before a state that was loaded.
        skipped: the number of steps that were skipped.
        statistics: the `Statistics` of the last step; None before the first.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: an argument has a wrong value, or some do not go together.

    >>> exchange = GradientExchange(comm, TopK(k=2))
    >>> exchange(gradient).tolist()
    [0.0, -3.0, 0.0, 2.0]
    >>> round(exchange.residual_norm, 3)  # of [0.5, 0, 0.25, 0]
    0.559

    Every value in four bits, on the way to the sum and back; bins as AdaComp's authors
    use them:

    >>> exchange = GradientExchange(comm, bits=4)
    >>> def bins(name, shape):
    ...     return AdaComp(50 if len(shape) == 4 else 500)
    >>> exchange = GradientExchange(comm, bins)
    """

    compressor: Any = SetOnce()
    feedback: Any = SetOnce()
    average: Any = SetOnce()
    basis: Any = SetOnce()

    def __init__(
        self,
        comm: Any,
        compressor: Compressor | Choose | None = None,
        feedback: Feedback | None = None,
        collective: Callable[[Any, Any], Any] | None = None,
        *,
        average: bool | str = True,
        basis: Basis | None = None,
        bits: int | None = None,
        small: int | None = None,
        bucket_nbytes: int | None = None,
        nonfinite: str = "raise",
        most_skips: int = 10,
        log: Callable[[Statistics], None] | None = None,
    ) -> None:
        if feedback is None:
            feedback = ErrorFeedback()
        check_communicator(comm)
        average = to_choice("average", average, (True, False, CONTRIBUTORS, SIGN))
        nonfinite = to_choice("nonfinite", nonfinite, ("raise", "skip"))
        if not (log is None or callable(log)):
            raise TypeError(f"log is {log!r}: expected a function of Statistics")
        summing = reduction(collective, bits, average)
        takes_arrays = summing.declared.takes_arrays
        if compressor is None and takes_arrays:
            compressor = Dense()
        if compressor is None:
            raise TypeError(
                "compressor is None: expected a compressor such as TopK(density=0.01), or bits=4 in its place"
            )
        # Dense sums and bases need no exemption for small tensors.
        if small is None:
            small = 0 if takes_arrays or basis is not None else 1024
        if bucket_nbytes is not None:
            bucket_nbytes = to_integer("bucket_nbytes", bucket_nbytes, least=0)
        # An object that two exchanges are given needs a state in each.
        self.compressor = copied(compressor)
        self.feedback = copied(feedback)
        self.average = average
        self.basis = basis
        self.log = log
        # Numbers of steps: kept ones, also before a loaded state, and skipped ones.
        self.steps = self.skipped = 0
        self._skips = Skips(most_skips)
        # Calls that changed the state after the last step, the same on all ranks.
        self._changes: list[str] = []
        # Whether the last step was kept, and not skipped.
        self.finite = True
        self.statistics: Statistics | None = None  # of the last step
        # Sums of the first step, which compiles and connects, and of all others.
        self._totals: list[Statistics] = []
        # Whether all ranks of the last step share memory.
        self._is_on_one_node = False
        self._layout = Layout(
            compressor=self.compressor,
            feedback=self.feedback,
            small=to_integer("small", small, least=0),
            bucket_nbytes=bucket_nbytes,
            nonfinite=nonfinite,
            basis=basis,
            reduction=summing,
        )
        self.parts = self._layout.parts
        self._form: Form | None = None  # The form of the gradients, once it is known.
        self._names: set[str] = set()
        # Names of all tensors, in the order of the buckets before any tensor was held.
        self._order: list[str] = []
        self._buckets: list[Bucket] = []
        self._held: list[Bucket] = []  # Buckets of tensors that `hold` leaves out.
        self._step: Step | None = None  # the one under way
        self._comparison = Comparison(dict, EVERY, REMEDY)  # It compares no parameters.
        # The number counts the exchanges on this communicator, in the order in which
        # they were made.
        self.comm, self._rank_and_size, self.number = place_on(comm)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a GradientExchange has a communicator, and is neither copied nor pickled: save its state_dict(), and keep "
            "it outside of modules that are copied, as by copy.deepcopy or AveragedModel"
        )

    def __call__(self, gradient: Any, *, out: Any = None, sparse: bool = False) -> Any:
        """Exchange a gradient and return the mean over the ranks, as the same kind of array.

        Args:
            gradient: an array of any shape; or a list or tuple of arrays of one dtype, which are
                compressed as one vector; or a dict of arrays by name, each compressed separately,
                as `start` and `finish` do. float16, float32, float64 or bfloat16; of NumPy, CuPy
                or a kind that supports DLPack. The same shapes and dtypes on every rank and in
                every step.
            out: output buffers in the form of `gradient`, C-contiguous, of the same shapes and
                dtypes, or the gradient itself; new arrays by default. A dict may omit names.
            sparse: return the mean as a SparseVector, or a list or dict of these, with indices
                into each array in C order, without a pass over all values
                (`SparseVector.add_to`).

        Returns:
            The mean as an array, a list, or a dict of the means of all registered tensors,
            those of `gradient` first; `out` where given.

        Raises:
            KeyError: `gradient` or `out` has an unknown name; other ranks raise CollectiveError.
            TypeError: `gradient` or `out` is of a wrong type; likewise.
            ValueError: `gradient` is not finite, or a shape or dtype is not as before; likewise.
            RuntimeError: a step of named tensors is in progress; likewise.
            OverflowError: on all ranks, if the sum leaves the range of the dtype; on this rank,
                if the gradient plus the residual does, and then other ranks raise CollectiveError.
            CollectiveError: another rank's gradient is bad, or the ranks are in different steps.
                Nothing changes, as after every error above.
        """
        try:
            check_between_steps(self)
            form, arrays = by_name(gradient)
            if self._form is not None:
                check_same_form(form, arrays, self._form, self._names, self._order)
            outs = {}
            if out is not None:
                outs = outs_by_name(out, form, arrays, self._names)
        except Exception as error:
            self.fail(error)
        self._step = self._new_step()
        self._step.add(arrays, outs)
        results = "sparse" if sparse else "dense"
        step = self._run(form, results)
        return in_form(form, step.results)

    @defer_interrupt
    def register(self, tensors: ByName) -> None:
        """Register the tensors, in the order in which their gradients become ready; all ranks call it, once.

        Without this call the first step registers them.

        Args:
            tensors: arrays by name; only kind, shape and dtype are used.

        Raises:
            TypeError: a tensor is of a wrong type; other ranks raise CollectiveError.
            ValueError: a tensor has a wrong dtype or memory; likewise. Errors of a `compressor`
                function are raised too.
            RuntimeError: the tensors are registered.
            CollectiveError: another rank's tensors are bad, or tensors or settings differ.
        """
        if self._buckets:
            raise RuntimeError(
                "the tensors of this exchange are registered: expected an exchange for each model, and one call of "
                "register, before the first step"
            )
        if self.is_in_step:
            self.fail(
                RuntimeError(
                    "a step is in progress: register the tensors before the first of them is started"
                )
            )
        self._register(DICT, tensors)

    def start(self, name: str, array: Any, *, out: Any = None) -> None:
        """Pass the gradient of a tensor; its bucket is sent once it is full and all earlier buckets were sent.

        If no tensors are registered, `finish` sends the buckets.

        Args:
            name: of a tensor, once a step.
            array: of the registered shape and dtype; None for zeros. Do not change it before
                `finish`, which raises its errors, has returned.
            out: the output buffer, C-contiguous, of the same shape and dtype, or `array` itself;
                a new array by default.

        Raises:
            KeyError: the name is unknown; the step continues.
            TypeError: `array` or `out` is of another kind than registered; the step continues.
            ValueError: the name was started before in this step; the step continues.
        """
        if self._step is not None and name in self._step.arrays:
            raise ValueError(
                f"{name!r} was started before in this step: expected each tensor once"
            )
        if self._form is not None:
            check_same_form(DICT, {name: array}, self._form, self._names, self._order)
        outs = {} if out is None else {name: out}
        self.start_together({name: array}, outs)

    @defer_interrupt
    def start_together(
        self, arrays: ByName, outs: ByName | None = None, *, waits: bool = False
    ) -> None:
        """Pass the gradients of several registered tensors, without the checks of `start`.

        waits: the caller calls `finish` at once if these are the last ones.
        """
        step = self._step = self._step or self._new_step()
        try:
            with _NO_WARNINGS():
                step.add(arrays, outs or {})
                step.start(self._buckets, waits=waits)
                if not waits or len(step.started) < len(self._buckets):
                    step.advance()
        except Exception as error:
            self._leave(step, error)
            raise
        # Only this rank is interrupted, and its buckets may be in flight, so the step
        # fails on all ranks.
        except BaseException as interrupt:
            self.fail(interrupt)

    def progress(self) -> None:
        """Advance the operations in flight, without waiting, as `start` does, where nothing else advances them."""
        if self._step is not None:
            self._step.advance()

    def finish(self, *, sparse: bool = False) -> dict[str, Any]:
        """Wait for the sums of this step, and return the means by name.

        A tensor that was not started on this rank counts as zero, such as all of them on a rank
        without a batch, but entries of its residual may be sent.

        Args:
            sparse: return SparseVectors, as in a call.

        Returns:
            A dict of the means of all registered tensors, of the registered kinds of array.

        Raises:
            CollectiveError: another rank failed. The errors of a call are raised too.
        """
        results = "sparse" if sparse else "dense"
        return self._run(DICT, results).results

    def finish_vectors(self, *settings: str) -> list[Any]:
        """Complete the step as `finish` does, and return the mean of each of `buckets`; none if the step is skipped.

        settings: of the caller, as text, which must be the same on all ranks.
        """
        return self._run(DICT, "vectors", settings=settings).means

    def fail(self, error: Any) -> NoReturn:
        """End the step under way, or the next one, as a rank that failed; the other ranks raise CollectiveError.

        Args:
            error: any exception, such as KeyboardInterrupt; it is raised here, as by `finish`.

        Raises:
            TypeError: `error` is no exception.
        """
        if not isinstance(error, BaseException):
            error = TypeError(f"fail got {error!r}: expected an exception")
        traceback = error.__traceback__  # A step that fails drops the traceback.
        own = contributed(error)
        try:
            try:
                if not self._buckets:
                    self._step = None
                    # The other ranks compare their tensors, so this rank contributes
                    # its error there.
                    gather_objects(own, self.comm, OPERATION)
                self._run(DICT, "dense", own)
            except Exception as raised:
                if raised is not own:
                    raise
            raise error.with_traceback(traceback)
        finally:
            # The errors, a traceback and this frame would form a reference cycle.
            del error, own

    def ahead(self, parameters: Any) -> Any:
        """Return where to evaluate the next gradient: parameters less the residual for `StepAhead`, else as they are.

        Args:
            parameters: in the form of the gradients: an array, a list, or a dict by name.

        Raises:
            KeyError: a parameter is missing.
        """
        if not self._buckets:
            return parameters
        form, points = by_name(parameters)
        names = {name for bucket in self.buckets for name in bucket.names_of_tensors}
        if missing := sorted(names - points.keys()):
            raise KeyError(
                f"got no parameter for {missing[:3]}: expected those of all tensors, in the form of the gradients"
            )
        for bucket in self.buckets:
            points |= bucket.ahead(points)
        return in_form(form, points)

    def compare_replicas(
        self,
        parameters: Callable[[], Any],
        every: int = EVERY,
        remedy: str = REMEDY,
    ) -> None:
        """Compare the parameters of the ranks at the next step, and at every `every`-th one. All ranks call it.

        It reads the parameters once in such a step, and sends no further message: their
        digests are part of the agreement on the step. If they differ, the step is
        undone, and all ranks raise CollectiveError, which names the ranks and the first
        tensor.

        Args:
            parameters: Called in such a step; returns what `check_replicas` accepts,
                or an empty dict on a rank that is not to be compared.
            every: Steps from one comparison to the next, at least 1.
            remedy: A sentence at the end of the error.

        Example:
            >>> exchange = GradientExchange(comm, bits=4)
            >>> exchange.compare_replicas(lambda: {"weight": np.ones(4)})
        """
        self._comparison = Comparison(parameters, every, remedy)

    @property
    def residual_norm(self) -> float:
        """The Euclidean norm of this rank's residuals, except those in place; takes a pass over them."""
        return math.hypot(*[bucket.feedback.residual_norm for bucket in self.buckets])

    @property
    def compressors(self) -> dict[str, Compressor]:
        """The compressors in use, by name of the tensor; that of one vector is "gradient"."""
        return {
            name: run.compressor
            for bucket in self.buckets
            for run in bucket.selection.runs
            for name in bucket.names[run.first : run.end]
        }

    def report(self) -> str:
        """Return lines to print: bytes and milliseconds of an exchange, in the mean of all but the first one."""
        itemsize = next(
            (tensor.dtype.itemsize for tensor in self.buckets[0].tensors), 0
        )
        return report(
            self._totals,
            self.skipped,
            self._rank_and_size["ranks"],
            itemsize,
            is_on_one_node=self._is_on_one_node,
        )

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return copies of the state of this rank's exchange: arrays by name, which np.savez can store.

        Each rank saves its own state, at any time: within a step it is the state before
        that step. A run resumed from it continues bitwise. Rank, number of ranks, step
        and settings are in the part of each tensor; the order of named tensors
        (`register` them in it first) and residuals in place (save the gradients) are
        not.
        """
        with set_back(self._step.snapshots if self._step else []):
            return whole_state(self.buckets, self._place())

    @defer_interrupt
    def load_state_dict(self, state: ByName, *, same_settings: bool = True) -> None:
        """Load a `state_dict` of this rank and number of ranks; if it raises, nothing changes.

        All ranks call it, with states of one step: the next step raises CollectiveError
        on all of them otherwise.

        Args:
            state: arrays by name, as `state_dict` returned them, also from np.load.
            same_settings: False also accepts a state with other settings, such as another density
                or decay.

        Raises:
            ValueError: the state is of another rank, number of ranks (see `redistribute_state`) or
                other settings, naming both; or it is incomplete, or does not fit.
            RuntimeError: a step is in progress.
        """
        check_between_steps(self)
        saved = check_state(
            self.buckets, state, self._place(), same_settings=same_settings
        )
        try:
            load_whole_state(self.buckets, saved)
        # Tensors of a bucket were held for different numbers of steps.
        except SharedStateError:
            held = {name for bucket in self._held for name in bucket.names}
            self._buckets, self._held = self._layout.rearranged(
                self.buckets, self._order, held, saved
            )
        self.steps = header_of(state)["steps"]
        self._changes = ["load_state_dict"]
        self._comparison.is_due = True

    @defer_interrupt
    def hold(self, names: Iterable[str], changed: Iterable[str] = ()) -> set[str]:
        """Leave named tensors out of the following steps, such as frozen layers, and return their names.

        Nothing of them is sent, no mean is returned, and their residuals and compressors do not
        change. All ranks call it. If it raises, nothing changes.

        Args:
            names: all that are left out from now on; none takes all up again.
            changed: those of `names` that this rank has to send nevertheless, by default none.
                What any rank has to send is not left out.

        Returns:
            The names that are left out on all ranks.

        Raises:
            KeyError: a name is unknown; other ranks raise CollectiveError.
            ValueError: no tensor is left; likewise.
            RuntimeError: a step is in progress; likewise.
            CollectiveError: another rank failed, or the names differ.
        """
        check_between_steps(self)
        proposal = outcome_of(self._to_hold, names, changed)
        before = {name for bucket in self._held for name in bucket.names}
        call = f"{OPERATION}.hold"
        if not isinstance(proposal, Exception):
            call += f"({', '.join(proposal['names'][:3])})"
            ended = sorted(before.difference(proposal["names"]))
            if ended:
                call += f" after hold({', '.join(ended[:3])})"
        try:
            everyone = gather_objects(proposal, self.comm, call)
        # The other ranks may be in a step, and have taken this call for the first sum
        # of it.
        except Exception as error:
            if not self._buckets:
                raise
            self._step = self._new_step()
            self._step.start_failed(self._buckets[0], error)
            self.fail(error)
        check_same(
            "tensors to hold", [{"names": str(answer["names"])} for answer in everyone]
        )
        held = set(proposal["names"]).difference(
            *[answer["changed"] for answer in everyone]
        )
        if held == before:
            return held
        with all_or_none(self.comm, OPERATION):
            place = self._place()
            state = whole_state(self.buckets, place)
            saved = check_state(self.buckets, state, place, same_settings=False)
            rearranged = self._layout.rearranged(self.buckets, self._order, held, saved)
        self._buckets, self._held = rearranged
        self._names = {
            name for bucket in self._buckets for name in bucket.names_of_tensors
        }
        return held

    def _to_hold(
        self, names: Iterable[str], changed: Iterable[str]
    ) -> dict[str, list[str]]:
        """Return the names to hold, and those of them that this rank has to send, in order; KeyError for others."""
        if not (isinstance(names, Iterable) and isinstance(changed, Iterable)):
            raise TypeError(f"hold got {names!r}: expected names of tensors")
        if isinstance(names, str):
            names = [names]
        held = dict.fromkeys(names)
        check_same_form(DICT, held, DICT, {*self._order})
        return {"names": sorted(held), "changed": sorted(held.keys() & {*changed})}

    def continue_on(self, comm: Any) -> None:
        """Continue with the ranks of another communicator, after `collectives.shrink`: each keeps its residuals.

        The residuals of dead ranks are lost; the mean is then over the ranks of `comm`. If it
        raises, nothing changes.

        Args:
            comm: an mpi4py intracommunicator of ranks that have this exchange; all of them call.

        Raises:
            RuntimeError: a step is in progress.
            CollectiveError: the ranks have kept different steps.
            RankFailedError: a rank died.
            CollectiveTimeoutError: a rank is absent.
        """
        check_between_steps(self)
        mine = {"steps kept": str(self.steps), "buckets": str(len(self._buckets))}
        check_same(
            "state, or load a checkpoint",
            gather_objects(mine, comm, f"{OPERATION}.continue_on"),
        )
        self.comm, self._rank_and_size, self.number = place_on(comm)

    @defer_interrupt
    def reset(self) -> None:
        """Clear the residual on this rank, whose mass is lost, and the compressors' memory of aggregates.

        All ranks call it: the next step raises CollectiveError on all of them otherwise.

        Raises:
            RuntimeError: a step is in progress.
        """
        check_between_steps(self)
        for bucket in self.buckets:
            bucket.reset()
        self._changes = [*(call for call in self._changes if call != "reset"), "reset"]

    @defer_interrupt
    def rescale(self, factor: float) -> None:
        """Multiply residuals in gradient units by a factor when the learning rate changes.

        All ranks call it: the next step raises CollectiveError on all of them otherwise. If it
        raises, nothing changes.

        Args:
            factor: the old learning rate over the new one, above 0.

        Raises:
            ValueError: the factor is out of range.
            OverflowError: a value leaves the range of its dtype.
            RuntimeError: a step is in progress.
        """
        check_between_steps(self)
        with restored_on_error(self.buckets):
            for bucket in self.buckets:
                bucket.feedback.rescale(factor)
        self._changes = [*self._changes, f"rescale({float(factor)!r})"]

    @defer_interrupt
    def _run(
        self,
        form: Form,
        results: str,
        error: Exception | None = None,
        *,
        settings: Sequence[str] = (),
    ) -> Step:
        """Complete the current step, count it, and return it; form: of the gradients. See `Step.run`."""
        step = self._step = self._step or self._new_step()
        try:
            with _NO_WARNINGS():
                if not self._buckets:
                    self._register(form, step.arrays)
                here = f"step {self.steps} of exchange {self.number}"
                changes = [f"after {call}" for call in self._changes]
                state = ", ".join([here, *changes, *settings])
                position = outcome_of(self._comparison.position, state, self.steps)
                if isinstance(position, Exception):
                    error = error or position
                    position = Position(state)
                step.run(self._buckets, results, position, error)
        except BaseException as raised:
            self._leave(step, raised)
            raise
        finally:
            # The error and this frame would form a reference cycle.
            error = None
        self._step = None
        self._comparison.is_due = False
        self.finite = step.is_kept
        if step.is_kept:
            self.steps += 1
            self._skips.end()
            self._changes = []
            self._record(step.close())
            self._is_on_one_node = step.is_on_one_node
        else:
            self.skipped += 1
            self._skips.count(step.why_skipped)
        return step

    def _place(self) -> dict[str, Any]:
        """Return what a saved state names besides the parts of each tensor."""
        return {
            **self._rank_and_size,  # also after MPI.Finalize
            "steps": self.steps,
            "settings": self._layout.settings,
        }

    def _new_step(self) -> Step:
        if isinstance(self.feedback, StepAhead):
            # Held tensors are joined with others later.
            for bucket in self.buckets:
                feedback: Any = bucket.feedback
                feedback.rate = self.feedback.rate
        return Step(self.comm, self._layout)

    def _leave(self, step: Step, error: BaseException) -> None:
        """End a step by an error: by an Exception on all ranks, by anything else on this rank alone."""
        if self._step is step:  # If not, `fail` has ended it.
            self._step = None
            step.end(error)

    def _register(self, form: Form, arrays: ByName) -> None:
        self._buckets = self._layout.buckets(form, arrays, self.comm)
        names = [name for bucket in self._buckets for name in bucket.names_of_tensors]
        self._form = form
        self._names = {*names}
        self._order = names if form == DICT else []

    @property
    def is_in_step(self) -> bool:
        """Whether a step was started, and has not ended."""
        return self._step is not None

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, at the end those of `hold`; before the first step that of a single vector."""
        return [*self._buckets, *self._held] or [self._layout.alone([])]

    def _record(self, statistics: Statistics) -> None:
        """Keep the statistics of a step that was kept, and log them."""
        self.statistics = statistics
        if len(self._totals) < 2:
            self._totals.append(statistics)
        else:
            self._totals[1] = statistics.plus(self._totals[1])
        try:
            if self.log:
                norm = self.residual_norm  # memory may end in it
                self.statistics = statistics._replace(residual_norm=norm)
                self.log(self.statistics)
        except Exception as error:
            # The other ranks have kept the step, so this rank must not raise.
            warn(f"log raised {error!r}: the step is kept", depth=2)


def copied(part: Any) -> Any:
    """Return a copy of a compressor or a feedback for one exchange; anything else is returned, and checked later."""
    return deepcopy(part) if isinstance(part, Compressor | Feedback) else part


def place_on(comm: Any) -> tuple[Any, dict[str, int], int]:
    """Return a communicator, what states say of this rank on it, and the number of the next exchange there."""
    of_process().know(faults_of(comm))  # all ranks know its first call
    number = next(attached(comm, "exchanges", count))
    return comm, {"rank": comm.rank, "ranks": comm.size}, number


def check_between_steps(exchange: GradientExchange) -> None:
    """Raise RuntimeError within a step."""
    if exchange.is_in_step:
        raise RuntimeError("a step is in progress: call finish first")
