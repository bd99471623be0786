"""PyTorch in one line: `attach(model, exchange)` for DistributedDataParallel, `attach_fsdp` for hybrid sharding.

The library itself does not import this module.

DistributedDataParallel calls a communication hook for each bucket of gradients during the backward pass. The hook
passes them to one `GradientExchange` by the names of the parameters, and completes the futures of all buckets in the
last one. So residuals belong to parameters, and are conserved when DDP rebuilds its buckets after the first step.
Rounds and bytes of a step: those of the exchange.

FSDP2 reduce-scatters the gradients inside a replica, and calls the hooks of a sharded parameter once its shard is
available: the shards are then exchanged between the replicas. `FSDPModule.set_all_reduce_hook` is not used. With a
two-dimensional mesh that hook runs after torch's dense allreduce, and does not replace it. With a one-dimensional mesh
it receives a flat buffer of a module's shards, without names; FSDP casts and accumulates the buffer as soon as the hook
returns, so an exchange could not overlap with the backward pass of the next module.

DDP's buckets store a gradient in the memory order of its parameter, and so does the exchange: the residual of a
channels_last parameter fits only a model of the same memory format.

Invariant: a parameter without a gradient on this rank counts as zero; if its mean is not zero, `.grad` is set to the
mean.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from collectives.agreement import check_same, gather_objects
from collectives.dense import dense_iallreduce
from collectives.exchange import GradientExchange
from collectives.launcher import torchrun_warning
from collectives.outer import OuterLoop
from mpicomp.compressors.common import check_number
from mpicomp.settings import refuse_bools

_TEXT = "text:"  # before the keys of text, which torch holds as UTF-8 of JSON in uint8
_DENSE_STEPS = "attach/dense_steps_left"


def init_process_group(comm: Any, backend: str = "gloo") -> None:
    """Initialise torch.distributed with the ranks of an MPI communicator; all of them call it.

    comm: an mpi4py intracommunicator. Rank 0 listens on a free port, and sends its host and the port to all. backend:
    for torch's own messages; with `attach` only the small ones of DDP. Raises RuntimeError under torchrun, whose
    processes MPI does not connect, and if there is a process group already; torch's error if rank 0 cannot listen, and
    CollectiveError on the other ranks.

    >>> init_process_group(MPI.COMM_WORLD)
    """
    from mpi4py import MPI

    _check_launcher()
    server: dist.TCPStore | None = None
    address: Any = None
    try:
        if dist.is_initialized():
            raise RuntimeError(
                "torch.distributed has a process group already: expected init_process_group(comm) in place of torch's, "
                "once, or after torch.distributed.destroy_process_group()"
            )
        if comm.rank == 0:
            host = MPI.Get_processor_name()
            server = dist.TCPStore(host, 0, comm.size, is_master=True, wait_for_workers=False)
            address = host, server.port
    except Exception as error:  # whatever it is: the other ranks wait for the address
        address = error
    try:
        host, port = gather_objects(address, comm, "init_process_group")[0]
    finally:
        del address  # else an error, its traceback and this frame hold each other
    store = server or dist.TCPStore(host, port, comm.size, is_master=False)
    dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size)


def attach(
    model: DistributedDataParallel,
    exchange: GradientExchange,
    *,
    warmup_steps: int = 0,
    clip: float | None = None,
    scaler: Any = None,
) -> "DDPHandle":
    """Exchange the gradients of a DistributedDataParallel model through `exchange`, in place of DDP's allreduce.

    Call it once, on all ranks, before the first backward pass. It registers the parameters with the exchange, which
    must be new, under their names in `model.module`. A backward pass then writes the means to `.grad`; inside
    `model.no_sync()` nothing is exchanged.

    warmup_steps: this many steps are dense first; residuals are not touched. clip: before it is compressed, this rank's
    gradient is scaled to a Euclidean norm of at most clip / sqrt(P). The norm is that of all parameters, so with `clip`
    the exchange starts when the last bucket is ready: it does not overlap with the backward pass. scaler: the
    `torch.amp.GradScaler` that scaled the loss. They are divided by the scale before the exchange and multiplied after
    it, so that `clip` and residuals do not depend on it. Use `nonfinite="skip"` for the exchange: a step with
    infinities writes NaN to `.grad` on all ranks, and the scaler skips it.

    Returns a handle for checkpoints. If the exchange raises in a step, `backward()` raises on all ranks, with NaN in
    `.grad`; training can continue. Raises TypeError or ValueError for bad arguments; RuntimeError under torchrun, and
    for an exchange with registered tensors; CollectiveError on the other ranks.

    Source of the clipping: Lin et al., Deep Gradient Compression, ICLR 2018, section 3.2.

    >>> exchange = GradientExchange(comm, TopK(0.01))
    >>> handle = attach(DistributedDataParallel(network), exchange)
    """
    with _on_all_ranks(exchange, "attach"):
        _check_ddp(model, exchange.comm)
        check_number("warmup_steps", warmup_steps, least=0)
        refuse_bools(clip=clip)
        if clip is not None and not 0 < clip < math.inf:
            raise ValueError(f"clip is {clip!r}: expected the largest norm of a gradient, a number above 0, or None")
        if scaler is not None and not hasattr(scaler, "get_scale"):
            raise TypeError(f"scaler is {type(scaler).__name__}: expected a torch.amp.GradScaler, or None")
    handle = DDPHandle(model, exchange, warmup_steps, clip, scaler)
    model.register_comm_hook(handle, _bucket_hook)
    return handle


def attach_fsdp(model: FSDPModule, exchange: GradientExchange) -> "FSDPHandle":
    """Exchange the gradient shards of an FSDP2 model between its replicas (hybrid sharding), through `exchange`.

    model: sharded by `fully_shard` over the one-dimensional mesh of one replica; torch itself would average densely
    over the second dimension of a mesh. exchange: a new one, over the ranks that have the same shard in all replicas.
    The replicas must start with the same parameters.

    A backward pass writes the means to `.grad`. With `set_requires_gradient_sync(False)` gradients accumulate, and
    nothing is exchanged. Raises TypeError or ValueError for bad arguments, RuntimeError under torchrun and for an
    exchange with registered tensors; CollectiveError on the other ranks, and if the ranks of the exchange have
    different shards.

    >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    >>> model = fully_shard(model, mesh=mesh["shard"])
    >>> replicas = comm.Split(mesh.get_local_rank("shard"), comm.rank)
    >>> handle = attach_fsdp(model, GradientExchange(replicas, TopK(0.01)))
    """
    shard: dict[str, str] = {}
    with _on_all_ranks(exchange, "attach_fsdp", shard):
        shard |= _check_fsdp(model, exchange.comm)
    return FSDPHandle(model, exchange)


def outer_loop(model: torch.nn.Module, exchange: GradientExchange, **terms: Any) -> OuterLoop:
    """Return an `OuterLoop` (local steps) of a module's trainable parameters. terms: keyword arguments of `OuterLoop`.

    >>> outer = outer_loop(network, exchange, every=30)
    """
    return OuterLoop(exchange, dict(_trainable(model)), **terms)


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


class Handle:
    """The handle that `attach` and `attach_fsdp` return: a model's parameters in an exchange, and their state."""

    def __init__(
        self, exchange: GradientExchange, parameters: Mapping[str, torch.Tensor], dense_steps: int = 0
    ) -> None:
        self.exchange, self._dense_steps = exchange, dense_steps
        self._failed: Exception | None = None  # what failed in the step under way, before its end
        self._names = {parameter: name for name, parameter in parameters.items()}
        local = {name: _local(parameter.detach()) for name, parameter in parameters.items()}
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

        Raises ValueError for a state that does not fit, and RuntimeError within a step.
        """
        arrays = to_arrays(state)
        left = int(arrays.pop(_DENSE_STEPS, self._dense_steps))
        if not any(name.startswith("module.") for name in self._names.values()):
            arrays = {_without_module(key): array for key, array in arrays.items()}
        self.exchange.load_state_dict(arrays, same_settings=same_settings)
        self._dense_steps = left

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
            if self.exchange.under_way:  # it was refused here alone: the other ranks are in the step
                self.exchange.fail(failed)
            raise failed
        finally:
            del failed  # it, its traceback and this frame would hold each other

    def _start(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Start the exchange of a gradient; the end of the step overwrites it with its mean."""
        out = None if gradient.dtype == torch.bfloat16 else gradient
        self.exchange.start(self._names[parameter], gradient, out=out)


