"""PyTorch in one line: `attach(model, exchange)` for DistributedDataParallel, `attach_fsdp` for hybrid sharding.

The library itself does not import this package. `start`: torch.distributed over the ranks of MPI; `ddp`, `fsdp`: the
hooks of a wrapped model; `local_steps`: an `OuterLoop` of a module; `common`: what they share.
"""

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
