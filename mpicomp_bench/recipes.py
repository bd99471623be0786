"""The lines of Python of each method of `mpicomp explain --train`, for PyTorch: complete but for what is the user's.

That is `network`, the module; `learning_rate`, that of dense training; and for one node
alone `batches`, `loss_of` and `optimizer`.
"""

import re
from textwrap import fill

import mpicomp
from mpicomp_bench.methods import method

EXCHANGE = """\
import torch
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

from collectives import GradientExchange
from collectives.torch import attach, init_process_group
{imports}
comm = MPI.COMM_WORLD
init_process_group(comm)  # or torch's own, under python -m collectives.torch
model = DistributedDataParallel(network, bucket_cap_mb=4)
{exchange}
attach(model, exchange)
{optimiser}"""
LOCAL = """\
import torch
from mpi4py import MPI

from collectives import GradientExchange
from collectives.torch import outer_loop
{imports}
comm = MPI.COMM_WORLD
{exchange}
# the module without DistributedDataParallel, with the same parameters on all ranks
outer = outer_loop(network, exchange, {outer})
{optimiser}outer.step()  # after the optimiser's step
"""
ADAMW = "optimizer = torch.optim.AdamW(network.parameters(), {rate:g} * learning_rate)  # or yours\n"
MUON = """\
# the matrices of the layers: no embedding, and not the head
linear = [each for each in network.modules() if isinstance(each, torch.nn.Linear)]
head = linear[-1]  # the last one that the model made; where that is another layer, name yours
hidden = [each.weight for each in linear if each is not head]
others = [each for each in network.parameters() if all(each is not weight for weight in hidden)]
# learning_rate is that of dense Muon: try 2, 4 and 8 times AdamW's rate
# on a CPU without bfloat16 (see mpicomp info) take new_muon of examples/muon.py, which is faster there
muon = torch.optim.Muon(
    hidden, {rate:g} * learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
)
adamw = torch.optim.AdamW(others, {rate:g} * learning_rate)
"""
OF_SIGNS = """\
# in place of your optimiser, for signs: no momentum, no clip_grad_norm_
optimizer = torch.optim.SGD(model.parameters(), {rate:g} * learning_rate, weight_decay=0.01)
"""
DENSE = """\
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(network)  # as it is
"""
HOOK = """\
from torch.distributed.algorithms.ddp_comm_hooks import {module}
from torch.nn.parallel import DistributedDataParallel

{model}
{hook}
"""
OF_FP16 = {
    "module": "default_hooks",
    "model": "model = DistributedDataParallel(network, bucket_cap_mb=4)  # over NCCL take bf16_compress_hook",
}
OF_POWERSGD = {
    "module": "powerSGD_hook",
    "model": "model = DistributedDataParallel(network, bucket_cap_mb=1000)  # with several buckets it fails over gloo",
}
ALONE = """\
for batch in batches:  # of a step: those of all nodes
    (loss_of(network, batch) / len(batches)).backward()
optimizer.step()
optimizer.zero_grad()
"""


def recipe(name: str, rate: float, optimizer: str) -> str:
    """Return the lines of a method; rate: its learning rate over that of dense."""
    found = method(name)
    if not found.line:
        return DENSE
    if not found.line.startswith("GradientExchange"):
        hook = wrapped(f"model.register_comm_hook({found.line})")
        return HOOK.format(
            hook=hook, **(OF_POWERSGD if "powerSGD" in found.line else OF_FP16)
        )
    names = [each for each in mpicomp.__all__ if re.search(rf"\b{each}\b", found.line)]
    imports = f"from mpicomp import {', '.join(names)}\n" if names else ""
    usual = MUON if optimizer == "muon" else ADAMW
    optimiser = (OF_SIGNS if "sign" in found.line else usual).format(rate=rate)
    exchange = wrapped(f"exchange = {found.line}")
    template = LOCAL if found.outer else EXCHANGE
    return template.format(
        imports=imports, exchange=exchange, outer=found.outer, optimiser=optimiser
    )


def wrapped(line: str) -> str:
    """Return a statement in lines of at most 100 characters."""
    return fill(line, 100, subsequent_indent="    ", break_long_words=False)