@dataclass(frozen=True)
class _Bucket:
    future: torch.futures.Future[torch.Tensor]
    buffer: torch.Tensor
    parts: list[tuple[torch.Tensor, torch.Tensor]]  # each parameter, and the view of its gradient


class DDPHandle(Handle):
    """The communication hook of a DistributedDataParallel model; made by `attach`."""

    def __init__(
        self,
        model: DistributedDataParallel,
        exchange: GradientExchange,
        warmup_steps: int,
        clip: float | None,
        scaler: Any,
    ) -> None:
        ignored = model.parameters_to_ignore
        parameters = {name: each for name, each in _trainable(model.module) if name not in ignored}
        super().__init__(exchange, parameters, warmup_steps)
        self._views, self._may_skip = model.gradient_as_bucket_view, model.find_unused_parameters or model.static_graph
        self._clip, self._scaler, self._scale = clip, scaler, 1.0
        self._detached = False
        self._buckets: list[_Bucket] = []  # of the step under way
        self._sums: list[Any] = []  # the requests of a dense step

    def detach(self) -> None:
        """Make all further steps dense, without clipping; call it on all ranks, between steps.

        DDP cannot remove a hook; this one then averages as DDP does. Residuals stay in the exchange.
        """
        self._detached = True

    @property
    def is_dense(self) -> bool:
        """Whether the next step is dense: one of `warmup_steps`, or after `detach`."""
        return self._detached or self._dense_steps > 0

    def _take(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of a bucket's gradients, and return a future for its means; the last one ends the step."""
        if not self._buckets:
            self._scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        parts = [*zip(bucket.parameters(), bucket.gradients(), strict=True)]
        taken = _Bucket(torch.futures.Future(), bucket.buffer(), parts)
        self._buckets.append(taken)
        if self._scale != 1:
            taken.buffer.div_(self._scale)
        clips = self._clip is not None and not self._detached
        if not clips:
            self._try(self._send, taken)
        if bucket.is_last():
            buckets, self._buckets = self._buckets, []
            if clips:
                self._clip_gradient(buckets)
                for each in buckets:
                    self._try(self._send, each)
            self._end_step(buckets)
        return taken.future

    def _send(self, bucket: _Bucket) -> None:
        if self.is_dense:
            wide = bucket.buffer.float() if bucket.buffer.dtype == torch.bfloat16 else bucket.buffer
            self._sums.append(dense_iallreduce(wide, self.exchange.comm))
            return
        for parameter, part in bucket.parts:
            self._start(parameter, part)

    def _end_step(self, buckets: list[_Bucket]) -> None:
        """Wait for the means, and write them to DDP's buckets and to unused parameters."""
        failed: Exception | None = None
        try:
            self._receive(buckets)
        except Exception as error:  # on all ranks; DDP needs its futures to go on after it
            failed = error
            for bucket in buckets:
                bucket.buffer.fill_(math.nan)
        for bucket in buckets:
            if self._scale != 1:
                bucket.buffer.mul_(self._scale)
            if self._may_skip:
                self._set_unused(bucket)
            bucket.future.set_result(bucket.buffer)
        if failed is not None:
            _raise_after_backward(failed)

    def _receive(self, buckets: list[_Bucket]) -> None:
        """Write the means over the gradients."""
        sums, self._sums = self._sums, []
        self._raise_failed()
        if self.is_dense:
            ranks = self.exchange.comm.size if self.exchange.average else 1
            for bucket, request in zip(buckets, sums, strict=True):
                bucket.buffer.copy_(request.wait().div_(ranks))
            self._dense_steps = max(0, self._dense_steps - 1)
            return
        means = self.exchange.finish()
        for parameter, part in [part for bucket in buckets for part in bucket.parts]:
            if part.dtype == torch.bfloat16:
                part.copy_(means[self._names[parameter]])

    def _set_unused(self, bucket: _Bucket) -> None:
        """Set `.grad` of unused parameters: DDP drops their mean, which may contain residuals."""
        for parameter, part in bucket.parts:
            mean = _in_layout_of(parameter, part)
            if parameter.grad is not None:
                parameter.grad.copy_(mean)
            elif mean.any():
                parameter.grad = mean if self._views else mean.clone()

    def _clip_gradient(self, buckets: list[_Bucket]) -> None:
        """Scale this rank's gradient to a norm of at most clip / sqrt(P); the bits do not depend on the buckets."""
        assert self._clip is not None
        parts = dict(part for bucket in buckets for part in bucket.parts)
        norms = [torch.linalg.vector_norm(parts[each], dtype=torch.float64) for each in self._names if each in parts]
        norm = math.hypot(*map(float, norms))
        limit = self._clip / math.sqrt(self.exchange.comm.size)
        if limit < norm < math.inf:  # what is not finite is left for the exchange to find
            for bucket in buckets:
                bucket.buffer.mul_(limit / norm)


class FSDPHandle(Handle):
    """The hooks of the sharded parameters of an FSDP2 model; made by `attach_fsdp`."""

    def __init__(self, model: FSDPModule, exchange: GradientExchange) -> None:
        self._parameters = dict(_trainable(model))
        super().__init__(exchange, self._parameters)
        self._finishing = False  # the end of the backward pass will call `_finish`
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._take) for parameter in self._parameters.values()
        ]

    def detach(self) -> None:
        """Remove the hooks: from now on nothing averages the gradients of the replicas."""
        for hook in self._hooks:
            hook.remove()

    def _take(self, parameter: Any) -> None:
        """Start the exchange of a shard, and have the end of the backward pass wait for all shards."""
        if not self._finishing:
            _after_backward(self._finish)
            self._finishing = True
        self._try(self._start, parameter, _local(parameter.grad))

    def _finish(self) -> None:
        """Wait for the means, and write them to `.grad`; NaN if the step fails, which it does on all ranks."""
        self._finishing = False
        try:
            self._raise_failed()
            means = self.exchange.finish()
        except Exception:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    _local(parameter.grad).fill_(math.nan)
            raise
        for name, parameter in self._parameters.items():
            mean = means[name]
            if parameter.grad is None:
                if mean.any():
                    layout = {"shape": parameter.shape, "stride": parameter.stride()}
                    parameter.grad = DTensor.from_local(mean, parameter.device_mesh, parameter.placements, **layout)
            elif parameter.dtype == torch.bfloat16:
                _local(parameter.grad).copy_(mean)


