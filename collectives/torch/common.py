"""What the entries of this package share: a handle with the state of the exchange, and the parameters of a model."""

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NoReturn

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from collectives.exchange import GradientExchange
from collectives.exchange.names import canonical_names
from collectives.torch.private import after_backward, is_in_backward, versions_of
from mpicomp.arrays import ByName
from mpicomp.errors import warn
from mpicomp.feedback import ErrorFeedback
from mpicomp.settings import to_integer
from mpicomp.state import check_names

OTHER_PARAMETERS = (
    "Expected the same bits on all ranks: the same torch.manual_seed or checkpoint on all, and no step of an optimiser "
    "on other gradients than those of a backward pass of the attached model"
)

# The name of each parameter, the parameter itself, and its gradient.
Parts = list[tuple[str, Any, Any]]


class ModelParameters:
    """The parameters of a model that an exchange has registered; they are looked at again at the start of each step.

    registered: by canonical name. entry: the function that the caller used. remedy: for
    a model with other parameters.
    """

    def __init__(self, model: Any, registered: ByName, entry: str, remedy: str) -> None:
        self.registered = dict(registered)
        self._model = model
        self._entry = entry
        self._remedy = remedy
        self._dtypes = {name: parameter.dtype for name, parameter in registered.items()}
        self._known = {*registered, *trainable(model)}  # by canonical name
        # Facts of all parameters, as of the last `look`.
        self._facts: list[Any] = []
        self.look()

    def look(self) -> None:
        """Look at the parameters of the model again.

        Raises ValueError if a parameter was replaced or has another dtype, or one that is
        not registered requires a gradient.
        """
        parameters = self._model.parameters()
        facts = [(id(one), one.dtype, one.requires_grad) for one in parameters]
        if facts != self._facts:
            self._check_registered()
            self._facts = facts

    def frozen(self) -> set[str]:
        """Return the names of the registered parameters that require no gradient now."""
        return {
            name
            for name, parameter in self.registered.items()
            if not parameter.requires_grad
        }

    def _check_registered(self) -> None:
        """Raise ValueError unless the parameters of the model are those that are registered."""
        present = named(self._model)
        replaced = [
            name
            for name, parameter in self.registered.items()
            if parameter.dtype != self._dtypes[name]
            or not _is_same(present.get(name), parameter)
        ]
        added = [
            name
            for name, parameter in present.items()
            if parameter.requires_grad and name not in self._known
        ]
        if replaced or added:
            raise ValueError(
                f"the model has other parameters than at {self._entry}: replaced are {some(replaced)}, as by "
                f"load_state_dict(assign=True) or .double(); unfrozen or added are {some(added)}: {self._remedy}"
            )


def _is_same(present: Any, registered: Any) -> bool:
    """Return whether a parameter is the registered one, or the unsharded one by which FSDP2 replaces it for a while."""
    is_whole = (
        isinstance(registered, DTensor)
        and present is not None
        and not isinstance(present, DTensor)
    )
    return present is registered or is_whole


def some(names: Sequence[str]) -> str:
    """Return at most three names, and how many there are more, as text."""
    shown = ", ".join(map(repr, names[:3])) or "none"
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


