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
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from collectives.calls.all_or_none import check_same, gather_results
from collectives.calls.positions import check_digests
from collectives.calls.replicas import EVERY, digests_of
from collectives.exchange import GradientExchange
from collectives.torch.common import (
    OTHER_PARAMETERS,
    Handle,
    ModelParameters,
    check_settings,
    comm_of,
    local_shard,
    named,
    parts_of,
    raise_after_backward,
    shards_of,
    trainable,
)
from collectives.torch.private import (
    forward_hooks_of,
    is_inner_fsdp,
    reduces_gradients,
    tensors_in,
)
from collectives.torch.start import check_launcher
from mpicomp.errors import warn


def attach_fsdp(
    model: FSDPModule,
    exchange: GradientExchange,
    *,
    scaler: Any = None,
    check_every: int = EVERY,
) -> "FSDPHandle":
    """Exchange the gradient shards of an FSDP2 model between its replicas (hybrid sharding), through `exchange`.

    A backward pass writes the means to `.grad`. With `set_requires_gradient_sync(False)`
    gradients accumulate, and nothing is exchanged. Parameters of a larger FSDP2 model, of which
    `model` is a part, are not exchanged; it warns of them.

    Args:
        model: sharded by `fully_shard` over the one-dimensional mesh of one replica; torch
            itself would average densely over the second dimension of a mesh. The replicas must
            start with the same parameters, which are compared.
        exchange: a new one, over the ranks that have the same shard in all replicas.
        scaler: as in `attach`. A skipped step is one of the ranks with one shard: an infinity
            in another shard skips that alone.
        check_every: as in `attach`: this rank's shards are compared with those of the other
            replicas.

    Returns:
        A `Handle` for checkpoints.

    Raises:
        TypeError: an argument is of a wrong type; other ranks raise CollectiveError.
        ValueError: an argument has a wrong value, or the model is attached; likewise.
        RuntimeError: started by torchrun, or the exchange has registered tensors.
        CollectiveError: another rank's arguments are bad, or the ranks of the exchange have
            different shards, parameters or arguments.

    >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    >>> model = fully_shard(model, mesh=mesh["shard"])
    >>> replicas = comm.Split(mesh.get_local_rank("shard"), comm.rank)
    >>> handle = attach_fsdp(model, GradientExchange(replicas, TopK(0.01)))
    """
    comm = comm_of(exchange)

    def check() -> dict[str, dict[str, str]]:
        shard = check_fsdp(model, comm)
        check_unattached(model)
        return {
            "shard": shard,
            "arguments of attach_fsdp": check_settings(exchange, scaler, check_every),
            "digests": digests_of(shards_of(named(model))),
        }

    everyone = gather_results(check, comm, "attach_fsdp")
    digests = {rank: answer.pop("digests") for rank, answer in enumerate(everyone)}
    for what in everyone[0]:
        check_same(what, [answer[what] for answer in everyone])
    check_digests("attach_fsdp: ", digests, OTHER_PARAMETERS)
    return FSDPHandle(model, exchange, scaler, check_every)


_ANEW = (
    "call handle.remove(), and attach_fsdp with a new exchange; if names, shapes and dtypes are the same, "
    "new_handle.load_state_dict(handle.state_dict()) keeps the residuals"
)
_INTERRUPTED = f"on all ranks call model.reset_iter_state(); {_ANEW}"


