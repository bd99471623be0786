"""PyTorch in one line: `attach(model, exchange)` for DistributedDataParallel, `attach_fsdp` for hybrid sharding.

The library itself does not import this package. `start`: torch.distributed over the
ranks of MPI; `ddp`, `fsdp`: the hooks of a wrapped model; `local_steps`: an `OuterLoop`
of a module; `common`: what they share. `python -m collectives.torch train.py` runs a
script that was written for torchrun.

Names are imported at their first use, so that the launcher does not import torch before
the script has set what torch reads at its import, such as OMP_NUM_THREADS.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collectives.torch.common import Handle, to_arrays, to_tensors
    from collectives.torch.ddp import DDPHandle, attach
    from collectives.torch.fsdp import FSDPHandle, attach_fsdp
    from collectives.torch.local_steps import outer_loop
    from collectives.torch.start import init_process_group

__all__ = [
    "DDPHandle",
    "FSDPHandle",
    "Handle",
    "attach",
    "attach_fsdp",
    "init_process_group",
    "outer_loop",
    "to_arrays",
    "to_tensors",
]

_FILES = {
    "DDPHandle": "ddp",
    "FSDPHandle": "fsdp",
    "Handle": "common",
    "attach": "ddp",
    "attach_fsdp": "fsdp",
    "init_process_group": "start",
    "outer_loop": "local_steps",
    "to_arrays": "common",
    "to_tensors": "common",
}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