class Handle:
    """A model's parameters in an exchange, and their state; made by `attach` and `attach_fsdp`.

    A step is that of a backward pass. An error of this rank alone is contributed to the step,
    so that all ranks raise, once the pass has ended on all of them.

    Args:
        exchange: a new one.
        parameters: of the model, as registered.
        scaler: as in `attach`.
        remedy: text for a model that cannot go on after an error.
    """

    def __init__(
        self,
        exchange: GradientExchange,
        parameters: ModelParameters,
        scaler: Any,
        remedy: str,
        check_every: int,
    ) -> None:
        self.exchange = exchange
        # A disabled scaler counts as none.
        self._scaler = scaler if is_scaling(scaler) else None
        # Scale of the loss in the step under way.
        self._scale = 1.0
        self._remedy = remedy
        self._parameters = parameters
        self._names = {
            parameter: name for name, parameter in parameters.registered.items()
        }
        self._held = set[str]()  # names that the exchange leaves out
        # Whether a backward pass began, and has not ended.
        self._in_pass = False
        # Whether the exchange has ended the step of the last pass.
        self._has_ended = False
        self._steps_before = 0  # steps kept before the pass
        self._versions: list[int] = []  # of the parameters, before the pass
        # The error that this rank contributes to the step in place of gradients.
        self._own_error: Exception | None = None
        # The error that the exchange raised in this step, on all ranks.
        self._raised: Exception | None = None
        exchange.compare_replicas(self._compared, check_every, OTHER_PARAMETERS)
        try:
            # The exchange registers the tensors in the order of the backward pass.
            self.exchange.register(
                dict(reversed(shards_of(parameters.registered).items()))
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"the exchange is in use: expected a new one; load the state of its handle to keep residuals ({error})"
            ) from error

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies of this rank's state of the exchange, as tensors by name; each rank saves its own.

        `torch.load` reads them with its defaults. After an error of this rank alone in a backward
        pass it ends the step, for which the other ranks wait.
        """
        with suppress(RuntimeError):
            self._check_interrupted()
        return to_tensors(self.exchange.state_dict())

    def load_state_dict(self, state: ByName, *, same_settings: bool = True) -> None:
        """Load a `state_dict` of this handle or of the exchange; if it raises, nothing changes.

        Wrappers of the model do not change the names. For states of another number of ranks pass
        what `collectives.redistribute_state` returns; with `attach_fsdp` it counts replicas, and
        the ranks inside a replica must be as many as before.

        Args:
            state: tensors or arrays by name.
            same_settings: False also accepts a state with other settings, such as another density
                or decay.

        Raises:
            ValueError: the state does not fit.
            RuntimeError: a step is in progress.

        >>> load = lambda rank: torch.load(f"exchange-{rank}.pt")  # saved by 8 ranks
        >>> handle.load_state_dict(redistribute_state(load, 8, comm.rank, comm.size))
        """
        self.exchange.load_state_dict(to_arrays(state), same_settings=same_settings)

    def __reduce__(self) -> Any:
        """Copy and pickle as a function that does nothing: a copy of the model has no hook, and may be attached."""
        return nothing()

    def _compared(self) -> dict[str, torch.Tensor]:
        """Return this rank's parameters by name; none on a rank that has joined, and takes no steps."""
        if not self._in_pass:
            return {}
        return shards_of(self._parameters.registered)

    def _check_interrupted(self) -> None:
        """Raise RuntimeError if an error interrupted the last backward pass; within a pass do nothing."""
        if not self._in_pass or is_in_backward():
            return
        step = "and its step failed on all ranks"
        if self.exchange.steps > self._steps_before:
            step = (
                f"and the exchange has kept its step, number {self.exchange.steps}: the parameters of the ranks differ "
                "if one of them did not take the optimiser's step; load a checkpoint"
            )
        self._give_up(
            RuntimeError(
                f"an error interrupted the last backward pass on this rank, {step}: {self._remedy}"
            )
        )

    def _give_up(self, error: Exception) -> NoReturn:
        """Raise an error after which the model cannot go on; the first time as the end of the step on all ranks."""
        if self._has_ended:
            raise error
        self._has_ended = True
        self.exchange.fail(error)

    def _begin_pass(self) -> None:
        """Begin a backward pass; RuntimeError outside of one."""
        after_backward(self._end_pass)
        self._in_pass = True
        self._has_ended = False
        self._steps_before = self.exchange.steps
        self._versions = versions_of(self._names)

    def _end_pass(self) -> None:
        """End a backward pass."""
        raise NotImplementedError

    def _begin_step(self) -> None:
        """Begin a step: store the scale of its loss, and leave out what is frozen now."""
        self._scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        frozen = self._parameters.frozen()
        if frozen == self._held or self._own_error or self._raised:
            return
        try:
            self.exchange.hold(frozen)
            self._held = frozen
        except Exception as error:
            self._raised = error

    def _check_versions(self) -> None:
        """Refuse the step if a parameter was changed in the backward pass."""
        versions = versions_of(self._names)
        if self._own_error is None and versions != self._versions:
            pairs = zip(self._names.values(), versions, self._versions, strict=True)
            self._refuse_change(next(name for name, now, then in pairs if now != then))

    def _refuse_change(self, name: str) -> None:
        self._own_error = RuntimeError(
            f"{name} was changed, or its .grad was replaced, in the backward pass: call an optimiser's step() after "
            "backward(), and not in register_post_accumulate_grad_hook"
        )

    def _exchanged(self, parts: Iterable[tuple[Any, Any]]) -> Parts:
        """Return the names of parameters, themselves and their gradients, without those that are left out."""
        return [
            (name, parameter, part)
            for parameter, part in parts
            if (name := self._names[parameter]) not in self._held
        ]

    def _start(self, parts: Parts, *, is_last: bool = False) -> None:
        """Start the exchange of the gradients of some parameters, which the end of the step overwrites.

        is_last: the step ends at once. An error is raised at the end of the step, and
        nothing is started until then.
        """
        if self._own_error is not None or self._raised is not None:
            return
        arrays = {name: gradient for name, _, gradient in parts}
        outs = {
            name: gradient
            for name, gradient in arrays.items()
            if gradient.dtype != torch.bfloat16
        }
        try:
            self.exchange.start_together(arrays, outs, waits=is_last)
        # A collective that blocks raises here, and has ended the step on all ranks.
        except Exception as error:
            self._raised = error

    def _end(self) -> tuple[dict[str, Any], float]:
        """End the step; return its means by name, and by what to multiply them: the scale, NaN if it is skipped.

        Raises the error of this step, on all ranks.
        """
        raised = self._raised
        self._raised = None
        refused = self._own_error
        self._own_error = None
        self._has_ended = True
        try:
            if raised is not None:
                raise raised
            if refused is not None:
                self.exchange.fail(refused)
        finally:
            # The errors, their tracebacks and this frame would form a reference cycle.
            del raised, refused
        means = self.exchange.finish()
        # With a scale of NaN the scaler skips the step as well.
        scale = self._scale if self.exchange.finite else math.nan
        return means, scale

    def _drop_gradients(self) -> None:
        """Set `.grad` to None if the last step was skipped, and no scaler looks for NaN; warn of it once."""
        if self._scaler is not None or self.exchange.finite:
            return
        for parameter, name in self._names.items():
            if name not in self._held:
                parameter.grad = None
        if self.exchange.skipped > 1:
            return
        warn(
            "a step was skipped on all ranks, and .grad is None, so that an optimiser passes over all parameters. A "
            "GradScaler refuses that ('No inf checks were recorded'): with one use attach(..., scaler=scaler)",
            depth=2,
        )


