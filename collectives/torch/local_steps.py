"""Local steps of a PyTorch module: `OuterLoop` over its trainable parameters, or over the shards of FSDP2."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from collectives.agreement.all_or_none import check_same, gather_objects, gather_results
from collectives.torch.common import (
    ModelParameters,
    check_exchange,
    local_shard,
    parts_of,
    trainable,
)
from collectives.torch.fsdp import check_fsdp
from collectives.torch.start import check_launcher
from collectives.training import GradientExchange
from collectives.training.outer import OuterLoop


def outer_loop(
    model: torch.nn.Module, exchange: GradientExchange, **terms: Any
) -> OuterLoop:
    """Return an `OuterLoop` (local steps) of a module's trainable parameters.

    model: a plain module, whose ranks take their steps separately. Or one whose
    gradients are averaged inside a node in every step, with an exchange between the
    nodes: sharded by `fully_shard` over the ranks of the node, so that each rank
    exchanges its shard; or in DistributedDataParallel with the process group of the
    node, where each rank exchanges all parameters; also inside of other modules, such
    as torch.compile's. terms: keyword arguments of `OuterLoop`.

    Raises ValueError if DistributedDataParallel or FSDP2 averages over ranks of the
    exchange: the gradients would be sent dense in every step, and the parameters
    averaged once more. The errors of `OuterLoop`. If the model later has other
    parameters, or one more that requires a gradient, the next round raises ValueError
    that names them; parameters that are frozen are left out.

    >>> outer = outer_loop(network, exchange, every=10)
    """
    check_launcher()
    if parts_of(model, FSDPModule):
        check_exchange(exchange)
        check = partial(check_fsdp, model, exchange.comm)
        check_same("shard", gather_results(check, exchange.comm, "outer_loop"))
    for each in parts_of(model, DistributedDataParallel):
        _check_groups(each, exchange.comm)
    remedy = "make a new exchange and a new loop, once the model has its parameters"
    known = ModelParameters(model, trainable(model), "outer_loop", remedy)

    def parameters() -> dict[str, Any]:
        known.frozen()  # raises for others
        return {
            name: local_shard(parameter) for name, parameter in known.registered.items()
        }

    return OuterLoop(exchange, parameters, **terms)


def _check_groups(model: DistributedDataParallel, comm: Any) -> None:
    """Raise ValueError on all ranks of `comm` if DDP averages over two of them."""
    between = gather_objects(dist.get_rank(), comm, "outer_loop")
    inside = dist.get_process_group_ranks(model.process_group)
    if len({*between} & {*inside}) > 1:
        raise ValueError(
            f"DistributedDataParallel averages the gradients of ranks {inside} in every step, and the exchange would "
            f"average the parameters of ranks {between} again: pass the module without DistributedDataParallel; or "
            "give it the process group of one node, and the exchange a communicator with one rank of each node"
        )
