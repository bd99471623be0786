"""DistributedDataParallel: `attach` exchanges its gradients, in place of its allreduce.

DistributedDataParallel calls a communication hook for each bucket of gradients during
the backward pass. The hook passes them to one `GradientExchange` by the names of the
parameters, and completes the futures of all buckets in the last one. So residuals
belong to parameters, and are conserved when DDP rebuilds its buckets after the first
step. Rounds and bytes of a step: those of the exchange.

DDP's buckets store a gradient in the memory order of its parameter, and so does the
exchange: the residual of a channels_last parameter fits only a model of the same memory
format.

Invariant: a parameter without a gradient on this rank counts as zero; if its mean is
not zero, `.grad` is set to the mean.
"""

import math
import weakref
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from collectives.calls.all_or_none import check_same, gather_results
from collectives.calls.replicas import EVERY
from collectives.exchange import GradientExchange
from collectives.faults.state import named_ranks
from collectives.torch.common import (
    Handle,
    ModelParameters,
    Parts,
    check_settings,
    comm_of,
    named,
    parts_of,
    raise_after_backward,
    some,
    trainable,
)
from collectives.torch.private import (
    after_backward,
    divides_by_all_ranks,
    drop_reducer,
    gradient_hooks_of,
    has_reducer,
    hooks_of,
    reduced_parameters,
    skips_unused,
    tensors_in,
    uses_python_reducer,
    versions_of,
)
from collectives.torch.start import check_launcher
from mpicomp.settings import to_number


def attach(
    model: DistributedDataParallel,
    exchange: GradientExchange,
    *,
    clip: float | None = None,
    scaler: Any = None,
    check_every: int = EVERY,
) -> "DDPHandle":
    """Exchange the gradients of a DistributedDataParallel model through `exchange`, in place of DDP's allreduce.

    Call it once, on all ranks, before the first backward pass. It registers the parameters with
    the exchange, under their names in `model.module`. A backward pass then writes the means to
    `.grad`; inside `model.no_sync()` nothing is exchanged.

    With `nonfinite="skip"` in the exchange, a step with NaN or infinities on any rank is
    skipped on all. With a scaler `.grad` is then NaN, so that the scaler skips the step and
    lowers the scale; without one it is None, so that the optimiser passes over all parameters.

    If the exchange raises in a step, `backward()` raises on all ranks, with NaN in `.grad`, and
    residuals do not change; training can continue. After an exception of this rank alone in a
    backward pass the next forward pass raises RuntimeError, which names the remedy.

    Args:
        model: the wrapped model, also within torch.compile or other modules.
        exchange: a new one, over the ranks of DDP's process group.
        clip: the largest Euclidean norm of the mean gradient: before it is compressed, this
            rank's gradient is scaled to a norm of at most clip / sqrt(P). The norm is that of
            all parameters, so the exchange starts when the last bucket is ready, and does not
            overlap with the backward pass. None, the default, clips nothing.
        scaler: the `torch.amp.GradScaler` that scaled the loss. Gradients are divided by the
            scale before the exchange and multiplied after it, so that `clip` and residuals do
            not depend on it.
        check_every: steps from one comparison of the parameters of all ranks to the next; the
            first step has one. The digests are part of the agreement on a step, without further
            messages; if they differ, the step raises CollectiveError on all ranks.

    Returns:
        A `Handle` for checkpoints. Its `norm` is that of this rank's last gradient before it was
        clipped, for a log; None without `clip`.

    Raises:
        TypeError: an argument is of a wrong type; other ranks raise CollectiveError.
        ValueError: an argument has a wrong value; likewise.
        RuntimeError: started by torchrun, or the exchange has registered tensors.
        CollectiveError: another rank's arguments are bad, or they differ.

    Source of the clipping: Lin et al., Deep Gradient Compression, ICLR 2018, section 3.2.

    >>> exchange = GradientExchange(comm, TopK(0.01))
    >>> handle = attach(DistributedDataParallel(network), exchange)
    """
    comm = comm_of(exchange)

    def check() -> dict[str, Any]:
        ddp = _check_ddp(model)
        limit = clip
        if clip is not None:
            remedy = ", the largest norm of a gradient, or None"
            limit = to_number("clip", clip, above=0, remedy=remedy)
        settings = check_settings(exchange, scaler, check_every)
        return {
            "settings": settings | {"clip": repr(limit)},
            "clip": limit,
            "rank": dist.get_rank(),
            "group": sorted(dist.get_process_group_ranks(ddp.process_group)),
        }

    everyone = gather_results(check, comm, "attach")
    _check_groups(
        [answer["group"] for answer in everyone],
        sorted(answer["rank"] for answer in everyone),
    )
    check_same("arguments of attach", [answer["settings"] for answer in everyone])
    (ddp,) = parts_of(model, DistributedDataParallel)
    return DDPHandle(ddp, exchange, everyone[0]["clip"], scaler, check_every)


