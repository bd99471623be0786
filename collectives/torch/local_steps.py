"""Local steps of a PyTorch module: `OuterLoop` over its trainable parameters, or over the shards of FSDP2."""

import weakref
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
    living,
    local_shard,
    parts_of,
    trainable,
)
from collectives.torch.fsdp import check_fsdp, check_unattached
from collectives.torch.start import check_launcher


def outer_loop(
    model: torch.nn.Module, exchange: GradientExchange, **terms: Any
) -> OuterLoop:
    """Return an `OuterLoop` (local steps) of a module's trainable parameters.

    Parameters that are loaded before the first step of an optimiser are the anchor, the same on
    all ranks; the first round compares them. If the model later has other parameters, or one
    more that requires a gradient, the next round raises ValueError that names them; parameters
    that are frozen are left out.

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
            The errors of `OuterLoop` are raised too.

    >>> outer = outer_loop(network, exchange, every=10)
    """
    comm = comm_of(exchange)
    everyone = gather_results(partial(_check, model, comm), comm, "outer_loop")
    check_same("shard", [answer["shard"] for answer in everyone])
    _check_groups(
        [answer["rank"] for answer in everyone],
        [group for answer in everyone for group in answer["groups"]],
    )
    remedy = "make a new exchange and a new loop, once the model has its parameters"
    known = ModelParameters(model, trainable(model), "outer_loop", remedy)

    def parameters() -> dict[str, Any]:
        known.frozen()  # raises for others
        return {
            name: local_shard(parameter) for name, parameter in known.registered.items()
        }

    outer = OuterLoop(exchange, parameters, **terms)
    reference = weakref.ref(outer)
    mine = {id(parameter) for parameter in known.registered.values()}

    def restart(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Before the first step of an optimiser: parameters that were loaded are the anchor."""
        groups = optimizer.param_groups if mine else []
        if any(
            id(parameter) in mine for group in groups for parameter in group["params"]
        ):
            # PyTorch cannot remove a hook while it calls others
            mine.clear()
            loop = reference()
            if loop is not None and loop.count == 0:
                loop.restart()

    register_optimizer_step_pre_hook(restart)
    return outer


def _check(model: Any, comm: Any) -> dict[str, Any]:
    """Return this rank's shard, rank and process groups of DDP; raise TypeError for what is no module."""
    check_launcher()
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"model is {type(model).__name__}: expected a torch.nn.Module; OuterLoop takes arrays"
        )
    check_unattached(model)
    # DDP hooks the parameters, whatever module is passed here
    mine = {*model.parameters()}
    wrapped = living(
        DistributedDataParallel,
        lambda wrapper: not mine.isdisjoint(wrapper.parameters()),
    )
    return {
        "shard": check_fsdp(model, comm) if parts_of(model, FSDPModule) else {},
        "rank": dist.get_rank() if dist.is_initialized() else 0,
        "groups": [
            dist.get_process_group_ranks(wrapper.process_group) for wrapper in wrapped
        ],
    }


def _check_groups(between: list[int], groups: list[list[int]]) -> None:
    """Raise ValueError if DDP averages over two ranks of the exchange."""
    for inside in groups:
        if len({*between} & {*inside}) > 1:
            raise ValueError(
                f"DistributedDataParallel averages the gradients of ranks {inside} in every step, and the exchange "
                f"would average the parameters of ranks {between} again: pass the module without "
                "DistributedDataParallel, and delete that; or give it the process group of one node, and the exchange "
                "a communicator with one rank of each node"
            )
