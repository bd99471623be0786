"""Local steps of a PyTorch module: `OuterLoop` over its trainable parameters, or over the shards of FSDP2."""

import weakref
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from collectives.calls.all_or_none import check_same, gather_results
from collectives.exchange import GradientExchange
from collectives.local_steps.outer import OuterLoop
from collectives.torch.common import (
    ModelParameters,
    comm_of,
    local_shard,
    nothing,
    parts_of,
    trainable,
)
from collectives.torch.fsdp import check_fsdp, check_unattached
from collectives.torch.private import active_ddp, after_backward
from collectives.torch.start import check_launcher
from mpicomp.errors import warn


def outer_loop(
    model: torch.nn.Module, exchange: GradientExchange, **terms: Any
) -> OuterLoop:
    """Return an `OuterLoop` (local steps) of a module's trainable parameters.

    Parameters that are loaded before the first backward pass that a step of an optimiser follows
    are the anchor, the same on all ranks; the first round compares them. If the model later has
    other parameters, or one more that requires a gradient, the next round raises ValueError that
    names them; parameters that are frozen are left out.

    Args:
        model: a plain module, whose ranks take their steps separately. Or one whose gradients
            are averaged inside a node in every step, with an exchange between the nodes:
            sharded by `fully_shard` over the ranks of the node, so that each rank exchanges its
            shard; or in DistributedDataParallel with the process group of the node, where each
            rank exchanges all parameters; also inside of other modules, such as
            torch.compile's.
        exchange: a new one, over the ranks that take their steps separately.
        terms: keyword arguments of `OuterLoop`, such as `every=10`.

    Raises:
        TypeError: `model` is no module.
        ValueError: DistributedDataParallel or FSDP2 averages over ranks of the exchange: the
            gradients would be sent dense in every step, and the parameters averaged once more.
            For a module that DistributedDataParallel wraps its first forward pass there raises
            it. The errors of `OuterLoop` are raised too.

    >>> outer = outer_loop(network, exchange, every=10)
    """
    comm = comm_of(exchange)
    everyone = gather_results(partial(_check, model, comm), comm, "outer_loop")
    check_same("shard", [answer["shard"] for answer in everyone])
    between = [answer["rank"] for answer in everyone]
    for answer in everyone:
        for group in answer["groups"]:
            _check_group(between, group)
    if check_launcher() == 1:
        warn(
            "MPI has one rank, and nothing is exchanged: start with mpirun -n 4 python -m collectives.torch train.py",
            depth=2,
        )
    remedy = "make a new exchange and a new loop, once the model has its parameters"
    known = ModelParameters(model, trainable(model), "outer_loop", remedy)

    def parameters() -> dict[str, Any]:
        known.look()
        return {
            name: local_shard(parameter) for name, parameter in known.registered.items()
        }

    outer = OuterLoop(exchange, parameters, **terms)
    _Hooks(outer, model, [*known.registered.values()], between)
    return outer


class _Hooks:
    """The hooks of a module until the first step that is counted.

    Parameters that were loaded are the anchor, and no DDP averages over ranks of the exchange.

    A load comes before a backward pass, and a step of an optimiser after it: so the
    parameters at the start of a backward pass are the anchor, until an optimiser has
    taken a step after one, or a step of the loop was counted. Of FSDP2 those at the start
    of a forward pass, as it calls no hook of its parameters before gradients accumulate.
    """

    def __init__(
        self,
        outer: OuterLoop,
        model: torch.nn.Module,
        parameters: list[Any],
        between: list[int],
    ) -> None:
        self._outer = weakref.ref(outer)
        self._between = between
        self._parameters = {id(parameter) for parameter in parameters}
        self._in_pass = False
        self._had_pass = False
        # Whether a step of an optimiser followed a backward pass.
        self._has_begun = False
        self._is_sharded = bool(parts_of(model, FSDPModule))
        self._hooks = [register_optimizer_step_pre_hook(self._before_step)]
        # The module of the first parameter gets a hook too, as DDP may have only a part
        # of the model.
        owners = {
            module
            for module in model.modules()
            if any(one is parameters[0] for one in module.parameters(recurse=False))
        }
        for module in {model, *owners}:
            self._hooks.append(module.register_forward_pre_hook(self, prepend=True))
        if not self._is_sharded:
            for parameter in parameters:
                self._hooks.append(parameter.register_hook(self._before_gradient))

    def __reduce__(self) -> Any:
        """Copy and pickle as a function that does nothing: a copy of the model has no hook."""
        return nothing()

    def __call__(self, *unused: Any) -> None:
        """Before a forward pass raise ValueError if DDP averages the gradients over ranks of the exchange."""
        if torch.compiler.is_compiling():
            return
        ddp = active_ddp()
        if ddp is not None and not self._parameters.isdisjoint(
            map(id, ddp.parameters())
        ):
            _check_group(self._between, ranks_of(ddp))
        if not self._is_sharded:
            self._remove_once_counted()
        elif torch.is_grad_enabled():
            self._restart()
            self._had_pass = True

    def _before_gradient(self, _: torch.Tensor) -> None:
        """Take the anchor, once a backward pass, before any gradient is accumulated."""
        if not self._in_pass:
            self._in_pass = True
            after_backward(self._end_pass)
            self._restart()
            self._had_pass = True

    def _end_pass(self) -> None:
        self._in_pass = False

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Take the anchor before a step of an optimiser, for the last time if it follows a backward pass."""
        if self._parameters.isdisjoint(
            id(parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
        ):
            return
        self._restart()
        self._has_begun = self._had_pass

    def _restart(self) -> None:
        """Take the parameters as the anchor; errors are those of the next round, on all ranks."""
        outer = self._remove_once_counted()
        if outer is not None and not self._has_begun:
            with suppress(TypeError, ValueError):
                outer.restart()

    def _remove_once_counted(self) -> OuterLoop | None:
        """Return the loop; once it has counted a step, or is deleted, None, and remove the hooks.

        That of optimisers stays: PyTorch may be calling them, one after the other.
        """
        outer = self._outer()
        if outer is not None and not outer.count:
            return outer
        for hook in self._hooks[1:]:
            hook.remove()
        self._hooks = []
        self._parameters = set()
        return None


def _check(model: Any, comm: Any) -> dict[str, Any]:
    """Return this rank's shard, rank and process groups of DDP; raise TypeError for what is no module."""
    check_launcher()
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"model is {type(model).__name__}: expected a torch.nn.Module; OuterLoop takes arrays"
        )
    check_unattached(model)
    return {
        "shard": check_fsdp(model, comm) if parts_of(model, FSDPModule) else {},
        "rank": dist.get_rank() if dist.is_initialized() else 0,
        "groups": [*map(ranks_of, parts_of(model, DistributedDataParallel))],
    }


def ranks_of(ddp: DistributedDataParallel) -> list[int]:
    """Return the ranks of a DDP module's process group."""
    return [*dist.get_process_group_ranks(ddp.process_group)]


def _check_group(between: list[int], inside: list[int]) -> None:
    """Raise ValueError if DDP averages over two ranks of the exchange."""
    if len({*between} & {*inside}) > 1:
        raise ValueError(
            f"DistributedDataParallel averages the gradients of ranks {inside} in every step, and the exchange would "
            f"average the parameters of ranks {between} again: pass the module without DistributedDataParallel, and "
            "call it without; or give DistributedDataParallel the process group of one node, and the exchange a "
            "communicator with one rank of each node"
        )