def _bucket_hook(state: DDPHandle, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state._take(bucket)


def _after_backward(call: Callable[[], None]) -> None:
    """Call a function at the end of the current backward pass; RuntimeError without one."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _raise_after_backward(error: Exception) -> None:
    """Raise an error from `backward()` after DDP has ended its step; else DDP refuses the next step."""

    def fail() -> None:
        raise error

    try:
        _after_backward(partial(_after_backward, fail))  # DDP queues its own end in between
    except RuntimeError:  # on a rank that has joined: there is no backward pass
        raise error from None


@contextmanager
def _on_all_ranks(exchange: Any, operation: str, compared: dict[str, str] | None = None) -> Iterator[None]:
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


def _check_launcher() -> None:
    from mpi4py import MPI

    warning = torchrun_warning(MPI.COMM_WORLD.size, os.environ)
    if warning:
        raise RuntimeError(warning)


def _check_ddp(model: Any, comm: Any) -> None:
    """Raise TypeError, ValueError or RuntimeError unless this is a DDP model of the ranks of `comm` without a hook."""
    _check_launcher()
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"model is {type(model).__name__}: expected DistributedDataParallel(model), after init_process_group(comm);"
            " attach_fsdp is for FSDP2, and exchange(gradients, out=gradients) needs no wrapper"
        )
    if model.process_group.size() != comm.size:
        raise ValueError(
            f"the model's process group has {model.process_group.size()} ranks, and the exchange's communicator "
            f"{comm.size}: start with mpirun or srun, and call collectives.torch.init_process_group(comm)"
        )
    if model._comm_hooks:
        raise ValueError(
            "the model has a communication hook, and DDP takes one only: attach to "
            "DistributedDataParallel(model.module), without mixed_precision="
        )


def _check_fsdp(model: Any, comm: Any) -> dict[str, str]:
    """Raise unless this is an FSDP2 model of one replica, and `comm` has a rank of each; return which shard it is."""
    _check_launcher()
    if not isinstance(model, FSDPModule):
        raise TypeError(f"model is {type(model).__name__}: expected one that fully_shard(model, mesh=...) has sharded")
    meshes = {parameter.device_mesh for _, parameter in _trainable(model) if isinstance(parameter, DTensor)}
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


def _trainable(model: Any) -> Iterator[tuple[str, Any]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def _local(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a DTensor, and other tensors as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _in_layout_of(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return DDP's own view of a gradient in its bucket, given that of `GradBucket.gradients`.

    The latter has the parameter's shape in C order; DDP's has the strides of the parameter, unless that has gaps in
    memory.
    """
    strides = parameter.stride()
    has_gaps = torch.empty_like(parameter, device="meta").stride() != strides
    return part if has_gaps else part.as_strided(parameter.size(), strides, part.storage_offset())


def _without_module(key: str) -> str:
    """Return the key of a state without `module.` before the names of parameters, which are joined by plus signs."""
    return re.sub(r"(^|(?<!\\)\+)module\.", r"\1", key)
