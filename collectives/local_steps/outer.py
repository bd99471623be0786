"""Local steps with a sparse outer exchange: ranks train separately, and exchange their progress every H steps.

Source: A. Douillard et al., "DiLoCo: Distributed low-communication training of language models", 2023 (arXiv
2311.08105); with Top-k, error feedback and few bits a value: SparseLoCo, 2025 (arXiv 2508.15706).

    anchor a: the model on which all ranks agree, the same bits on each
    a round:  theta_r = H steps of any optimiser from a, on each rank r
              Delta_r = a - theta_r                              the pseudo-gradient: of the sign of a gradient
              Delta   = exchange(Delta_r)                        compression, residual and mean are the exchange's
              v = momentum v + Delta                             u = Delta + momentum v with Nesterov, else u = v
              a = a - rate u,  theta_r = a

With a delay of d the exchange starts after step H and finishes d steps later; the steps
in between are kept: theta_r = a' + (theta_r - theta_r at the start), where a' is the
new anchor.

Rounds and bytes: those of the exchange, every H steps; in the debug mode
(MPICOMP_CHECK=1) 2 ceil(lg P) more small messages. Memory: the anchor, the
pseudo-gradient, v with momentum, and the exchange's own.

A parameter in bfloat16 has an anchor, a pseudo-gradient and v in float32: theta_r
starts each round as a rounded to bfloat16, ties to even, and Delta_r = that start -
theta_r. So steps that are smaller than a bit of bfloat16 add up in the anchor, which
does not change where no rank makes progress.

Invariants: the anchor has the same bits on all ranks. A round that fails leaves anchor,
v, residuals and parameters unchanged on all ranks: operations that can fail on one rank
run before the exchange ends, and later ones write to allocated memory, except for
buffers of bounded size.

Differences from the papers: pseudo-gradients are not weighted by numbers of batches;
there is no weight decay in the outer step; a round at rate 0 discards its progress, and
the residuals.
"""

from collections.abc import Callable, Sequence
from inspect import isroutine
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.calls import checking
from collectives.calls.all_or_none import check_same, gather_results
from collectives.calls.positions import check_digests
from collectives.calls.replicas import EVERY, digests_of
from collectives.exchange import GradientExchange
from collectives.exchange.checkpoint import (
    HEADER,
    LOOP,
    Header,
    check_saved,
    header_of,
    pack,
)
from collectives.exchange.forms import by_name, in_form
from collectives.exchange.names import canonical_names
from collectives.faults.errors import CollectiveError
from collectives.faults.interrupts import defer_interrupt
from collectives.local_steps.redistribution import IN_FLIGHT, PROGRESS
from collectives.runtime import staging
from mpicomp.arrays import Array, ByName
from mpicomp.arrays.frameworks import to_array
from mpicomp.arrays.memory import read_only
from mpicomp.digests import joint_digest
from mpicomp.errors import warn
from mpicomp.replica import (
    Distances,
    Replica,
    Trial,
    check_same_memory,
    check_separate,
    untied,
)
from mpicomp.settings import CheckedKeywords, SetOnce, to_bool, to_integer, to_number
from mpicomp.state import check_names
from mpicomp.tensors import ARRAY

OPERATION = "OuterLoop"  # name of the ranks' agreements in errors
FACTS = "count", "rounds", "steps_into_round", PROGRESS, IN_FLIGHT
# Rounds after which the first step is examined, at most; see `_look_at_first_step`.
_TRIALS = 3
OTHER_PARAMETERS = (
    "Expected the same values at the start: load one checkpoint on all ranks, or broadcast rank 0's, as by "
    "comm.Bcast(array, root=0), and call restart(), or make a new exchange and loop. To resume within a round, make "
    "the loop first, and then load its state and the parameters"
)
OTHER_LOOP = (
    "make the loop with the settings that were saved, or load with same_settings=False"
)


