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
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from collectives.agreement import gather_results
from collectives.exchange import GradientExchange
from collectives.torch.common import Handle, after_backward, check_exchange, check_scaler, trainable
from collectives.torch.start import check_launcher
from mpicomp.settings import to_number


def attach(
    model: DistributedDataParallel,
    exchange: GradientExchange,
    *,
    clip: float | None = None,
    scaler: Any = None,
) -> "DDPHandle":
    """Exchange the gradients of a DistributedDataParallel model through `exchange`, in place of DDP's allreduce.

    Call it once, on all ranks, before the first backward pass. It registers the parameters with the exchange, which
    must be new, under their names in `model.module`. A backward pass then writes the means to `.grad`; inside
    `model.no_sync()` nothing is exchanged.

    clip: before it is compressed, this rank's gradient is scaled to a Euclidean norm of at most clip / sqrt(P). The
    norm is that of all parameters, so with `clip` the exchange starts when the last bucket is ready: it does not
    overlap with the backward pass. The handle's `norm` is that of this rank's last gradient before it was clipped, for
    a log. scaler: the `torch.amp.GradScaler` that scaled the loss. Gradients are divided by the scale before the
    exchange and multiplied after it, so that `clip` and residuals do not depend on it.

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
    check_exchange(exchange)

    def check() -> float | None:
        _check_ddp(model, exchange.comm)
        check_scaler(scaler)
        remedy = ", the largest norm of a gradient, or None"
        return None if clip is None else to_number("clip", clip, above=0, remedy=remedy)

    limit = gather_results(check, exchange.comm, "attach")[exchange.comm.rank]
    handle = DDPHandle(model, exchange, limit, scaler)
    model.register_comm_hook(handle, DDPHandle._take)
    return handle


_Parts = list[tuple[torch.Tensor, torch.Tensor]]  # of a bucket: each parameter, and the view of its gradient


class DDPHandle(Handle):
    """The communication hook of a DistributedDataParallel model; made by `attach`."""

    def __init__(
        self, model: DistributedDataParallel, exchange: GradientExchange, clip: float | None, scaler: Any
    ) -> None:
        ignored = model.parameters_to_ignore
        super().__init__(
            exchange, {name: each for name, each in trainable(model.module) if name not in ignored}, scaler
        )
        self._views, self._may_skip = model.gradient_as_bucket_view, model.find_unused_parameters or model.static_graph
        self._clip = clip
        self.norm: float | None = None  # with `clip`: of this rank's last gradient, before it was clipped
        self._buckets: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor, _Parts]] = []  # of this step

    def _take(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of a bucket's gradients, and return a future for its means; the last one ends the step."""
        if not self._buckets:
            self._begin()
        parts = [*zip(bucket.parameters(), bucket.gradients(), strict=True)]
        buffer, future = bucket.buffer(), _future(bucket.buffer())
        self._buckets.append((future, buffer, parts))
        if self._scale != 1:
            buffer.div_(self._scale)
        if self._clip is None:
            self._start(parts)
        if bucket.is_last():
            self._complete()
        return future

    def _complete(self) -> None:
        """Wait for the means, and write them to DDP's buckets and to unused parameters."""
        buckets, self._buckets = self._buckets, []
        if self._clip is not None:
            self._clip_gradient([(buffer, parts) for _, buffer, parts in buckets], self._clip)
        failed: Exception | None = None
        means: dict[str, Any] = {}
        factor = math.nan
        try:
            means, factor = self._end()
        except Exception as error:  # on all ranks; DDP needs its futures to go on after it
            failed = error
        for future, buffer, parts in buckets:
            for parameter, part in parts if means else []:
                if part.dtype == torch.bfloat16:
                    part.copy_(means[self._names[parameter]])
            if factor != 1:
                buffer.mul_(factor)
            if self._may_skip:
                self._set_unused(parts)
            future.set_result(buffer)
        if failed is not None:
            _raise_after_backward(failed)
        elif self._drops:
            _after_ddp(self._drop_gradients)

    def _set_unused(self, parts: _Parts) -> None:
        """Set `.grad` of unused parameters: DDP drops their mean, which may contain residuals."""
        for parameter, part in parts:
            mean = _in_layout_of(parameter, part)
            if parameter.grad is not None:
                parameter.grad.copy_(mean)
            elif mean.any():
                parameter.grad = mean if self._views else mean.clone()

    def _clip_gradient(self, buckets: list[tuple[torch.Tensor, _Parts]], clip: float) -> None:
        """Scale this rank's gradient to a norm of at most clip / sqrt(P), and start the exchange.

        The bits do not depend on the buckets.
        """
        found = dict(pair for _, parts in buckets for pair in parts)
        norms = [torch.linalg.vector_norm(found[each], dtype=torch.float64) for each in self._names if each in found]
        self.norm = norm = math.hypot(*map(float, norms))
        limit = clip / math.sqrt(self.exchange.comm.size)
        for buffer, parts in buckets:
            if limit < norm < math.inf:  # what is not finite is left for the exchange to find
                buffer.mul_(limit / norm)
            self._start(parts)


def _future(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a future for a bucket's means; torch refuses a result on a device that the future does not name."""
    return torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)


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