_ANEW = (
    "wrap it in DistributedDataParallel again, and attach it with a new exchange; if names, shapes and dtypes are the "
    "same, new_handle.load_state_dict(handle.state_dict()) keeps the residuals"
)

_DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64


# The future of the means, the buffer, and the gradients in it.
_Bucket = tuple[torch.futures.Future[torch.Tensor], torch.Tensor, Parts]


class DDPHandle(Handle):
    """The hooks of a DistributedDataParallel model; made by `attach`."""

    def __init__(
        self,
        model: DistributedDataParallel,
        exchange: GradientExchange,
        clip: float | None,
        scaler: Any,
        check_every: int,
    ) -> None:
        inside = reduced_parameters(model)
        registered = {
            name: parameter
            for name, parameter in named(model.module).items()
            if parameter in inside
        }
        known = ModelParameters(model.module, registered, "attach", _ANEW)
        super().__init__(exchange, known, scaler, _ANEW, check_every)
        # A weak reference: a model that is dropped is deleted, and the hooks of its
        # parameters with it.
        self._model = weakref.ref(model)
        self._has_views = model.gradient_as_bucket_view
        self._finds_unused = model.find_unused_parameters
        self._may_skip = model.find_unused_parameters or model.static_graph
        # Whether DDP has made a forward pass whose gradients are to be exchanged.
        self._is_expected = False
        # Whether a backward pass of a forward pass in `no_sync` began, and has not
        # ended.
        self._is_accumulating = False
        # Whether a backward pass that DDP did not see began, and has not ended.
        self._is_astray = False
        self._strides = [parameter.stride() for parameter in registered.values()]
        self._clip = clip
        # The norm of this rank's last gradient before it was clipped; None without
        # `clip`.
        self.norm: float | None = None
        self._buckets: list[_Bucket] = []  # of this step
        # What `_stamps` returned before the pass; None if it was not called.
        self._stamps: Any = None
        model.register_forward_pre_hook(self)
        model.register_forward_hook(self)
        this = weakref.ref(self)
        model.register_comm_hook(this, lambda handle, bucket: handle()._take(bucket))
        for parameter in registered.values():
            _release(parameter)
            parameter.register_post_accumulate_grad_hook(_Notice(this))
        # The check for a second `attach` looks only at the class of the hook; a copy of
        # the model has a hook of another class.
        hooks_of(model)[:] = [self]

    @partial(torch.compiler.disable)
    def __call__(self, module: Any, inputs: Any, *output: Any) -> None:
        """Before a forward pass raise if the model cannot go on; after it have its backward pass call `_begin_pass`.

        Other errors are raised in the backward pass: in a forward pass one of this rank would
        leave the others in sums of DDP.
        """
        ddp = self._model()
        if ddp is None or not torch.is_grad_enabled():
            return
        synchronises = ddp.require_backward_grad_sync
        if not output and synchronises:
            self._check_interrupted()
            if not has_reducer(ddp):
                raise RuntimeError(f"this model cannot go on: {_ANEW}")
        self._is_expected |= bool(output) and synchronises
        begin = self._begin_at_outputs if synchronises else self._accumulate
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(begin)

    def remove(self) -> None:
        """Delete DDP's reducer, which hooks the parameters: wrap the model again to train it."""
        ddp = self._model()
        if ddp is not None:
            drop_reducer(ddp)

    def notice_gradient(self) -> None:
        """Refuse a backward pass that computes gradients of parameters, and that DDP did not see.

        Called for each parameter once its gradient was accumulated. After a forward pass of
        DDP the end of the pass says whether DDP has exchanged them.
        """
        ddp = self._model()
        if self._in_pass or self._is_accumulating or self._is_astray or ddp is None:
            return
        if not (has_reducer(ddp) and ddp.require_backward_grad_sync):
            return
        if self._is_expected:
            self._begin_pass()
            self._stamps = None
            return
        self._is_astray = True
        after_backward(self._refuse_pass)

    def _refuse_pass(self) -> None:
        """Raise on all ranks for a backward pass that DDP did not see."""
        self._is_astray = False
        error = RuntimeError(
            "gradients were computed in a backward pass that DistributedDataParallel did not see, and are not "
            "exchanged: expected the loss of a call ddp(x), and not of ddp.module(x) or a method of ddp.module. If "
            "they are not to be exchanged, use `with ddp.no_sync()`; handle.remove() ends all exchanges"
        )
        try:
            self.exchange.fail(error)
        except Exception as raised:
            raise_after_backward(raised)

    def _accumulate(self, _: torch.Tensor) -> None:
        """Begin a backward pass whose gradients only accumulate."""
        if not self._is_accumulating:
            self._is_accumulating = True
            after_backward(self._end_accumulation)

    def _end_accumulation(self) -> None:
        self._is_accumulating = False

    def _give_up(self, error: Exception) -> NoReturn:
        self.remove()
        super()._give_up(error)

    def _begin_at_outputs(self, _: torch.Tensor) -> None:
        """Begin a backward pass, in which no gradient of a parameter was computed yet."""
        if not self._in_pass:
            self._begin_pass()
            if self._own_error is not None and not self._finds_unused:
                self._give_up(self._own_error)  # DDP would wait for gradients

    def _begin_pass(self) -> None:
        """Begin a backward pass, and check the parameters: DDP waits for gradients of some of them."""
        super()._begin_pass()
        self._buckets = []
        self._stamps = _stamps(self._names)
        try:
            self._parameters.look()
            frozen = self._parameters.frozen()
            if not self._finds_unused and 0 < len(frozen) < len(self._names):
                raise ValueError(
                    f"{some(sorted(frozen))} is frozen, and DDP waits for its gradient: expected "
                    f"DistributedDataParallel(..., find_unused_parameters=True); {_ANEW}"
                )
            self._check_unchanged_model()
        except ValueError as error:
            self._own_error = error

    def _check_unchanged_model(self) -> None:
        """Raise ValueError for parameters in another memory format than at `attach`, and for another divisor."""
        moved = [
            name
            for (name, parameter), strides in zip(
                self._parameters.registered.items(), self._strides, strict=True
            )
            if parameter.stride() != strides
        ]
        if moved:
            raise _moved(moved)
        ddp = self._model()
        if ddp is not None and not divides_by_all_ranks(ddp):
            raise ValueError(
                "join(divide_by_initial_world_size=False) divides by the ranks that have not joined, and the exchange "
                "divides by all: expected divide_by_initial_world_size=True, the default"
            )

    def _end_pass(self) -> None:
        """End a backward pass after DDP has ended its own, which it queues later."""
        after_backward(self._conclude_pass)

    def _conclude_pass(self) -> None:
        """Raise the error of the step; or one which says that DDP still waits for gradients."""
        refused = self._own_error
        self._own_error = None
        if not self._has_ended:
            if refused is None and self._stamps != _stamps(self._names):
                refused = RuntimeError(
                    "DDP has exchanged no gradients in this backward pass: parameters were unused without "
                    "find_unused_parameters=True, their dtype was changed and changed back, it is the second pass "
                    "after one forward pass, or the loss is a gradient penalty alone (add 0 * output.sum() to it); "
                    f"{_ANEW}"
                )
            if refused is not None:
                self._give_up(refused)
        self._in_pass = False
        self._is_expected = self._is_expected and not self._has_ended
        raised = self._raised
        self._raised = None
        if raised is not None:
            raise_after_backward(raised)
        elif self._has_ended:
            self._drop_gradients()

    def _take(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of a bucket's gradients, and return a future for its means; the last one ends the step."""
        # An object that `tensors_in` does not look into may have had the outputs.
        if not self._in_pass:
            with suppress(RuntimeError):  # this rank has joined
                self._begin_pass()
        if not self._buckets:
            self._begin_step()
        parts = self._exchanged(
            zip(bucket.parameters(), bucket.gradients(), strict=True)
        )
        buffer = bucket.buffer()
        future = _future(buffer)
        self._buckets.append((future, buffer, parts))
        if self._scale != 1:
            self._multiply(buffer, parts, 1 / self._scale)
        if self._clip is None:
            self._start(parts, is_last=bucket.is_last())
        if bucket.is_last():
            self._complete()
        return future

    def _complete(self) -> None:
        """Wait for the means, and write them to DDP's buckets and to unused parameters."""
        buckets = self._buckets
        self._buckets = []
        if self._clip is not None:
            self._clip_gradient(buckets, self._clip)
        means: dict[str, Any] = {}
        factor = math.nan
        if self._in_pass:
            self._check_versions()
        if self._has_views:
            self._check_views(buckets)
        try:
            means, factor = self._end()
        # All ranks raise this error at the end of the pass, for which DDP needs its
        # futures.
        except Exception as error:
            self._raised = error
        for future, buffer, parts in buckets:
            if buffer.dtype == torch.bfloat16:
                for name, _, part in parts:
                    if name in means:
                        part.copy_(means[name])
            if factor != 1:
                self._multiply(buffer, parts, factor)
            if self._may_skip:
                self._set_unused(parts)
            future.set_result(buffer)
        if not self._in_pass:  # on a rank that has joined
            self._conclude_pass()

    def _check_views(self, buckets: list[_Bucket]) -> None:
        """Refuse the step if views of DDP have another memory format than the parameters."""
        for *_, parts in buckets:
            for name, parameter, part in parts:
                gradient = parameter.grad
                is_view = (
                    gradient is not None and gradient.data_ptr() == part.data_ptr()
                )
                strides = _in_layout_of(parameter, part).stride()
                if is_view and gradient.stride() != strides and not self._own_error:
                    self._own_error = _moved([name])

    def _set_unused(self, parts: Parts) -> None:
        """Set `.grad` of unused parameters: DDP drops their mean, which may contain residuals."""
        for _, parameter, part in parts:
            mean = _in_layout_of(parameter, part)
            gradient = parameter.grad
            if gradient is None and mean.any():
                parameter.grad = mean if self._has_views else mean.clone()
            elif gradient is not None and gradient.data_ptr() != mean.data_ptr():
                gradient.copy_(mean)

    def _clip_gradient(self, buckets: list[_Bucket], clip: float) -> None:
        """Scale this rank's gradient to a norm of at most clip / sqrt(P), and start the exchange.

        The bits do not depend on the buckets.
        """
        gradients = {name: part for *_, parts in buckets for name, _, part in parts}
        norms = [
            torch.linalg.vector_norm(gradients[name], dtype=torch.float64)
            for name in self._names.values()
            if name in gradients
        ]
        # The norms are copied to the host together.
        together = [norm.to(norms[0].device) for norm in norms]
        in_host_memory = torch.stack(together).tolist() if norms else []
        self.norm = norm = math.hypot(*in_host_memory)
        limit = clip / math.sqrt(self.exchange.comm.size)
        for _, buffer, parts in buckets:
            # A norm that is not finite is left for the exchange to find.
            if limit < norm < math.inf:
                self._multiply(buffer, parts, limit / norm)
            self._start(parts)

    def _multiply(self, buffer: torch.Tensor, parts: Parts, factor: float) -> None:
        """Multiply the gradients of a bucket, except those of frozen parameters."""
        gradients = [buffer]
        if self._held:
            gradients = [part for _, _, part in parts]
        for gradient in gradients:
            gradient.mul_(factor)


def _moved(names: list[str]) -> ValueError:
    """Return the error of parameters in another memory format than in DDP's buckets, whose order residuals have."""
    return ValueError(
        f"{some(names)} has another memory format than when DistributedDataParallel was made or attached, in whose "
        "order the exchange keeps residuals: expected model.to(memory_format=...) before DistributedDataParallel(model)"
    )


class _Notice:
    """The hook of a parameter: it notifies the handle of its DDP, while that lives, that a gradient was accumulated."""

    def __init__(self, handle: "weakref.ref[DDPHandle]") -> None:
        self._handle = handle

    def __call__(self, parameter: torch.Tensor) -> None:
        handle = self._handle()
        if handle is not None:
            handle.notice_gradient()


def _release(parameter: Any) -> None:
    """Remove the hooks of earlier DDP modules from a parameter: only the last one reports what it has seen."""
    hooks = gradient_hooks_of(parameter)
    for key in [key for key, hook in hooks.items() if isinstance(hook, _Notice)]:
        del hooks[key]


def _future(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a future for a bucket's means; torch refuses a result on a device that the future does not name."""
    devices = [buffer.device] if buffer.is_cuda else None
    return torch.futures.Future(devices=devices)


def _stamps(parameters: Iterable[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Return the addresses and versions of the `.grad` of some parameters, which change when one of them does."""
    gradients = [
        parameter.grad for parameter in parameters if parameter.grad is not None
    ]
    return [gradient.data_ptr() for gradient in gradients], versions_of(gradients)


def _check_ddp(model: Any) -> DistributedDataParallel:
    """Return the DDP module in a model; raise TypeError, ValueError or RuntimeError unless `attach` can take it."""
    check_launcher()
    wrapped = parts_of(model, DistributedDataParallel)
    if len(wrapped) != 1:
        raise TypeError(
            f"model is {type(model).__name__} with {len(wrapped)} modules in DistributedDataParallel: expected "
            "DistributedDataParallel(model), after init_process_group(comm); attach_fsdp is for FSDP2, and "
            "exchange(gradients, out=gradients) needs no wrapper"
        )
    ddp: DistributedDataParallel = wrapped[0]
    if any(isinstance(hook, DDPHandle) for hook in hooks_of(ddp)):
        raise ValueError(
            "the model is already attached: use the handle that attach has returned"
        )
    if uses_python_reducer(ddp):
        raise ValueError(
            "DistributedDataParallel was made with torch._dynamo.config.optimize_ddp = 'python_reducer', which calls "
            "no communication hook: set it to True before the model is wrapped"
        )
    if skips_unused(ddp):
        raise ValueError(
            "DistributedDataParallel was made with skip_all_reduce_unused_params=True, which does not exchange the "
            "residuals of unused parameters, and lets ranks wait for each other: expected False, the default"
        )
    if any(isinstance(hook, tuple) for hook in hooks_of(ddp)):
        raise ValueError(
            "the model has a communication hook, and DDP takes one only: attach to "
            "DistributedDataParallel(model.module), without mixed_precision="
        )
    for name, module in ddp.module.named_modules():
        if (
            isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
            and module.sparse
        ):
            raise TypeError(
                f"{name} is {type(module).__name__}(sparse=True), whose gradients are sparse tensors: expected "
                "sparse=False; the exchange sends few entries all the same"
            )
    _check_parameters(ddp)
    _check_outside(model, ddp)
    return ddp


def _check_outside(model: Any, ddp: DistributedDataParallel) -> None:
    """Raise ValueError for parameters of a model of which DDP has only a part: each rank would train them apart."""
    inside = {*ddp.parameters()}
    outside = [
        name for name, parameter in trainable(model).items() if parameter not in inside
    ]
    if outside:
        raise ValueError(
            f"{some(outside)} of the model is outside DistributedDataParallel, which does not exchange it: wrap the "
            "whole model, or attach to the module in DistributedDataParallel alone"
        )


def _check_parameters(ddp: DistributedDataParallel) -> None:
    """Raise TypeError or ValueError for parameters that cannot be exchanged."""
    inside = reduced_parameters(ddp)
    ignored = ddp.parameters_to_ignore
    parameters = {
        name: parameter
        for name, parameter in ddp.module.named_parameters()
        if name not in ignored
    }
    if late := [
        name
        for name, parameter in parameters.items()
        if parameter.requires_grad and parameter not in inside
    ]:
        raise ValueError(
            f"{some(late)} did not require a gradient when DistributedDataParallel was made, which does not exchange "
            "it: wrap the model after requires_grad_(True)"
        )
    if bad := [
        name
        for name, parameter in parameters.items()
        if parameter in inside and parameter.dtype not in _DTYPES
    ]:
        raise TypeError(
            f"{some(bad)} is {parameters[bad[0]].dtype}: expected real parameters, of float16, bfloat16, float32 or "
            "float64; of a complex one keep torch.view_as_real(...), and use torch.view_as_complex in forward"
        )
    if len({parameter.device for parameter in inside}) > 1:
        name, device = next(
            (name, parameter.device)
            for name, parameter in parameters.items()
            if parameter.device != ddp.device
        )
        raise ValueError(
            f"{name!r} is on {device}, and other parameters on {ddp.device}: expected one device for a rank; start a "
            "rank for each GPU"
        )


def _check_groups(groups: list[list[int]], ranks: list[int]) -> None:
    """Raise ValueError unless the process groups of all models are the ranks of the exchange."""
    if other := [group for group in groups if group != ranks]:
        raise ValueError(
            f"the model's process group has {named_ranks(other[0])}, and the exchange's communicator "
            f"{named_ranks(ranks)}: start with mpirun or srun, and call "
            "collectives.torch.init_process_group(comm), or give both the same ranks"
        )


def _in_layout_of(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return DDP's own view of a gradient in its bucket, given that of `GradBucket.gradients`.

    The latter has the parameter's shape in C order; DDP's has the strides of the
    parameter, unless that has gaps in memory.
    """
    strides = parameter.stride()
    has_gaps = torch.empty_like(parameter, device="meta").stride() != strides
    if has_gaps:
        return part
    return part.as_strided(parameter.size(), strides, part.storage_offset())
