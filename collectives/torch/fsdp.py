"""FSDP2 with hybrid sharding: `attach_fsdp` exchanges the shards of the gradients between the replicas.

FSDP2 reduce-scatters the gradients inside a replica, and calls the hooks of a sharded
parameter once its shard is available: the shards are then exchanged between the
replicas. `FSDPModule.set_all_reduce_hook` is not used. With a two-dimensional mesh that
hook runs after torch's dense allreduce, and does not replace it. With a one-dimensional
mesh it receives a flat buffer of a module's shards, without names; FSDP casts and
accumulates the buffer as soon as the hook returns, so an exchange could not overlap
with the backward pass of the next module.

Invariant: a parameter without a gradient on this rank counts as zero; if its mean is
not zero, `.grad` is set to the mean.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from collectives.agreement.all_or_none import check_same, gather_results
from collectives.torch.common import (
    Handle,
    ModelParameters,
    after_backward,
    check_exchange,
    check_scaler,
    local_shard,
    parts_of,
    trainable,
)
from collectives.torch.start import check_launcher
from collectives.training import GradientExchange


def attach_fsdp(
    model: FSDPModule, exchange: GradientExchange, *, scaler: Any = None
) -> "FSDPHandle":
    """Exchange the gradient shards of an FSDP2 model between its replicas (hybrid sharding), through `exchange`.

    model: sharded by `fully_shard` over the one-dimensional mesh of one replica; torch
    itself would average densely over the second dimension of a mesh. exchange: a new
    one, over the ranks that have the same shard in all replicas. The replicas must
    start with the same parameters.

    A backward pass writes the means to `.grad`. With
    `set_requires_gradient_sync(False)` gradients accumulate, and nothing is exchanged.
    scaler: as in `attach`, and so is a skipped step, of the ranks with one shard: an
    infinity in another shard skips that alone.

    Raises TypeError or ValueError for bad arguments, RuntimeError under torchrun and
    for an exchange with registered tensors; CollectiveError on the other ranks, and if
    the ranks of the exchange have different shards.

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
    for hook in [*parts_of(model, FSDPModule)[0]._forward_pre_hooks.values()]:
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, FSDPHandle):
            owner.remove()
    return FSDPHandle(model, exchange, scaler)