class OuterLoop(CheckedKeywords):
    """Synchronise the models of all ranks by an exchange of pseudo-gradients every `every` steps.

    All ranks construct it, with the same settings and the same values of the parameters:
    broadcast those of rank 0 first. Then each calls `step` after each step of its own
    optimiser, whose state it does not change.

    A tensor of PyTorch that no longer requires a gradient is left out of the rounds in which
    no rank has changed it, with its residual. Average the statistics of batch normalisation
    yourself, with `dense_allreduce`, before you evaluate or save the model.

    Args:
        exchange: a `GradientExchange` that nothing else uses, without a basis or
            average="sign", with a feedback in the units of gradients; the constructor
            registers its tensors. Tensors of fewer than its `small` values are sent dense.
        parameters: arrays by name, such as `dict(model.named_parameters())`, or a list, or one
            array; or a function that returns them, which is called for each round. float16,
            bfloat16, float32 or float64, without gaps in memory, of NumPy, CuPy, or a kind
            that supports DLPack. `step` writes to them in place. Tied parameters (the same
            memory under two names) count once.
        every: H, the steps from one exchange to the next; H = 1 compresses the update of each
            step.
        rate: multiplies the mean at the end of a round, at least 0; it may be changed between
            steps, to the same value on all ranks. At 0 a round discards the progress of all
            ranks and their residuals, and does not change the momentum.
        momentum: as in PyTorch's SGD, from 0 to below 1, without weight decay, which belongs to
            the inner optimiser.
        nesterov: likewise; with a momentum above 0.
        delay: steps computed while an exchange is in flight, 0 <= delay < every.
        check_every: rounds from one comparison of the anchors of all ranks to the next; the
            first round has one. The digests are part of the agreement of a round, without
            further messages. 0 compares nothing, and does not raise where the step after a
            round undoes what the round has written, as an optimiser does that keeps copies of
            the parameters: for programs that undo it on purpose.
        first: steps before the first exchange, 1 <= first <= every, by default `every`: loops
            over the parts of a model, each with another number, exchange one after the other.

    Attributes:
        exchange: as passed.
        rounds: the number of exchanges that were kept.

    Raises:
        TypeError: an argument is of a wrong type; other ranks raise CollectiveError, unless it
            is the exchange.
        ValueError: an argument has a wrong value; other ranks raise CollectiveError.
        CollectiveError: settings, tensors or parameters differ, naming the ranks.

    Source: A. Douillard et al., DiLoCo, 2023 (arXiv 2311.08105).

    >>> parameters = {"weight": np.ones(4, np.float32)}
    >>> outer = OuterLoop(GradientExchange(comm, TopK(k=2)), parameters, every=2)
    >>> for step in range(2):
    ...     parameters["weight"] -= 0.1 * gradient  # a step of any optimiser
    ...     ended = outer.step()
    >>> ended  # the ranks have exchanged
    True
    """

    exchange: Any = SetOnce()
    every: Any = SetOnce()
    momentum: Any = SetOnce()
    nesterov: Any = SetOnce()
    delay: Any = SetOnce()

    def __init__(
        self,
        exchange: GradientExchange,
        parameters: Any,
        every: int = 10,
        rate: float = 1.0,
        momentum: float = 0.0,
        nesterov: bool = False,
        delay: int = 0,
        check_every: int = EVERY,
        first: int | None = None,
    ) -> None:
        if not isinstance(exchange, GradientExchange):
            raise TypeError(
                f"exchange is {type(exchange).__name__}: expected a GradientExchange"
            )
        self.exchange = exchange
        self.count = 0  # of steps
        self.rounds = 0  # that were kept
        self.steps_into_round = 0  # since the last exchange was started
        # Whether the parameters have changed since the last kept exchange was started.
        self.has_progress = False
        # Whether a parameter was changed in the round whose exchange was started.
        self._is_changed = False
        # Rounds that are still to be examined: whether the step after a round goes on
        # from what the round has written.
        self._trials = 0
        self._trial: Trial | None = None
        self._rate = 0.0
        # Whether an exchange was started, and is not finished.
        self.in_flight = False
        self._parameters = parameters
        # Names of the frozen parameters, which the exchange leaves out.
        self._held: set[str] = set()
        # Names of the parameters that required a gradient at the start.
        self._trained: set[str] = set()
        self._form = ARRAY
        # For each parameter the first one with the same memory, by name: tied ones
        # count once.
        self._first: dict[str, str] = {}
        self._check_every = EVERY

        def settings() -> dict[str, str]:
            self.every = to_integer("every", every)
            self.delay = to_integer("delay", delay, 0)
            self._check_every = to_integer("check_every", check_every, 0)
            before = self.every if first is None else first
            before = to_integer("first", before, most=self.every)
            self.steps_into_round = self.every - before
            self.rate = rate
            self.momentum = to_number("momentum", momentum, least=0, below=1)
            self.nesterov = to_bool("nesterov", nesterov)
            self._check_settings()
            current = self._named_parameters()
            self._first.update(untied(current))
            if isroutine(parameters):
                check_same_memory(current, self._named_parameters())
            self._trained = {
                name
                for name in {*self._first.values()}
                if getattr(current[name], "requires_grad", False)
            }
            trained = {f"parameter {name}": "trained" for name in self._trained}
            compared = {"check_every": repr(self._check_every), "first": repr(before)}
            return self._settings() | trained | compared

        check_same(f"settings of {OPERATION}", self._gather(settings))
        self._register()
        self._begin_trials()

    def _register(self) -> None:
        """Register the parameters; compare them between the ranks, now and in later rounds."""
        current = self._named_parameters()
        self.exchange.parts[LOOP] = lambda bucket: Replica(
            bucket.tensors, self._named_parameters(), self.momentum
        )
        # Pseudo-gradients are arrays of NumPy or CuPy, whatever the parameters are.
        untied_ones = {
            name: to_array(current[name])
            for name, first in self._first.items()
            if name == first
        }
        self.exchange.register(untied_ones)
        digests = self._gather(lambda: digests_of(self._anchors()))
        check_digests(f"{OPERATION}: ", dict(enumerate(digests)), OTHER_PARAMETERS)
        every = 1 if checking.is_enabled() else self._check_every
        if every:
            self.exchange.compare_replicas(self._anchors, every, OTHER_PARAMETERS)

    @property
    def rate(self) -> float:
        """The outer learning rate of the next round."""
        return self._rate

    @rate.setter
    def rate(self, rate: float) -> None:
        self._rate = to_number("rate", rate, least=0)

    @property
    def anchor(self) -> Any:
        """The model that is the same on all ranks, in the form of the parameters: read-only views, of NumPy or CuPy.

        Evaluate and save this model within a round, at the end of training, and with a
        delay at any step: the parameters of each rank contain its own progress.
        """
        anchors = self._anchors()
        views = {name: read_only(anchors[first]) for name, first in self._first.items()}
        return in_form(self._form, views)

    @defer_interrupt
    def step(self) -> bool:
        """Count a step of the inner optimiser, and exchange if it is due.

        All ranks call it equally often. A rank without a batch calls it with unchanged parameters,
        and contributes entries of its residual.

        After an error the round is undone on all ranks: anchor, momentum and residuals do not
        change, the local progress stays in the parameters, and the next round, `every` steps
        later, includes it. With a delay the rank with the error may raise earlier than the others.

        Returns:
            Whether a round ended. If the exchange skips its step, nothing changes, and it is False.

        Raises:
            ValueError: parameters of this rank are not finite; other ranks raise CollectiveError.
            CollectiveError: another rank failed. The errors of `GradientExchange.finish` are raised
                too.
        """
        self.count += 1
        self.steps_into_round += 1
        self.has_progress = True
        # Ranks may have different settings of NumPy's floating-point errors.
        with np.errstate(all="ignore"):
            if self._trials:
                self._look_at_first_step()
            if self.in_flight and self.steps_into_round != self.delay:
                self.exchange.progress()
            if self.steps_into_round >= self.every:
                self._start()
            if self.in_flight and self.steps_into_round == self.delay:
                return self._finish()
        return False

    @defer_interrupt
    def synchronise(self) -> bool:
        """End the round now, such as at the end of training or to save.

        All ranks call it. The steps since the last exchange that was kept are exchanged, an
        exchange in flight is finished before, and all ranks hold the anchor. The next round has
        `every` steps again.

        Returns:
            Whether the exchange was kept; False if there was no step since the last one, or if it
            is skipped: call it again once all parameters are finite.

        Raises:
            CollectiveError: another rank failed. The errors of `step` are raised too.

        >>> parameters = {"weight": np.ones(4, np.float32)}
        >>> outer = OuterLoop(GradientExchange(comm, bits=4), parameters, every=10)
        >>> parameters["weight"] -= 0.1 * gradient
        >>> outer.step(), outer.synchronise()
        (False, True)
        """
        with np.errstate(all="ignore"):
            kept = self.in_flight and self._finish()
            if self.has_progress:
                self._start()
                kept = self._finish("synchronised")
        return kept

    @defer_interrupt
    def restart(self) -> None:
        """Take the parameters as the anchor, such as those that were loaded after this loop was made.

        All ranks call it, with the same parameters, before the first round is kept, which
        compares them: also after it has raised because they differ.

        Raises:
            RuntimeError: a round was kept, or is in flight.
        """
        if self.rounds or self.in_flight:
            raise RuntimeError(
                f"got restart() after round {self.rounds}, or with one in flight: expected it before the first one"
            )
        self._find_parameters()
        for replica in self._replicas:
            replica.take_anchor()
        self.has_progress = False

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return copies of the state of this rank's loop and its exchange: arrays by name, for np.savez.

        Each rank saves its own state, with its parameters and the state of its inner
        optimiser, at any step: also within a round, and with an exchange in flight. It
        contains the settings of the loop, as text.
        """
        state: dict[str, NDArray[Any]] = self.exchange.state_dict()
        facts = {name: getattr(self, name) for name in FACTS}
        names = canonical_names(self._first)
        held = sorted(names[name] for name in self._held)
        loop = {**facts, "held": held, "settings": self._settings()}
        state[HEADER] = pack({**header_of(state), LOOP: loop})
        return state

    @defer_interrupt
    def load_state_dict(
        self,
        state: ByName | Callable[[], ByName],
        *,
        same_settings: bool = True,
    ) -> None:
        """Load a `state_dict`; the following steps have the same bits. All ranks call it.

        Construct model, exchange and loop as at the start of the run, and call this. It writes
        the anchor to the parameters if they held it when the state was saved: at the end of a
        round, without a delay. Else write the saved parameters to the model after it. An exchange
        that was in flight is started again. If it raises, nothing changes.

        Args:
            state: arrays by name, as `state_dict` returned them; or a function that returns them,
                such as from a file, or by `redistribute_state` from those of another number of
                ranks.
            same_settings: False also accepts a state with other settings.

        Raises:
            TypeError: this rank has no state; other ranks raise CollectiveError.
            ValueError: the state of this rank does not fit; likewise. An error of the function is
                raised too.
            RuntimeError: an exchange is in flight.
            CollectiveError: another rank failed, or the states are of different steps.
        """
        if self.in_flight:
            raise RuntimeError(
                "an exchange is in flight: load the state into a new OuterLoop"
            )
        before: dict[str, Any] = {}
        loaded: dict[str, Any] = {}

        def load_own() -> dict[str, Any]:
            before.update(self.exchange.state_dict())
            source = state() if callable(state) else state
            check_names(source)
            # The copy reads each array of a file once.
            saved = dict(source)
            header = header_of(saved)
            loaded.update(self._taken_out(header, same_settings=same_settings))
            saved[HEADER] = pack(header)
            self._find_parameters()
            self.exchange.load_state_dict(saved, same_settings=same_settings)
            return {**loaded, "anchor": joint_digest(self._anchors().values())}

        try:
            check_same("saved state", self._gather(load_own))
            names = canonical_names(self._first)
            held = {name for name in self._trained if names[name] in loaded["held"]}
            self._held = self.exchange.hold(held)
        except Exception:
            if before:
                self.exchange.load_state_dict(before)
            raise
        for name in FACTS:
            setattr(self, name, loaded[name])
        self._begin_trials()
        if loaded[IN_FLIGHT]:
            self._send()
        elif not self.has_progress:
            for replica in self._replicas:
                replica.write_anchor()
            staging.complete(replica.tensors[0].xp for replica in self._replicas)

    def _taken_out(self, header: Header, *, same_settings: bool) -> dict[str, Any]:
        """Take the facts of a loop out of the header of a state, and return them, checked."""
        loop: dict[str, Any] = header.pop(LOOP, {})
        if not loop:
            raise ValueError(
                "the state is of a GradientExchange: expected one of an OuterLoop"
            )
        settings = loop.pop("settings")
        if same_settings:
            check_saved("the state", settings, self._settings(), OTHER_LOOP)
        into_round = loop["steps_into_round"]
        if loop[IN_FLIGHT] and not into_round < self.delay:
            raise ValueError(
                f"the state is of step {loop['count']}, with an exchange that was started {into_round} steps before: "
                f"expected the delay with which it was saved, got delay={self.delay}"
            )
        return loop

    def _check_settings(self) -> None:
        """Raise ValueError for settings that exclude each other."""
        if self.delay >= self.every:
            raise ValueError(
                f"delay is {self.delay} and every {self.every}: expected 0 <= delay < every"
            )
        if self.nesterov and not self.momentum:
            raise ValueError(
                "nesterov is set and momentum is 0: expected a momentum above 0"
            )
        exchange = self.exchange
        if exchange.basis is not None or exchange.average == "sign":
            raise ValueError(
                f"the exchange has basis={exchange.basis!r} and average={exchange.average!r}: expected no basis, and a "
                "mean; neither has been measured with local steps"
            )
        if not exchange.feedback.has_gradient_units:
            raise ValueError(
                f"the feedback of the exchange is {exchange.feedback!r}: expected one such as ErrorFeedback()"
            )

    def _settings(self) -> dict[str, Any]:
        return {
            name: getattr(self, name)
            for name in ("every", "rate", "momentum", "nesterov", "delay")
        }

    def _named_parameters(self) -> dict[str, Any]:
        """Return the parameters of this round by name; ValueError for others than at first."""
        parameters = self._parameters
        if isroutine(parameters):
            parameters = parameters()
        self._form, current = by_name(parameters)
        others = sorted(current.keys() ^ self._first.keys(), key=str)
        if self._first and others:
            raise ValueError(
                f"{others[:3]} are parameters now and were none at the start, or the reverse: expected the same ones; "
                "make a new exchange and loop for others"
            )
        return current

    def _find_parameters(self) -> None:
        parameters = self._named_parameters()
        for replica in self._replicas:
            replica.find_parameters(parameters)

    def _gather(self, call: Callable[[], Any]) -> list[Any]:
        operation = f"{OPERATION} of exchange {self.exchange.number}"
        return gather_results(call, self.exchange.comm, operation)

    def _anchors(self) -> dict[str, Array]:
        """Return the anchor by name; tied parameters appear once."""
        return {
            name: view
            for replica in self._replicas
            for name, view in replica.by_tensor(replica.anchor).items()
        }

    def _start(self) -> None:
        """Start the exchange of this round's pseudo-gradients, also of frozen parameters that a rank has changed."""
        self.steps_into_round = 0
        frozen = self._subtract()
        before = self._held
        if frozen or before:
            self._hold(frozen)
        if self._held != before:
            self._trial = None  # It samples replicas that are no longer in use.
            self._subtract()
        self._send()

    def _subtract(self) -> set[str]:
        """Compute this round's pseudo-gradients, and return the frozen parameters."""
        try:
            parameters = self._named_parameters()
            replicas = self._replicas
            for replica in replicas:
                replica.subtract(parameters)
            memory = [replica.memory for replica in replicas]
            check_separate([*chain.from_iterable(memory)])
            self._is_changed = any(replica.is_changed for replica in replicas)
            frozen = {
                name
                for name in self._trained
                if not getattr(parameters[name], "requires_grad", False)
            }
        # The other ranks must be notified of every error, also of an interrupt.
        except BaseException as error:
            self.exchange.fail(error)
        return frozen

    def _hold(self, names: set[str]) -> None:
        """Leave out of the exchange the named parameters that no rank has changed in this round."""
        changed = {
            name for replica in self._replicas for name in replica.changed(names)
        }
        self._held = self.exchange.hold(names, changed)

    @property
    def _replicas(self) -> list[Replica]:
        """The parameters of each bucket of the exchange, at the end those that are left out."""
        return [bucket.parts[LOOP] for bucket in self.exchange.buckets]

    def _send(self) -> None:
        for replica in self._replicas:
            if replica.tensors[0].name not in self._held:
                self.exchange.start_together(replica.send(), waits=not self.delay)
        self.in_flight = True

    def _finish(self, *how: str) -> bool:
        """Finish the exchange in flight, and take the outer step if it was kept; return whether it was.

        how: the round ends, the same on all ranks. Nothing after the exchange can fail.
        """
        self.in_flight = False
        replicas = self._replicas
        for replica in replicas:
            replica.receive()
        trial = self._trial
        try:
            # Without a delay `subtract` has just found the parameters.
            if self.delay:
                self._find_parameters()
            if trial is not None:
                trial.begin_write()
        except BaseException as error:
            self.exchange.fail(error)
        means = self.exchange.finish_vectors(f"rate {self.rate!r}", *how)
        if not self.exchange.finite:  # it was skipped, on all ranks
            return False
        # Replicas of held parameters have no mean; they are the last ones.
        for replica, mean in zip(replicas, means, strict=False):
            replica.end_round(
                mean, self.rate, nesterov=self.nesterov, delayed=self.delay > 0
            )
        staging.complete(replica.tensors[0].xp for replica in replicas)
        if not self.rate:
            self.exchange.reset()
        self.rounds += 1
        # The steps of a delay are progress since this exchange was started.
        self.has_progress = self.steps_into_round > 0
        if trial is not None:
            trial.end_write()
        self._warn_without_progress(means)
        return True

    def _warn_without_progress(self, means: Sequence[Any]) -> None:
        """Warn if no rank has changed its parameters in the round that ends."""
        if self._is_changed or any(mean.values().any() for mean in means):
            return
        warn(
            "no rank has changed a parameter in a round: expected steps that write to the arrays of OuterLoop, such as "
            "w -= rate * g, or w[...] = new; w = w - rate * g makes another array, of which the loop does not know",
            depth=5,
        )

    def _begin_trials(self) -> None:
        """Examine the next rounds, unless they are so short that a step is as large as the progress of a round."""
        self._trials = 0
        if self._check_every and self.every > 3:
            self._trials = _TRIALS
        self._trial = None

    def _look_at_first_step(self) -> None:
        """Raise on all ranks if the first step after a round has undone the round on the ranks that took a step."""
        trial = self._trial
        if trial is None:
            self._trial = Trial(self._replicas)
            return
        if not trial.is_due:
            return

        def distances() -> Distances:
            self._find_parameters()
            return trial.distances()

        columns = zip(*self._gather(distances), strict=True)
        total = Distances(*map(sum, columns))
        is_known = 4 * total.to_written < total.to_before
        self._trials = 0 if is_known else self._trials - 1
        if not self._trials:
            self._trial = None
        is_undone = 4 * total.to_before < total.to_written
        if is_undone and 2 * total.first_to_start < total.first_to_end:
            raise CollectiveError(
                f"after one step the parameters are where they were before round {self.rounds} wrote the mean to them: "
                "the optimiser, or the program, keeps copies of them, such as float32 masters, and trains those. Give "
                "these copies to OuterLoop, or a function that returns them"
            )
