"""The lines of Python of each method of `mpicomp explain --train`, for PyTorch: complete but for what is the user's.

That is `network`, the module; `learning_rate`, that of dense training with AdamW; and for one node alone `batches`,
`loss_of` and `optimizer`. `{rate}`, `{every}` and `{bits}` stand for the method's learning rate over that of dense, for
the steps between exchanges and for the bits of a value.
"""

IMPORTS = """\
import torch
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

from collectives import GradientExchange
from collectives.torch import attach, init_process_group
"""
MODEL = """
comm = MPI.COMM_WORLD
init_process_group(comm)  # or torch's own, under python -m collectives.torch
model = DistributedDataParallel(network)
"""
ADAMW = """\
optimizer = torch.optim.AdamW(model.parameters(), {rate:g} * learning_rate)  # or yours
"""
IN_BASIS = f"""\
{IMPORTS}from mpicomp import ChunkedTopK, ErrorFeedback, Hadamard, Quantised
{MODEL}
compressor = Quantised(ChunkedTopK(k=8, chunk=256), "two_bit")
feedback = ErrorFeedback(decay=0.999)
attach(model, GradientExchange(comm, compressor, feedback, basis=Hadamard(chunk=256), average="sign"))
# in place of your optimiser, for signs: no momentum, no clip_grad_norm_
optimizer = torch.optim.SGD(model.parameters(), {{rate:g}} * learning_rate, weight_decay=0.01)
"""
FEW_BITS = f"""\
{IMPORTS}{MODEL}
attach(model, GradientExchange(comm, bits={{bits}}))
{ADAMW}"""
TOPK = f"""\
{IMPORTS}from mpicomp import TopK
{MODEL}
attach(model, GradientExchange(comm, TopK(density=0.01)))
{ADAMW}"""
OF_LOCAL = """\
import torch
from mpi4py import MPI

from collectives import GradientExchange
from collectives.torch import outer_loop
"""
ROUNDS = """\
# the module without DistributedDataParallel, with the same parameters on all ranks
outer = outer_loop(network, exchange, every={every})
optimizer = torch.optim.AdamW(network.parameters(), {rate:g} * learning_rate)  # or yours
outer.step()  # after each optimizer.step()
"""
LOCAL = f"""\
{OF_LOCAL}from mpicomp import ChunkedTopK, ErrorFeedback, Quantised

comm = MPI.COMM_WORLD
compressor = Quantised(ChunkedTopK(k=128, chunk=4096), "two_bit")
exchange = GradientExchange(comm, compressor, ErrorFeedback(decay=0.95), average="contributors")
{ROUNDS}"""
LOCAL_BITS = f"""\
{OF_LOCAL}
comm = MPI.COMM_WORLD
exchange = GradientExchange(comm, bits=4)
{ROUNDS}"""
DENSE = """\
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(network)  # as it is
"""
SIXTEEN = f"""\
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
{DENSE}model.register_comm_hook(None, default_hooks.fp16_compress_hook)  # over NCCL bf16_compress_hook
"""
POWERSGD = """\
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(network, bucket_cap_mb=1000)  # one bucket: with several the hook fails over gloo
state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=2)
model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
"""
ALONE = """\
for batch in batches:  # of a step: those of all nodes
    (loss_of(network, batch) / len(batches)).backward()
optimizer.step()
optimizer.zero_grad()
"""
