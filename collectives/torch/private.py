"""All that this package uses of PyTorch and is not documented there, in one place.

tests/pytorch/test_private.py has a test for each function: a version that changes what
it relies on fails that test, by the name of the function.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors


def is_in_backward() -> bool:
    """Return whether this thread is in a backward pass."""
    return bool(torch._C._current_graph_task_id() >= 0)


def after_backward(call: Callable[[], None]) -> None:
    """Call a function at the end of the current backward pass; RuntimeError without one."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return for each tensor a number that a change of it in place increments."""
    return [tensor._version for tensor in tensors]


def gradient_hooks_of(parameter: torch.Tensor) -> dict[Any, Any]:
    """Return the hooks that run once a gradient was accumulated, by key; writable."""
    return parameter._post_accumulate_grad_hooks or {}


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Return the tensors in an output of a module, in those containers into which DDP looks."""
    return list(_find_tensors(output))


def active_ddp() -> "DistributedDataParallel | None":
    """Return the DDP module whose forward pass is under way."""
    return DistributedDataParallel._get_active_ddp_module()


def hooks_of(ddp: DistributedDataParallel) -> list[Any]:
    """Return DDP's list of its communication hooks, as (function, state), which it only checks for being empty."""
    hooks: list[Any] = ddp._comm_hooks
    return hooks


def uses_python_reducer(ddp: DistributedDataParallel) -> bool:
    """Return whether DDP reduces by compiled autograd, which calls no communication hook."""
    return bool(ddp._use_python_reducer)


def reduced_parameters(ddp: DistributedDataParallel) -> set[Any]:
    """Return the parameters whose gradients DDP reduces: those that required one when it was made."""
    return {
        parameter
        for bucket in ddp.reducer._get_zeros_like_grad_buckets()
        for parameter in bucket.parameters()
    }


def has_reducer(ddp: DistributedDataParallel) -> bool:
    """Return whether `drop_reducer` was not called."""
    return "reducer" in vars(ddp)


def drop_reducer(ddp: DistributedDataParallel) -> None:
    """Delete DDP's reducer, which hooks the parameters."""
    for name in ("reducer", "logger"):
        vars(ddp).pop(name, None)


def divides_by_all_ranks(ddp: DistributedDataParallel) -> bool:
    """Return whether means divide by the number of all ranks, also once some have joined."""
    return bool(getattr(ddp, "_divide_by_initial_world_size", True))


def skips_unused(ddp: DistributedDataParallel) -> bool:
    """Return whether DDP may pass over buckets without gradients; since PyTorch 2.14."""
    return bool(getattr(ddp, "skip_all_reduce_unused_params", False))


def forward_hooks_of(module: torch.nn.Module) -> list[Any]:
    """Return the forward hooks of a module."""
    return [*module._forward_hooks.values()]


def reduces_gradients(module: FSDPModule) -> bool:
    """Return whether FSDP2 reduces the gradients of a module; `set_requires_gradient_sync` sets it."""
    groups = getattr(module._get_fsdp_state(), "_fsdp_param_groups", ())
    return all(group.reduce_grads for group in groups)


def is_inner_fsdp(module: FSDPModule) -> bool:
    """Return whether a module was found to be a part of a larger FSDP2 model, in a forward pass of that."""
    return module._get_fsdp_state()._is_root is False