def nothing() -> Any:
    """Return what `__reduce__` returns for a hook whose copies do nothing."""
    return getattr, (nullcontext(), "__exit__")


def to_tensors(state: ByName) -> dict[str, torch.Tensor]:
    """Return a `GradientExchange.state_dict` as tensors in host memory, which `torch.load` reads with its defaults.

    Args:
        state: arrays by name.
    """
    return {key: torch.from_numpy(np.array(value)) for key, value in state.items()}


def to_arrays(state: ByName) -> dict[str, Any]:
    """Return the arrays of `to_tensors`, for `GradientExchange.load_state_dict`.

    Args:
        state: tensors by name.

    Raises:
        TypeError: `state` is no state.
    """
    check_names(state)
    return {
        key: value.cpu().numpy() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


def raise_after_backward(error: Exception) -> None:
    """Raise an error from the current backward pass once what is queued has run; at once without one."""

    def raise_error() -> NoReturn:
        raise error

    try:
        after_backward(raise_error)
    except RuntimeError:
        # A rank that has joined has no backward pass.
        raise error from None


def comm_of(exchange: Any) -> Any:
    """Return the communicator of an exchange; TypeError for anything else."""
    if not isinstance(exchange, GradientExchange):
        raise TypeError(
            f"exchange is {type(exchange).__name__}: expected an object such as GradientExchange(comm, TopK(0.01))"
        )
    return exchange.comm


def check_settings(
    exchange: GradientExchange, scaler: Any, check_every: int
) -> dict[str, str]:
    """Return the settings of `attach` and `attach_fsdp` that must be the same on all ranks.

    Raises TypeError or ValueError for a bad scaler or `check_every`, and for residuals
    in place.
    """
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise TypeError(
            f"scaler is {type(scaler).__name__}: expected a torch.amp.GradScaler, or None"
        )
    feedback = exchange.feedback
    if isinstance(feedback, ErrorFeedback) and feedback.in_place:
        raise ValueError(
            f"the feedback of the exchange is {feedback!r}, and .grad receives the mean: expected one with a residual "
            "of its own, such as ErrorFeedback()"
        )
    return {
        "scaler": "one that is enabled" if is_scaling(scaler) else "none",
        "check_every": str(to_integer("check_every", check_every)),
    }


def is_scaling(scaler: Any) -> bool:
    """Return whether a scaler is given, and not disabled."""
    return scaler is not None and getattr(scaler, "is_enabled", lambda: True)()


def parts_of(model: Any, kind: type) -> list[Any]:
    """Return the modules of a kind in a model, itself among them, whatever wraps them, such as torch.compile."""
    if not isinstance(model, torch.nn.Module):
        return []
    return [module for module in model.modules() if isinstance(module, kind)]


def named(model: Any) -> dict[str, Any]:
    """Return the parameters of a module by their canonical names, which do not depend on wrappers."""
    parameters = dict(model.named_parameters())
    names = canonical_names(parameters)
    return {names[name]: parameter for name, parameter in parameters.items()}


def trainable(model: Any) -> dict[str, Any]:
    """Return the parameters of a module that require a gradient, by canonical name."""
    return {
        name: parameter
        for name, parameter in named(model).items()
        if parameter.requires_grad
    }


def local_shard(tensor: Any) -> Any:
    """Return this rank's shard of a DTensor; other tensors, and None, as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shards_of(parameters: ByName) -> dict[str, Any]:
    """Return this rank's shards of parameters by name, without gradients."""
    return {
        name: local_shard(parameter.detach()) for name, parameter in parameters.items()
    }
