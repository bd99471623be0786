"""DistributedDataParallel: `attach` exchanges its gradients, in place of its allreduce.

DistributedDataParallel calls a communication hook for each bucket of gradients during the backward pass. The hook
passes them to one `GradientExchange` by the names of the parameters, and completes the futures of all buckets in the
last one. So residuals belong to parameters, and are conserved when DDP rebuilds its buckets after the first step.
Rounds and bytes of a step: those of the exchange.

DDP's buckets store a gradient in the memory order of its parameter, and so does the exchange: the residual of a
channels_last parameter fits only a model of the same memory format.

Invariant: a parameter without a gradient on this rank counts as zero; if its mean is not zero, `.grad` is set to the
mean.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from collectives.dense import dense_iallreduce
from collectives.exchange import GradientExchange
from collectives.exchange.reduction import SIGN
from collectives.torch.common import Handle, after_backward, check_scaler, on_all_ranks, trainable
from collectives.torch.start import check_launcher
from mpicomp.settings import to_integer, to_number


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
    the exchange starts when the last bucket is ready: it does not overlap with the backward pass. The handle's `norm`
    is that of this rank's last gradient before it was clipped, for a log. scaler: the
    `torch.amp.GradScaler` that scaled the loss. They are divided by the scale before the exchange and multiplied after
    it, so that `clip` and residuals do not depend on it.

    With `nonfinite="skip"` in the exchange, a step with NaN or infinities on any rank is skipped on all. With a scaler
    `.grad` is then NaN, so that the scaler skips the step and lowers the scale; without one it is None, so that the
    optimiser passes over all parameters.

    Returns a handle for checkpoints. If the exchange raises in a step, `backward()` raises on all ranks, with NaN in
    `.grad`; training can continue. Raises TypeError or ValueError for bad arguments; RuntimeError under torchrun, and
    for an exchange with registered tensors; CollectiveError on the other ranks.

    Source of the clipping: Lin et al., Deep Gradient Compression, ICLR 2018, section 3.2.

    >>> exchange = GradientExchange(comm, TopK(0.01))
    >>> handle = attach(DistributedDataParallel(network), exchange)
    """
    with on_all_ranks(exchange, "attach"):
        _check_ddp(model, exchange.comm)
        warmup_steps = to_integer("warmup_steps", warmup_steps, 0)
        remedy = ", the largest norm of a gradient, or None"
        clip = None if clip is None else to_number("clip", clip, above=0, remedy=remedy)
        check_scaler(scaler)
    handle = DDPHandle(model, exchange, warmup_steps, clip, scaler)
    model.register_comm_hook(handle, _bucket_hook)
    return handle


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
        parameters = {name: each for name, each in trainable(model.module) if name not in ignored}
        super().__init__(exchange, parameters, scaler, warmup_steps)
        self._views, self._may_skip = model.gradient_as_bucket_view, model.find_unused_parameters or model.static_graph
        self._clip, self._detached = clip, False
        self.norm: float | None = None  # with `clip`: of this rank's last gradient, before it was clipped
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
            self._read_scale()
        parts = [*zip(bucket.parameters(), bucket.gradients(), strict=True)]
        taken = _Bucket(_future(bucket.buffer()), bucket.buffer(), parts)
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
        self._start(bucket.parts)

    def _end_step(self, buckets: list[_Bucket]) -> None:
        """Wait for the means, and write them to DDP's buckets and to unused parameters."""
        failed: Exception | None = None
        skipped = False
        try:
            skipped = self._receive(buckets)
        except Exception as error:  # on all ranks; DDP needs its futures to go on after it
            failed = error
            for bucket in buckets:
                bucket.buffer.fill_(math.nan)
        for bucket in buckets:
            if skipped and self._scaler is not None:
                bucket.buffer.fill_(math.nan)  # for the scaler, which then skips the step as well
            elif self._scale != 1:
                bucket.buffer.mul_(self._scale)
            if self._may_skip:
                self._set_unused(bucket)
            bucket.future.set_result(bucket.buffer)
        if failed is not None:
            _raise_after_backward(failed)
        elif skipped and self._scaler is None:
            _after_ddp(self._drop_gradients)

    def _drop_gradients(self) -> None:
        for parameter in self._names:
            parameter.grad = None

    def _receive(self, buckets: list[_Bucket]) -> bool:
        """Write the means over the gradients; return whether the exchange skipped the step."""
        sums, self._sums = self._sums, []
        self._raise_failed()
        if self.is_dense:
            ranks = self.exchange.comm.size if self.exchange.average not in (False, SIGN) else 1
            for bucket, request in zip(buckets, sums, strict=True):
                mean = request.wait().div_(ranks)
                bucket.buffer.copy_(mean.sign_() if self.exchange.average == SIGN else mean)
            self._dense_steps = max(0, self._dense_steps - 1)
            return False
        means = self.exchange.finish()
        for parameter, part in [part for bucket in buckets for part in bucket.parts]:
            if part.dtype == torch.bfloat16:
                part.copy_(means[self._names[parameter]])
        return not self.exchange.finite

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
        self.norm = norm = math.hypot(*map(float, norms))
        limit = self._clip / math.sqrt(self.exchange.comm.size)
        if limit < norm < math.inf:  # what is not finite is left for the exchange to find
            for bucket in buckets:
                bucket.buffer.mul_(limit / norm)


def _future(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a future for a bucket's means; torch refuses a result on a device that the future does not name."""
    return torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)


def _bucket_hook(state: DDPHandle, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state._take(bucket)


def _raise_after_backward(error: Exception) -> None:
    """Raise an error from `backward()` after DDP has ended its step; else DDP refuses the next step."""

    def fail() -> None:
        raise error

    _after_ddp(fail)


def _after_ddp(call: Callable[[], None]) -> None:
    """Call a function once DDP has ended its step, which it does after the backward pass."""
    try:
        after_backward(partial(after_backward, call))  # DDP queues its own end in between
    except RuntimeError:  # on a rank that has joined: there is no backward pass
        call()


def _check_ddp(model: Any, comm: Any) -> None:
    """Raise TypeError, ValueError or RuntimeError unless this is a DDP model of the ranks of `comm` without a hook."""
    check_launcher()
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


def _in_layout_of(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return DDP's own view of a gradient in its bucket, given that of `GradBucket.gradients`.

    The latter has the parameter's shape in C order; DDP's has the strides of the parameter, unless that has gaps in
    memory.
    """
    strides = parameter.stride()
    has_gaps = torch.empty_like(parameter, device="meta").stride() != strides
    return part if has_gaps else part.as_strided(parameter.size(), strides, part.storage_offset())
