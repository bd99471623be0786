"""FSDP2 with hybrid sharding: `attach_fsdp` exchanges the shards of the gradients between the replicas.

FSDP2 reduce-scatters the gradients inside a replica, and calls the hooks of a sharded parameter once its shard is
available: the shards are then exchanged between the replicas. `FSDPModule.set_all_reduce_hook` is not used. With a
two-dimensional mesh that hook runs after torch's dense allreduce, and does not replace it. With a one-dimensional mesh
it receives a flat buffer of a module's shards, without names; FSDP casts and accumulates the buffer as soon as the hook
returns, so an exchange could not overlap with the backward pass of the next module.

Invariant: a parameter without a gradient on this rank counts as zero; if its mean is not zero, `.grad` is set to the
mean.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from collectives.agreement import check_same, gather_results
from collectives.exchange import GradientExchange
from collectives.torch.common import (
    Handle,
    ModelParameters,
    after_backward,
    check_exchange,
    check_scaler,
    local_shard,
    trainable,
)
from collectives.torch.start import check_launcher


def attach_fsdp(model: FSDPModule, exchange: GradientExchange, *, scaler: Any = None) -> "FSDPHandle":
    """Exchange the gradient shards of an FSDP2 model between its replicas (hybrid sharding), through `exchange`.

    model: sharded by `fully_shard` over the one-dimensional mesh of one replica; torch itself would average densely
    over the second dimension of a mesh. exchange: a new one, over the ranks that have the same shard in all replicas.
    The replicas must start with the same parameters.

    A backward pass writes the means to `.grad`. With `set_requires_gradient_sync(False)` gradients accumulate, and
    nothing is exchanged. scaler: as in `attach`, and so is a skipped step, of the ranks with one shard: an infinity in
    another shard skips that alone.

    Raises TypeError or ValueError for bad arguments, RuntimeError under torchrun and for an exchange with registered
    tensors; CollectiveError on the other ranks, and if the ranks of the exchange have different shards.

    >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    >>> model = fully_shard(model, mesh=mesh["shard"])
    >>> replicas = comm.Split(mesh.get_local_rank("shard"), comm.rank)
    >>> handle = attach_fsdp(model, GradientExchange(replicas, TopK(0.01)))
    """
    check_exchange(exchange)

    def check() -> dict[str, str]:
        check_scaler(scaler)
        return check_fsdp(model, exchange.comm)

    check_same("shard", gather_results(check, exchange.comm, "attach_fsdp"))
    return FSDPHandle(model, exchange, scaler)


class FSDPHandle(Handle):
    """The hooks of the sharded parameters of an FSDP2 model; made by `attach_fsdp`."""

    def __init__(self, model: FSDPModule, exchange: GradientExchange, scaler: Any) -> None:
        parameters = trainable(model)
        remedy = "call attach_fsdp again, with a new exchange"
        super().__init__(exchange, ModelParameters(model, parameters, "attach_fsdp", remedy), scaler)
        self._completing = False  # the end of the backward pass will call `_complete`
        for parameter in parameters.values():
            parameter.register_post_accumulate_grad_hook(self._take)

    def _take(self, parameter: Any) -> None:
        """Start the exchange of a shard, and have the end of the backward pass wait for all shards."""
        if not self._completing:
            after_backward(self._complete)
            self._completing = True
            self._begin()
        gradient = local_shard(parameter.grad)
        if self._scale != 1:
            gradient.div_(self._scale)
        self._start([(parameter, gradient)])

    def _complete(self) -> None:
        """Wait for the means, and write them to `.grad`; NaN if the step fails, which it does on all ranks."""
        self._completing = False
        try:
            means, factor = self._end()
        except Exception:
            for parameter in self._names:
                if parameter.grad is not None:
                    local_shard(parameter.grad).fill_(math.nan)
            raise
        for parameter, name in self._names.items():
            mean = means[name] if factor == 1 else means[name].mul_(factor)
            if parameter.grad is None:
                if mean.any():
                    layout = {"shape": parameter.shape, "stride": parameter.stride()}
                    parameter.grad = DTensor.from_local(mean, parameter.device_mesh, parameter.placements, **layout)
            elif parameter.dtype == torch.bfloat16:
                local_shard(parameter.grad).copy_(mean)
        if self._drops:
            self._drop_gradients()


def check_fsdp(model: Any, comm: Any) -> dict[str, str]:
    """Raise unless this is an FSDP2 model of one replica, and `comm` has a rank of each; return which shard it is."""
    check_launcher()
    if not isinstance(model, FSDPModule):
        raise TypeError(f"model is {type(model).__name__}: expected one that fully_shard(model, mesh=...) has sharded")
    meshes = {parameter.device_mesh for parameter in trainable(model).values() if isinstance(parameter, DTensor)}
    if len(meshes) != 1:
        raise ValueError(f"the parameters are sharded over {len(meshes)} meshes: expected one for all of them")
    (mesh,) = meshes
    if mesh.ndim != 1:
        raise ValueError(
            f"the model is sharded over a mesh of {mesh.ndim} dimensions, {mesh.mesh_dim_names}, and torch averages "
            'over the first of them: use fully_shard(model, mesh=mesh["shard"]), the dimension of one replica'
        )
    if comm.size * mesh.size() != dist.get_world_size():
        raise ValueError(
            f"the exchange has {comm.size} ranks, a replica {mesh.size()}, and the process group "
            f"{dist.get_world_size()}: expected comm.Split(mesh.get_local_rank('shard'), comm.rank) for the exchange"
        )
    return {"index of the shard": str(mesh.get_local_rank())}
