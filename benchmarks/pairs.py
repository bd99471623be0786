"""Small calls of two source trees in interleaved pairs: how many times as long one takes as the other.

    python benchmarks/pairs.py ../before .                     # --help for the options
    python benchmarks/pairs.py ../before . --ranks 1 --hook    # DDP's hook as well, where PyTorch is installed
    python benchmarks/pairs.py ../before . --rounds --calls 5  # rounds of local steps instead, of few and of 1e6 values
    python benchmarks/pairs.py . . --old MPICOMP_PROGRESS=0    # one tree in two environments

Each pair is one process of a tree beside one of the other (on P ranks, P of each), the
first of them in turns; within it, each call is repeated in batches. A time is the lower
quartile of the batches on rank 0. The rows have the ratio of the new tree to the old
one in CPU time of the process and in wall time: the median of the pairs with its
quartiles, and the ratio of the medians. Run it on an idle machine; a tree compiles its
kernels to a cache of its own before the first pair.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

HEADER = (
    "| call | ranks | CPU, us | new | pairs | quartiles | medians | wall, us | new | pairs | quartiles | medians |\n"
    "|" + " --- |" * 12
)


def timed_calls(options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Return the calls that are timed, on this rank."""
    if options.rounds:
        return rounds()
    return small_calls() | (
        {"backward pass, DDP's hook": backward_pass()} if options.hook else {}
    )


def small_calls() -> dict[str, Callable[[], Any]]:
    """Return exchanges and sums of few values."""
    import numpy as np
    from mpi4py import MPI

    from collectives import (
        GradientExchange,
        gtopk_allreduce,
        sparse_allgather,
        sparse_allreduce,
    )
    from mpicomp import TopK

    comm = MPI.COMM_WORLD
    rng = np.random.default_rng(comm.rank)
    gradient = rng.standard_normal(100, np.float32)
    tensors = {f"tensor {i}": rng.standard_normal(25, np.float32) for i in range(4)}
    vector = TopK(k=100).compress(rng.standard_normal(10_000, np.float32))
    one = GradientExchange(comm, TopK(k=5))
    named = GradientExchange(comm, TopK(k=5), small=0)
    dense = GradientExchange(comm, TopK(k=5))
    started = GradientExchange(comm, TopK(k=5), small=0)
    started.register(tensors)

    def start_and_finish() -> None:
        for name, array in tensors.items():
            started.start(name, array, out=array)
        started.finish()

    return {
        "exchange of 100 values": lambda: one(gradient),
        "of a dict, 4 tensors": lambda: named(tensors),
        "of a dict, small and dense": lambda: dense(tensors),
        "start and finish, 4 tensors": start_and_finish,
        "sparse_allreduce of 100": lambda: sparse_allreduce(vector, comm),
        "sparse_allgather of 100": lambda: sparse_allgather(vector, comm),
        "gtopk_allreduce of 100": lambda: gtopk_allreduce(vector, comm, k=100),
    }


def rounds() -> dict[str, Callable[[], Any]]:
    """Return rounds of local steps, each after a step that changes one value."""
    import numpy as np
    from mpi4py import MPI

    from collectives import GradientExchange, OuterLoop

    def round_of(length: int) -> Callable[[], Any]:
        parameters = np.ones(length, np.float32)
        exchange = GradientExchange(MPI.COMM_WORLD, bits=4)
        loop = OuterLoop(exchange, {"weight": parameters}, every=1)

        def step() -> None:
            parameters[0] += 1
            loop.step()

        return step

    return {f"round of {length} values": round_of(length) for length in (100, 10**6)}


def backward_pass() -> Callable[[], Any]:
    """Return a backward pass of a model in DDP that an exchange is attached to."""
    import torch
    from mpi4py import MPI

    from collectives import GradientExchange
    from collectives.torch import attach, init_process_group
    from mpicomp import TopK

    torch.set_num_threads(1)
    init_process_group(MPI.COMM_WORLD)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(9, 10))
    attach(model, GradientExchange(MPI.COMM_WORLD, TopK(k=5), small=0))
    batch = torch.ones(1, 9)
    return lambda: model(batch).sum().backward()


def times(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the CPU and the wall time of each call, in us."""
    found = {}
    batches = options.batches
    calls = options.calls
    for name, call in timed_calls(options).items():
        for _ in range(2 * calls):
            call()
        taken = []
        for _ in range(batches):
            cpu = time.process_time()
            wall = time.perf_counter()
            for _ in range(calls):
                call()
            taken.append((time.process_time() - cpu, time.perf_counter() - wall))
        found[name] = [
            1e6 * sorted(column)[batches // 4] / calls
            for column in zip(*taken, strict=True)
        ]
    return found


def times_of(
    tree: pathlib.Path, variables: list[str], ranks: int, options: list[str]
) -> Any:
    """Run the calls with the sources of a tree, on some ranks; return their times on rank 0.

    variables: of the environment, as NAME=VALUE.
    """
    command = [sys.executable, "-m", "mpi4py", __file__, "--one", *options]
    if ranks > 1:
        command = ["mpirun", "-n", str(ranks), *command]
    cache = tree / "build" / "pairs"
    environment = {"PYTHONPATH": str(tree), "NUMBA_CACHE_DIR": str(cache)}
    environment |= dict(variable.split("=", 1) for variable in variables)
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def row(old: list[float], new: list[float]) -> str:
    """Return the columns of a clock: times of both trees, the ratios of the pairs, and that of the medians."""
    ratios = [after / before for before, after in zip(old, new, strict=True)]
    low, middle, high = statistics.quantiles(ratios, method="inclusive")
    before = statistics.median(old)
    after = statistics.median(new)
    return f"{before:.1f} | {after:.1f} | {middle:.3f} | {low:.3f} to {high:.3f} | {after / before:.3f}"


def main() -> None:
    """Run the pairs and print their rows; with --one the calls of one tree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", nargs="*", type=pathlib.Path, help="old and new")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--calls", type=int, default=50, help="in a batch")
    parser.add_argument("--hook", action="store_true", help="DDP's hook as well")
    parser.add_argument("--rounds", action="store_true", help="of local steps instead")
    parser.add_argument("--old", nargs="+", default=[], help="its NAME=VALUE variables")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        from mpi4py import MPI

        found = times(asked)
        if MPI.COMM_WORLD.rank == 0:
            print(json.dumps(found), flush=True)
        return
    trees = [tree.resolve() for tree in asked.trees]
    sides = [*zip(trees, (asked.old, []), strict=True)]
    options = [f"--batches={asked.batches}", f"--calls={asked.calls}"]
    options += [f"--{name}" for name in ("hook", "rounds") if vars(asked)[name]]
    print(HEADER)
    for ranks in asked.ranks:
        found: list[list[Any]] = [[], []]  # old and new
        for side in sides:
            times_of(*side, ranks, ["--batches=1", "--calls=1", *options[2:]])
        for number in range(asked.pairs):
            for at in (0, 1) if number % 2 else (1, 0):
                found[at].append(times_of(*sides[at], ranks, options))
        for name in found[0][0]:
            columns = [
                row(*([run[name][clock] for run in runs] for runs in found))
                for clock in (0, 1)
            ]
            print(f"| {name} | {ranks} | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