class FSDPHandle(Handle):
    """The hooks of an FSDP2 model and of its parameters; made by `attach_fsdp`.

    Outputs of FSDP2's modules have a hook that queues the end of the step, as FSDP2
    queues its own: the first one runs in the outer backward pass, while a parameter's
    may run in an inner one, of reentrant checkpointing.
    """

    def __init__(
        self,
        model: FSDPModule,
        exchange: GradientExchange,
        scaler: Any,
        check_every: int,
    ) -> None:
        parameters = trainable(model)
        known = ModelParameters(model, parameters, "attach_fsdp", _ANEW)
        super().__init__(exchange, known, scaler, _INTERRUPTED, check_every)
        self._modules = parts_of(model, FSDPModule)
        self._is_first = True  # no forward pass was made
        # Calls of each module in forward passes since the last backward pass ended.
        self._calls = Counter[Any]()
        # Gradients of this backward pass, by parameter.
        self._taken: dict[Any, Any] = {}
        # Parameters whose exchange the end of the backward pass starts.
        self._late: list[Any] = []
        self._hooks = [
            self._modules[0].register_forward_pre_hook(self._compare, prepend=True)
        ]
        self._hooks += [
            module.register_forward_hook(self._watch) for module in self._modules
        ]
        self._hooks += [
            parameter.register_post_accumulate_grad_hook(self._take)
            for parameter in parameters.values()
        ]

    def remove(self) -> None:
        """Remove the hooks: the model can be attached again."""
        for hook in self._hooks:
            hook.remove()

    def _compare(self, *unused: Any) -> None:
        """Look at the parameters before FSDP2 replaces them by unsharded ones; the end of the step raises errors."""
        if not torch.is_grad_enabled():
            return
        self._warn_of_others()
        self._check_interrupted()
        if not self._in_pass:
            try:
                self._parameters.look()
                self._own_error = None
            except ValueError as error:
                self._own_error = error

    def _warn_of_others(self) -> None:
        """Warn once if the model is a part of a larger FSDP2 model, which the first forward pass of that shows."""
        if self._is_first and is_inner_fsdp(self._modules[0]):
            warn(
                "attach_fsdp got a part of a larger FSDP2 model: the replicas do not average the other parameters; "
                "expected attach_fsdp(model, ...) of the whole model",
                depth=2,
            )
        self._is_first = False

    def _watch(self, module: Any, inputs: Any, output: Any) -> None:
        """Have the backward pass of an output queue its end, and count the calls of the module."""
        tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        for tensor in tensors:
            tensor.register_hook(lambda _: self._begin_pass())
        if tensors and not self._in_pass:  # else checkpointing computes it again
            self._calls[module] += 1

    def _begin_pass(self) -> None:
        """Begin a backward pass, whose end completes the step."""
        if not self._in_pass:
            super()._begin_pass()
            self._taken = {}
            self._late = []

    def _take(self, parameter: Any) -> None:
        """Start the exchange of a gradient, or have the end of the backward pass start it.

        The latter if modules were called several times, as FSDP2 then adds to a
        gradient as often. And for parameters that FSDP2 ignores: their hooks also run
        where gradients only accumulate.
        """
        # Outputs that no module of FSDP2 returned have no hook that begins the pass.
        self._begin_pass()
        is_new = parameter not in self._taken
        self._taken[parameter] = local_shard(parameter.grad)
        if (
            not isinstance(parameter, DTensor)
            or max(self._calls.values(), default=0) > 1
        ):
            if is_new:
                self._late.append(parameter)
        elif is_new:
            self._start_all([parameter])
        elif self._own_error is None:
            self._own_error = RuntimeError(
                f"{self._names[parameter]} got several gradients in one backward pass, from reentrant checkpoints: "
                "use checkpoint(..., use_reentrant=False)"
            )

    def _start_all(self, parameters: Sequence[Any]) -> None:
        """Start the exchange of gradients; the first one of a step begins it."""
        if not self.exchange.is_in_step:
            self._begin_step()
        taken = [(parameter, self._taken[parameter]) for parameter in parameters]
        parts = [part for part in self._exchanged(taken) if part[2] is not None]
        if self._scale != 1:
            for _, _, gradient in parts:
                gradient.div_(self._scale)
        self._start(parts)

    def _end_pass(self) -> None:
        """Wait for the means, and write them to `.grad`; NaN if the step fails, which it does on all ranks."""
        try:
            if not self._has_step():
                return
            self._check_unchanged()
            unused = [
                parameter for parameter in self._names if parameter not in self._taken
            ]
            # An unused parameter has no gradient, or that of an earlier pass.
            self._taken |= {
                parameter: local_shard(parameter.grad) for parameter in unused
            }
            self._start_all([*self._late, *unused])
            means, factor = self._end()
        except Exception as error:
            for parameter, name in self._names.items():
                if parameter.grad is not None and name not in self._held:
                    local_shard(parameter.grad).fill_(math.nan)
            raise_after_backward(error)
            return
        finally:
            self._in_pass = False
            self._own_error = None
            self._taken = {}
            self._calls.clear()
        for parameter, name in self._names.items():
            if name in self._held:
                continue
            mean = means[name] if factor == 1 else means[name].mul_(factor)
            if parameter.grad is None:
                if mean.any():
                    parameter.grad = _like_parameter(mean, parameter)
            elif parameter.dtype == torch.bfloat16:
                local_shard(parameter.grad).copy_(mean)
        self._drop_gradients()

    def _has_step(self) -> bool:
        """Return whether this backward pass synchronises gradients; it does if a sharded parameter has a gradient."""
        if any(isinstance(parameter, DTensor) for parameter in self._taken):
            return True
        has_gradients = bool(self._taken or self._own_error)
        return has_gradients and all(map(reduces_gradients, self._modules))

    def _check_unchanged(self) -> None:
        """Refuse the step if a parameter was changed in the backward pass, or its gradient replaced."""
        self._check_versions()
        for parameter, gradient in self._taken.items():
            now = local_shard(parameter.grad)
            is_same = (
                now is not None
                and gradient is not None
                and now.data_ptr() == gradient.data_ptr()
            )
            if self._own_error is None and not is_same:
                self._refuse_change(self._names[parameter])


def check_unattached(model: Any) -> None:
    """Raise ValueError if a handle has hooks in a model."""
    for module in parts_of(model, FSDPModule):
        for hook in forward_hooks_of(module):
            if isinstance(getattr(hook, "__self__", None), FSDPHandle):
                raise ValueError(
                    "the model is already attached: use the handle that attach_fsdp has returned; or call its remove()"
                )


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
