"""Train under PyTorch's DistributedDataParallel, with a communication hook in place of gloo's allreduce.

    mpirun -n 2 python -m mpi4py examples/torch_ddp_hook.py

DDP calls the hook with one bucket of gradients after the other while the backward pass goes on. The hook hands them to
one `GradientExchange` by the names of the parameters, so that residuals belong to parameters: DDP makes new buckets
after the first step, and nothing is lost. The futures of all buckets are completed in the last one.

* Unused parameters: with find_unused_parameters=True DDP hands zeros to the hook. Of a parameter that no rank used it
  throws the result away; but an entry of a residual may be sent in that step, so the hook writes to `.grad` itself.
* Uneven batches: inside `model.join()` a rank that has no batch left calls the hook with zeros, and gets the model of a
  rank that went on in the end. The mean is always over all ranks, as with join's divide_by_initial_world_size=True.

The network, the data and the exchange are those of torch_manual.py, and so is every bit of the result.

Needs torch and scikit-learn. It checks itself at the end and exits with status 1 when a check fails.
"""

import os
import sys
from contextlib import nullcontext

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns of the first step that leaves no parameter out

import torch
import torch.distributed as dist
import torch_manual as plain
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

from collectives import warm_up


class HookState:
    """What the hook keeps: the exchange, the names of the parameters, and what waits for the end of the step."""

    def __init__(self, model, exchange):
        self.exchange, self.views = exchange, model.gradient_as_bucket_view
        self.names = {parameter: name for name, parameter in model.module.named_parameters()}
        self.waiting = []  # (future, buffer, its part for each parameter)
        self.buckets = set()  # the parameters of each bucket so far, to see that they change

    def complete(self):
        """Wait for the means, which are then where DDP takes them from, and put them where it takes none."""
        self.exchange.finish()
        waiting, self.waiting = self.waiting, []
        for future, buffer, parts in waiting:
            for parameter, part in parts:
                if parameter.grad is not None:
                    parameter.grad.copy_(part)
                else:  # not used here; if on no rank, DDP leaves it None
                    parameter.grad = part if self.views else part.clone()
            future.set_result(buffer)


def exchange_hook(state, bucket):
    """Start the exchange of a bucket's gradients, and return a future for its means; the last one ends the step."""
    future, parts = torch.futures.Future(), [*zip(bucket.parameters(), bucket.gradients(), strict=True)]
    state.waiting.append((future, bucket.buffer(), parts))
    state.buckets.add(tuple(state.names[parameter] for parameter, _ in parts))
    for parameter, part in parts:
        state.exchange.start(state.names[parameter], part, out=part)
    if bucket.is_last():
        state.complete()
    return future


def init_process_group(comm):
    """Initialise torch.distributed with the ranks of MPI; rank 0 takes a free port and tells the others."""
    host = comm.bcast(MPI.Get_processor_name())
    server = dist.TCPStore(host, 0, comm.size, is_master=True, wait_for_workers=False) if comm.rank == 0 else None
    port = comm.bcast(server.port if server else None)
    store = server or dist.TCPStore(host, port, comm.size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)


def train(case, data, comm, steps):
    """Train from the same start as every other case; return the network, and the hook's state."""
    network = plain.new_network()
    settings = {"find_unused_parameters": case.skips, "gradient_as_bucket_view": case.uneven}  # both ways of each
    model = DistributedDataParallel(network, bucket_cap_mb=0.05, **settings)
    state = HookState(model, plain.new_exchange(network, comm))
    model.register_comm_hook(state, exchange_hook)
    optimizer = torch.optim.SGD(model.parameters(), plain.RATE)
    with model.join() if case.uneven else nullcontext():
        for step in range(case.batches(comm.rank, steps)):
            optimizer.zero_grad()
            plain.loss_of(model, data, case, comm, step).backward()
            optimizer.step()
    return network, state


def main():
    comm, steps = MPI.COMM_WORLD, plain.parse_arguments(__doc__).steps
    torch.set_num_threads(1)
    warm_up(comm)
    init_process_group(comm)
    (data, test), checks = plain.load(), []
    for case in plain.CASES:
        network, state = train(case, data, comm, steps)
        without, _ = plain.train(case, data, comm, steps)
        checks += plain.outcomes(case, network, test, comm)
        checks += [(f"{case.name}: the same bits as without DDP", plain.digest(network) == plain.digest(without))]
        if not case.skips:
            checks += [(f"{case.name}: DDP made new buckets after the first step", len(state.buckets) > 2)]
    dist.destroy_process_group()
    return plain.verdict(checks, comm)


if __name__ == "__main__":
    sys.exit(main())
