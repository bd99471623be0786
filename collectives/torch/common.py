"""What `attach` and `attach_fsdp` share: the handle with the state of the exchange, and the checks on all ranks."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from collectives.agreement import check_same, gather_objects
from collectives.exchange import GradientExchange

_TEXT = "text:"  # before the keys of text, which torch holds as UTF-8 of JSON in uint8
_DENSE_STEPS = "attach/dense_steps_left"


class Handle:
    """The handle that `attach` and `attach_fsdp` return: a model's parameters in an exchange, and their state."""

    def __init__(
        self,
        exchange: GradientExchange,
        parameters: Mapping[str, torch.Tensor],
        scaler: Any = None,
        dense_steps: int = 0,
    ) -> None:
        self.exchange, self._dense_steps = exchange, dense_steps
        self._scaler, self._scale = scaler, 1.0  # of the loss in the step under way
        self._failed: Exception | None = None  # what failed in the step under way, before its end
        self._names = {parameter: name for name, parameter in parameters.items()}
        local = {name: local_shard(parameter.detach()) for name, parameter in parameters.items()}
        try:
            exchange.register(dict(reversed(local.items())))  # the order of the backward pass
        except RuntimeError as error:
            raise RuntimeError(f"the exchange is in use, and attach needs a new one ({error})") from error

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies of this rank's state of the exchange, and the number of dense steps left, as tensors.

        They are named, and each rank saves its own. `torch.load` reads them with its defaults.
        """
        return to_tensors(self.exchange.state_dict()) | {_DENSE_STEPS: torch.tensor(self._dense_steps)}

    def load_state_dict(self, state: Mapping[str, Any], *, same_settings: bool = True) -> None:
        """Load a `state_dict` of this handle or of the exchange; if it raises, nothing changes.

        Names of parameters may begin with `module.`, as in a loop over the parameters of the DDP model. same_settings:
        False also accepts a state with other settings, such as another density or decay.

        Raises ValueError for a state that does not fit, for example of another number of ranks (`load_state_dicts`
        loads these), and RuntimeError within a step.
        """
        arrays, left = self._arrays(state)
        self.exchange.load_state_dict(arrays, same_settings=same_settings)
        self._dense_steps = left

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
        left = self._dense_steps

        def arrays(rank: int) -> dict[str, Any]:
            nonlocal left
            found, left = self._arrays(load(rank))
            return found

        self.exchange.load_state_dicts(ranks, arrays, same_settings=same_settings, conserve=conserve)
        self._dense_steps = left

    def _arrays(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """Return the exchange's part of a state, and the number of dense steps left."""
        arrays = to_arrays(state)
        left = int(arrays.pop(_DENSE_STEPS, self._dense_steps))
        if not any(name.startswith("module.") for name in self._names.values()):
            arrays = {key.removeprefix("module."): array for key, array in arrays.items()}
        return arrays, left

    def _read_scale(self) -> None:
        """Store the scale of the loss of the step that begins."""
        self._scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def _try(self, start: Callable[..., None], *arguments: Any) -> None:
        """Start a part of the step, unless an earlier one failed: errors are raised at the end of the step."""
        if self._failed is None:
            try:
                start(*arguments)
            except Exception as error:  # of a collective that blocks: it has ended the step, on all ranks
                self._failed = error

    def _raise_failed(self) -> None:
        """Raise the error of this step, on all ranks."""
        failed, self._failed = self._failed, None
        if failed is None:
            return
        try:
            if self.exchange.is_in_step:  # it was refused here alone: the other ranks are in the step
                self.exchange.fail(failed)
            raise failed
        finally:
            del failed  # it, its traceback and this frame would hold each other

    def _start(self, gradients: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Start the exchange of the gradients of some parameters; the end of the step overwrites them."""
        arrays = {self._names[parameter]: gradient for parameter, gradient in gradients}
        outs = {name: gradient for name, gradient in arrays.items() if gradient.dtype != torch.bfloat16}
        self.exchange.start_together(arrays, outs)


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


@contextmanager
def on_all_ranks(exchange: Any, operation: str, compared: dict[str, str] | None = None) -> Iterator[None]:
    """Raise an error of the block on this rank, and CollectiveError on the other ranks of an exchange.

    compared: texts by name, compared between the ranks when the block has ended.
    """
    if not isinstance(exchange, GradientExchange):
        raise TypeError(
            f"exchange is {type(exchange).__name__}: expected an object such as GradientExchange(comm, TopK(0.01))"
        )
    try:
        yield
    except Exception as error:
        gather_objects(error, exchange.comm, operation)
        raise
    check_same("shard", gather_objects(compared or {}, exchange.comm, operation))


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