class FSDPHandle(Handle):
    """The hooks of an FSDP2 model and of its parameters; made by `attach_fsdp`.

    Outputs of FSDP2's modules have a hook that queues the end of the step, as FSDP2
    queues its own: the first one runs in the outer backward pass, while a parameter's
    may run in an inner one, of reentrant checkpointing.
    """

    def __init__(
        self, model: FSDPModule, exchange: GradientExchange, scaler: Any
    ) -> None:
        parameters = trainable(model)
        remedy = "call attach_fsdp again, with a new exchange"
        super().__init__(
            exchange, ModelParameters(model, parameters, "attach_fsdp", remedy), scaler
        )
        self._modules = parts_of(model, FSDPModule)
        self._completing = False  # the end of the backward pass will call `_complete`
        self._refused: Exception | None = None  # the model has other parameters
        self._calls = Counter[Any]()  # of modules in forward passes, since the last end
        self._versions: list[int] = []  # of the parameters, before the backward pass
        self._taken: dict[Any, Any] = {}  # the gradients of this backward pass, and
        self._late: list[Any] = []  # the parameters whose exchange its end starts
        self._hooks = [
            self._modules[0].register_forward_pre_hook(self._compare, prepend=True)
        ]
        self._hooks += [
            each.register_forward_hook(self._watch) for each in self._modules
        ]
        self._hooks += [
            each.register_post_accumulate_grad_hook(self._take)
            for each in parameters.values()
        ]

    def fail(self, error: Exception) -> NoReturn:
        """End the step under way, or the next one, as a rank that failed: `error` is raised, as in the step.

        After an error in a backward pass, call `model.reset_iter_state()` as well, on
        all ranks of the replica.
        """
        self._reset()
        super().fail(error)

    def remove(self) -> None:
        """Remove the hooks: another handle takes their place."""
        for hook in self._hooks:
            hook.remove()

    def _reset(self) -> None:
        self._completing, self._failed, self._refused, self._taken, self._late = (
            False,
            None,
            None,
            {},
            [],
        )
        self._calls.clear()

    def _compare(self, *unused: Any) -> None:
        """Look at the parameters again, before FSDP2 replaces them by whole ones; the end of the step raises errors."""
        if self._completing and torch._C._current_graph_task_id() < 0:
            raise RuntimeError(
                "the last backward pass was interrupted by an error: call handle.fail(error) after it"
            )
        if torch.is_grad_enabled() and not self._completing:
            try:
                self._parameters.frozen()
                self._refused = None
            except ValueError as error:
                self._refused = error

    def _watch(self, module: Any, inputs: Any, output: Any) -> None:
        """Have the backward pass of an output queue its end, and count the calls of the module."""
        tensors = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        for tensor in tensors:
            tensor.register_hook(self._queue_end)
        if tensors and not self._completing:  # else checkpointing computes it again
            self._calls[module] += 1

    def _queue_end(self, *unused: Any) -> None:
        """Have the end of this backward pass complete the step."""
        if not self._completing:
            after_backward(self._complete)
            self._completing, self._versions = (
                True,
                [parameter._version for parameter in self._names],
            )
            self._begin()

    def _take(self, parameter: Any) -> None:
        """Start the exchange of a gradient, or have the end of the backward pass start it.

        The latter if modules were called several times, as FSDP2 then adds to a
        gradient as often. And for parameters that FSDP2 ignores: their hooks also run
        where gradients only accumulate.
        """
        self._queue_end()  # of outputs that no module of FSDP2 returned
        is_new = parameter not in self._taken
        self._taken[parameter] = local_shard(parameter.grad)
        if (
            not isinstance(parameter, DTensor)
            or max(self._calls.values(), default=0) > 1
        ):
            self._late += [parameter] if is_new else []
        elif is_new:
            self._start_all([parameter])
        elif self._failed is None:
            self._failed = RuntimeError(
                f"{self._names[parameter]} got several gradients in one backward pass, from reentrant checkpoints: "
                "use checkpoint(..., use_reentrant=False)"
            )

    def _start_all(self, parameters: Sequence[Any]) -> None:
        """Start the exchange of gradients; before the first one of a step, leave out what is frozen now."""
        if not self.exchange.is_in_step and self._failed is None:
            frozen = {
                name
                for parameter, name in self._names.items()
                if not parameter.requires_grad
            }
            try:
                if frozen != self._held:
                    self.exchange.hold(frozen)
                    self._held = frozen
            # on all ranks of the exchange; those of the replica are in the backward
            # pass
            except Exception as error:
                self._failed = error
        given = [each for each in parameters if self._names[each] not in self._held]
        parts = [
            (each, self._taken[each]) for each in given if self._taken[each] is not None
        ]
        if self._scale != 1:
            for _, gradient in parts:
                gradient.div_(self._scale)
        self._start(parts)

    def _complete(self) -> None:
        """Wait for the means, and write them to `.grad`; NaN if the step fails, which it does on all ranks."""
        try:
            if not self._has_step():
                return
            if self._refused is not None:
                self.exchange.fail(self._refused)
            self._check_unchanged()
            unused = [
                parameter for parameter in self._names if parameter not in self._taken
            ]
            # None, or of a pass before
            self._taken |= {
                parameter: local_shard(parameter.grad) for parameter in unused
            }
            self._start_all([*self._late, *unused])
            means, factor = self._end()
        except Exception:
            for parameter, name in self._names.items():
                if parameter.grad is not None and name not in self._held:
                    local_shard(parameter.grad).fill_(math.nan)
            raise
        finally:
            self._reset()
        for parameter, name in self._names.items():
            if name in self._held:
                continue
            mean = means[name] if factor == 1 else means[name].mul_(factor)
            if parameter.grad is None:
                if mean.any():
                    parameter.grad = _like_parameter(mean, parameter)
            elif parameter.dtype == torch.bfloat16:
                local_shard(parameter.grad).copy_(mean)
        if self._drops:
            self._drop_gradients()

    def _has_step(self) -> bool:
        """Return whether this backward pass synchronises gradients; with one of a sharded parameter it does."""
        if any(isinstance(parameter, DTensor) for parameter in self._taken):
            return True
        # `set_requires_gradient_sync` has no getter
        states = [module._get_fsdp_state() for module in self._modules]
        groups = [
            group
            for state in states
            for group in getattr(state, "_fsdp_param_groups", ())
        ]
        return bool(self._taken or self._refused) and all(
            group.reduce_grads for group in groups
        )

    def _check_unchanged(self) -> None:
        """Fail the step on all ranks if a parameter was changed in the backward pass, or its gradient replaced."""
        before = dict(zip(self._names, self._versions, strict=True))
        for parameter, gradient in self._taken.items():
            now = local_shard(parameter.grad)
            is_same = (
                now is not None
                and gradient is not None
                and now.data_ptr() == gradient.data_ptr()
            )
            if self._failed is None and not (
                is_same and parameter._version == before[parameter]
            ):
                what = f"{self._names[parameter]} was changed, or its .grad was replaced, in the backward pass"
                remedy = "call an optimiser's step() after backward(), and not in register_post_accumulate_grad_hook"
                self.exchange.fail(RuntimeError(f"{what}: {remedy}"))


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a module's output in which FSDP2 looks for them."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors([*output.values()])
    elif is_dataclass(output) and not isinstance(output, type):
        yield from _tensors([getattr(output, field.name) for field in fields(output)])
    elif isinstance(output, list | tuple):
        for each in output:
            yield from _tensors(each)


def _like_parameter(mean: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Return a mean as the `.grad` of a parameter, of its shard if it is sharded."""
    if not isinstance(parameter, DTensor):
        return mean
    layout = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(
        mean, parameter.device_mesh, parameter.placements, **layout
    )


def check_fsdp(model: Any, comm: Any) -> dict[str, str]:
    """Raise unless this is an FSDP2 model of one replica, and `comm` has a rank of each; return which shard it is."""
    check_launcher()
    if not parts_of(model, FSDPModule):
        raise TypeError(
            f"model is {type(model).__name__}: expected one that fully_shard(model, mesh=...) has sharded"
        )
    meshes = {
        parameter.device_mesh
        for parameter in trainable(model).values()
        if isinstance(parameter, DTensor)
    }
    if len(meshes) != 1:
        raise ValueError(
            f"the parameters are sharded over {len(meshes)} meshes: expected one for all of them"
        )
    (mesh,) = meshes
    if mesh.ndim != 1:
        raise ValueError(
            f"the model is sharded over a mesh of {mesh.ndim} dimensions, {mesh.mesh_dim_names}, and torch averages "
            'over the first of them: use fully_shard(model, mesh=mesh["shard"]), the dimension of one replica'
        )
    if comm.size * mesh.size() != dist.get_world_size():
        raise ValueError(
            f"comm has {comm.size} ranks, a replica {mesh.size()}, and the process group {dist.get_world_size()}"
            ": expected comm.Split(mesh.get_local_rank('shard'), comm.rank), of a mesh of ('replica', 'shard')"
        )
    return {"index of the shard": str(mesh.get_local_rank())}
