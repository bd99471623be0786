"""What `attach` and `attach_fsdp` share: the handle with the state of the exchange, and the checks on all ranks."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from collectives.exchange import GradientExchange

_TEXT = "text:"  # before the keys of text, which torch holds as UTF-8 of JSON in uint8


class Handle:
    """The handle that `attach` and `attach_fsdp` return: a model's parameters in an exchange, and their state."""

    def __init__(
        self,
        exchange: GradientExchange,
        parameters: Mapping[str, torch.Tensor],
        scaler: Any,
    ) -> None:
        self.exchange = exchange
        self._scaler, self._scale = scaler, 1.0  # of the loss in the step under way
        self._failed: Exception | None = None  # what failed in the step under way, before its end
        self._names = {parameter: name for name, parameter in parameters.items()}
        local = {name: local_shard(parameter.detach()) for name, parameter in parameters.items()}
        try:
            exchange.register(dict(reversed(local.items())))  # the order of the backward pass
        except RuntimeError as error:
            raise RuntimeError(f"the exchange is in use, and attach needs a new one ({error})") from error

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies of this rank's state of the exchange, as tensors by name; each rank saves its own.

        `torch.load` reads them with its defaults.
        """
        return to_tensors(self.exchange.state_dict())

    def load_state_dict(self, state: Mapping[str, Any], *, same_settings: bool = True) -> None:
        """Load a `state_dict` of this handle or of the exchange; if it raises, nothing changes.

        Names of parameters may begin with `module.`, as in a loop over the parameters of the DDP model. same_settings:
        False also accepts a state with other settings, such as another density or decay.

        Raises ValueError for a state that does not fit, for example of another number of ranks (`load_state_dicts`
        loads these), and RuntimeError within a step.
        """
        self.exchange.load_state_dict(self._arrays(state), same_settings=same_settings)

    def load_state_dicts(
        self,
        ranks: int,
        load: Callable[[int], Mapping[str, Any]],
        *,
        same_settings: bool = True,
        conserve: str = "sum",
    ) -> None:
        """Load the states that `ranks` ranks saved, in a job of any size; if it raises, nothing changes.

        load(rank): returns the `state_dict` of a rank of the job that saved. Rank r of P calls it for the ranks r, r +
        P, r + 2P, ..., and adds up their residuals; conserve: "sum" or "mean" of them (see
        `GradientExchange.load_state_dicts`, also for the errors). With `attach_fsdp` `ranks` counts replicas, and the
        ranks inside a replica must be as many as before.

            handle.load_state_dicts(8, lambda rank: torch.load(f"exchange-{rank}.pt"))  # saved by 8 ranks
        """
        self.exchange.load_state_dicts(
            ranks, lambda rank: self._arrays(load(rank)), same_settings=same_settings, conserve=conserve
        )

    def _arrays(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state as arrays under the names of the exchange."""
        arrays = to_arrays(state)
        if any(name.startswith("module.") for name in self._names.values()):
            return arrays
        return {key.removeprefix("module."): array for key, array in arrays.items()}

    def _begin(self) -> None:
        """Begin a step: store the scale of its loss."""
        self._scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def _start(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Start the exchange of the gradients of some parameters, which the end of the step overwrites.

        An error is raised at the end of the step, and nothing is started until then.
        """
        if self._failed is not None:
            return
        arrays = {self._names[parameter]: gradient for parameter, gradient in parts}
        outs = {name: gradient for name, gradient in arrays.items() if gradient.dtype != torch.bfloat16}
        try:
            self.exchange.start_together(arrays, outs)
        except Exception as error:  # of a collective that blocks: it has ended the step, on all ranks
            self._failed = error

    def _end(self) -> tuple[dict[str, Any], float]:
        """End the step; return its means by name, and by what to multiply them: the scale, NaN if it is skipped.

        Raises the error of this step, on all ranks.
        """
        failed, self._failed = self._failed, None
        if failed is not None:
            try:
                if self.exchange.is_in_step:  # it was refused here alone: the other ranks are in the step
                    self.exchange.fail(failed)
                raise failed
            finally:
                del failed  # it, its traceback and this frame would hold each other
        means = self.exchange.finish()
        return means, self._scale if self.exchange.finite else math.nan  # NaN: the scaler skips the step as well

    @property
    def _drops(self) -> bool:
        """Whether the last step was skipped and no scaler looks for NaN: there are no gradients then."""
        return self._scaler is None and not self.exchange.finite

    def _drop_gradients(self) -> None:
        for parameter in self._names:
            parameter.grad = None


def to_tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return a `GradientExchange.state_dict` as tensors, which `torch.load` reads with its defaults."""
    tensors = {}
    for key, value in state.items():
        array = np.asarray(value)
        if array.dtype.kind == "U":
            tensors[_TEXT + key] = torch.frombuffer(bytearray(json.dumps(array.tolist()).encode()), dtype=torch.uint8)
        else:
            tensors[key] = torch.tensor(array)
    return tensors


def to_arrays(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of `to_tensors`, for `GradientExchange.load_state_dict`."""
    arrays = {key: value.cpu().numpy() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
    return {
        key.removeprefix(_TEXT): np.array(json.loads(bytes(value)), np.str_) if key.startswith(_TEXT) else value
        for key, value in arrays.items()
    }


def after_backward(call: Callable[[], None]) -> None:
    """Call a function at the end of the current backward pass; RuntimeError without one."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def check_exchange(exchange: Any) -> None:
    """Raise TypeError unless this is an exchange."""
    if not isinstance(exchange, GradientExchange):
        raise TypeError(
            f"exchange is {type(exchange).__name__}: expected an object such as GradientExchange(comm, TopK(0.01))"
        )


def check_scaler(scaler: Any) -> None:
    """Raise TypeError unless this is a scaler of the loss, or None."""
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise TypeError(f"scaler is {type(scaler).__name__}: expected a torch.amp.GradScaler, or None")


def trainable(model: Any) -> Iterator[tuple[str, Any]]:
    """Return the parameters of a module that require a gradient, with their names."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def local_shard(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a DTensor, and other tensors as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
