"""Steps of PyTorch on ranks that share a GPU: DistributedDataParallel, and local steps of Muon.

    mpirun -n 2 python -m mpi4py benchmarks/gpu_torch.py --json torch.json

A model of equal linear layers, 2.5e7 parameters unless --width and --layers say
otherwise; torch's own sums are Gloo's, because NCCL takes one rank for a GPU. A row has
the seconds of a step of the slowest rank, the median after two that are not measured,
the loss after the last step, and whether all ranks then have the same bits. Without a
GPU it runs on the host, small, so that the script is tested.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from mpi4py import MPI  # noqa: E402

from collectives import GradientExchange  # noqa: E402
from mpicomp import ChunkedTopK, Quantised, TopK  # noqa: E402

EVERY = 10  # local steps between two exchanges
Step = Callable[[], float]


def main() -> None:
    """Measure, and write the rows on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json")
    options = parser.parse_args()
    comm, rows = MPI.COMM_WORLD, list[dict[str, Any]]()
    for name, measure in methods(comm, options).items():
        rows.append({"name": name, "ranks": comm.size, **measure()})
        if comm.rank == 0:
            print(rows[-1], flush=True)
            if options.json:
                Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


def methods(comm: Any, options: Any) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the measurements by name; one that says so where PyTorch is missing."""
    if importlib.util.find_spec("torch") is None:
        return {"PyTorch": lambda: {"error": "not installed"}}
    few = Quantised(ChunkedTopK(k=16, chunk=4096), "two_bit")
    exchanges: dict[str, Callable[[], GradientExchange] | None] = {
        "DDP, Gloo's dense sum": None,
        "DDP, bits=4": lambda: GradientExchange(comm, bits=4),
        # with the row before: whether shorter buckets pay on a device
        "DDP, bits=4, buckets of 2^24 bytes": lambda: GradientExchange(
            comm, bits=4, bucket_nbytes=2**24
        ),
        "DDP, top-k 1 %": lambda: GradientExchange(comm, TopK(0.01)),
        "DDP, 16 of 4096, two bits": lambda: GradientExchange(comm, few),
    }
    from collectives.torch import init_process_group

    init_process_group(comm)
    found = {
        name: lambda make=make: measured(comm, options, ddp(comm, options, make))  # type: ignore[misc]
        for name, make in exchanges.items()
    }
    return found | {
        f"local steps of Muon, bits=4, every {EVERY}": lambda: measured(
            comm, options, local_steps(comm, options)
        )
    }


def network(options: Any) -> Any:
    """Return the same model on all ranks, on the GPU if there is one."""
    import torch

    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(options.width, options.width) for _ in range(options.layers)
    ]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.nn.Sequential(*layers).to(device)


def backward(model: Any, width: int, rank: int) -> float:
    """Compute the gradient of a batch of this rank, and return its loss."""
    import torch

    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(rank)
    inputs = torch.randn(32, width, generator=generator, device=device)
    model.zero_grad()
    loss = (model(inputs) - inputs).square().mean()
    loss.backward()
    return float(loss.detach())


def ddp(comm: Any, options: Any, make: Any) -> tuple[Any, Step]:
    """Return a model under DDP, and its step, by an exchange or torch's own sum."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from collectives.torch import attach

    model = DistributedDataParallel(network(options))
    if make is not None:
        attach(model, make())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step() -> float:
        loss = backward(model, options.width, comm.rank)
        optimizer.step()
        return loss

    return model, step


def local_steps(comm: Any, options: Any) -> tuple[Any, Step]:
    """Return a plain model and its local step of Muon, with the exchange of every tenth."""
    import torch

    from collectives.torch import outer_loop

    model = network(options)
    hidden = [each for each in model.parameters() if each.ndim == 2]
    others = [each for each in model.parameters() if each.ndim < 2]
    optimizers = torch.optim.Muon(hidden, 1e-3), torch.optim.AdamW(others, 1e-3)
    outer = outer_loop(model, GradientExchange(comm, bits=4), every=EVERY)

    def step() -> float:
        loss = backward(model, options.width, comm.rank)
        for optimizer in optimizers:
            optimizer.step()
        outer.step()
        return loss

    return model, step


def measured(comm: Any, options: Any, trained: tuple[Any, Step]) -> dict[str, Any]:
    """Return the seconds of a step, the mean loss after the last, and whether all ranks have the same bits."""
    model, step = trained
    times, count = list[float](), max(EVERY, options.steps // EVERY * EVERY)
    for _ in range(count):
        comm.Barrier()
        began = perf_counter()
        loss = step()
        finish(model)
        times.append(comm.allreduce(perf_counter() - began, MPI.MAX))
    bits = [each.detach().cpu().numpy().tobytes() for each in model.parameters()]
    return {
        "parameters": sum(each.numel() for each in model.parameters()),
        "seconds": statistics.median(times[2:]),
        "mean_seconds": statistics.mean(times[2:]),
        "loss": comm.allreduce(loss) / comm.size,
        "same_bits": len(set(comm.allgather(zlib.crc32(b"".join(bits))))) == 1,
    }


def finish(model: Any) -> None:
    """Wait for what a step has started on the GPU."""
    import torch

    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
