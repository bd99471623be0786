"""How much of the messages of a step is hidden behind its computation, over links of several rates.

    sudo python benchmarks/overlap.py --json docs/results/overlap.json    # 15 minutes; then benchmarks/doc_tables.py

Hosts of benchmarks/testbed, one rank each, make steps of 12 tensors of 10^6 float32. The
computation before each gradient is a sleep, as of a GPU or of other cores: it leaves the
core to messages. With PyTorch installed, the same steps also run in the backward pass of
DistributedDataParallel. Of each method these are measured:

    alone       a step without computation: coding and messages
    unlimited   the same over a link without a limit: coding
    coded       a step with the computation over a link without a limit
    step        with the computation
    inside      the same where messages move inside calls only (MPICOMP_PROGRESS=0)

The messages take `alone - unlimited`, computation and coding take `coded`; at best a step
takes the longer of the two.

Rounds of local steps follow, at 20 Mbit/s, with and without a delay.
"""

import argparse
import importlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from rendering import table

TESTBED = pathlib.Path(__file__).parent / "testbed" / "testbed.py"
MARK = "overlap: "  # of a line that a rank prints for this program
TENSORS = 12
LENGTH = 1_000_000  # of a tensor
SLEEPS = {"100mbit": 0.05, "1gbit": 0.005}  # seconds before each gradient
UNLIMITED = "40gbit"
NOTABLE = 0.01  # seconds of messages that are compared
NAMES = {"20mbit": "20 Mbit/s", "100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}
OURS = {
    "bits=4": {"bits": 4},
    "bits=8": {"bits": 8},
    "TopK(0.01)": {"density": 0.01},
}
THEIRS = "DDP's dense sum", "DDP's fp16 hook"  # by gloo
ROUNDS = [  # parameters, seconds of a local step, of which a round has 10, and delay
    (3.2e6, 0.35, 0),
    (3.2e6, 0.35, 1),
    (3.2e6, 0.35, 4),
    (8e5, 0.35, 0),
    (8e5, 0.35, 1),
]
EVERY = 10
OF_ROUNDS = "20mbit"


# on each rank


def median_of(comm: Any, repeats: int, call: Callable[[], Any], warm: int = 2) -> float:
    """Return the median of the seconds of a call on the slowest rank."""
    times = []
    for _ in range(warm + repeats):
        comm.Barrier()
        began = time.perf_counter()
        call()
        times.append(max(comm.allgather(time.perf_counter() - began)))
    return float(np.median(times[warm:]))


def exchange_of(comm: Any, density: float | None = None, **settings: Any) -> Any:
    """Return a new exchange with one of the settings of `OURS`."""
    from collectives import GradientExchange
    from mpicomp import TopK

    compressor = None if density is None else TopK(density=density)
    return GradientExchange(comm, compressor, **settings)


def gradient(comm: Any, number: int) -> Any:
    """Return the gradient of a tensor on this rank."""
    rng = np.random.default_rng([comm.rank, number])
    return rng.standard_normal(LENGTH, np.float32)


def started(comm: Any, method: str) -> Callable[[float], None]:
    """Return a step that starts each tensor after a sleep, as a backward pass computes them."""
    exchange = exchange_of(comm, **OURS[method])
    gradients = {str(number): gradient(comm, number) for number in range(TENSORS)}
    means = {name: np.empty_like(array) for name, array in gradients.items()}
    exchange.register(gradients)

    def step(seconds: float) -> None:
        for name, array in gradients.items():
            time.sleep(seconds)
            exchange.start(name, array, out=means[name])
        exchange.finish()

    return step


def in_ddp(comm: Any, method: str) -> Callable[[float], None]:
    """Return a step that is a pass of DistributedDataParallel, each layer of which sleeps in its backward pass."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
        fp16_compress_hook,
    )
    from torch.nn.parallel import DistributedDataParallel

    from collectives.torch import attach

    class Given(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any, weight: Any, layer: Any) -> Any:
            ctx.layer = layer
            return value * 1.0

        @staticmethod
        def backward(ctx: Any, upstream: Any) -> Any:
            time.sleep(ctx.layer.seconds)
            return upstream, ctx.layer.gradient, None

    class Layer(torch.nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(LENGTH))
            self.gradient = torch.from_numpy(gradient(comm, number))
            self.seconds = 0.0

        def forward(self, value: Any) -> Any:
            return Given.apply(value, self.weight, self)

    network = torch.nn.Sequential(*map(Layer, range(TENSORS)))
    model = DistributedDataParallel(
        network, bucket_cap_mb=4, gradient_as_bucket_view=True
    )
    if method in OURS:
        attach(model, exchange_of(comm, **OURS[method]))
    elif method == "DDP's fp16 hook":
        model.register_comm_hook(None, fp16_compress_hook)

    def step(seconds: float) -> None:
        for layer in network:
            layer.seconds = seconds
        for parameter in network.parameters():
            parameter.grad = None
        model(torch.ones(1, requires_grad=True)).sum().backward()

    return step


def steps(comm: Any, through: str, seconds: float, repeats: int) -> Iterator[Any]:
    """Yield method, seconds of a step without computation, and with sleeps of so many seconds."""
    make: Callable[[Any, str], Callable[[float], None]] = started
    methods = [*OURS]
    if through == "DDP":
        import torch

        from collectives.torch import init_process_group

        torch.set_num_threads(1)
        init_process_group(comm)
        make = in_ddp
        if os.environ["MPICOMP_PROGRESS"] == "1":  # it changes nothing in theirs
            methods += THEIRS
    for method in methods:
        step = make(comm, method)
        alone, whole = (
            median_of(comm, repeats, partial(step, sleep)) for sleep in (0.0, seconds)
        )
        yield {"method": method, "alone": alone, "step": whole}


def rounds(comm: Any, repeats: int) -> Iterator[Any]:
    """Yield the settings of rounds of local steps, and the seconds of a round and of its local steps."""
    from collectives import OuterLoop

    for parameters, seconds, delay in ROUNDS:
        size = int(parameters) // TENSORS
        model = {str(i): np.zeros(size, np.float32) for i in range(TENSORS)}
        update = [gradient(comm, i)[:size] for i in range(TENSORS)]
        loop = OuterLoop(exchange_of(comm, bits=4), model, every=EVERY, delay=delay)

        def local_step(
            model: Any = model, update: Any = update, s: float = seconds
        ) -> None:
            time.sleep(s)
            for array, change in zip(model.values(), update, strict=True):
                array -= 1e-3 * change

        def local(count: int, local_step: Any = local_step) -> None:
            for _ in range(count):
                local_step()

        def whole(count: int, loop: Any = loop, local_step: Any = local_step) -> None:
            for _ in range(count):
                local_step()
                loop.step()

        whole(EVERY + delay)
        steps = repeats * EVERY  # without a barrier, which would wait for messages
        yield {
            "parameters": parameters,
            "step": seconds,
            "delay": delay,
            "local": median_of(comm, 1, partial(local, EVERY), warm=0),
            "round": median_of(comm, 1, partial(whole, steps), warm=0) / repeats,
        }


def run_rank(options: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 prints a line for the program that has started it."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    found = (
        rounds(comm, options.repeats)
        if options.through == "rounds"
        else steps(comm, options.through, options.seconds, options.repeats)
    )
    for row in found:
        if comm.rank == 0:
            print(MARK + json.dumps(row), flush=True)
    if options.through == "DDP":
        importlib.import_module("torch.distributed").destroy_process_group()


# the program


def on_testbed(*arguments: str, progress: bool = True) -> str:
    """Call the testbed and return what it prints."""
    done = subprocess.run(
        [sys.executable, TESTBED, "--name", "overlap", *arguments],
        env={**os.environ, "MPICOMP_PROGRESS": str(int(progress))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def measured(
    hosts: int, rate: str, runs: Sequence[tuple[str, float, bool]], repeats: int
) -> list[list[dict[str, Any]]]:
    """Return the rows of runs on so many hosts: way of a step, seconds of a sleep, whether messages move meanwhile."""
    on_testbed("up", str(hosts), rate)
    try:
        found = []
        for through, seconds, progress in runs:
            command = [
                sys.executable,
                "-m",
                "mpi4py",
                str(pathlib.Path(__file__).resolve()),
            ]
            options = ["--rank", "--through", through, "--seconds", str(seconds)]
            printed = on_testbed(
                "run",
                *("--", "-x", "MPICOMP_PROGRESS", "-x", "PYTHONPATH"),
                *command,
                *options,
                *("--repeats", str(repeats)),
                progress=progress,
            )
            lines = printed.splitlines()
            found.append(
                [
                    json.loads(line.removeprefix(MARK))
                    for line in lines
                    if line.startswith(MARK)
                ]
            )
        return found
    finally:
        on_testbed("down")


def rows_of_steps(
    hosts: int, rate: str, through: str, repeats: int
) -> list[dict[str, Any]]:
    """Return the rows of steps on so many hosts, with links of a rate, whose tensors are started in one way."""
    seconds = SLEEPS[rate]
    (free,) = measured(hosts, UNLIMITED, [(through, seconds, True)], repeats)
    ways = [(through, seconds, progress) for progress in (True, False)]
    on, off = measured(hosts, rate, ways, repeats)
    inside = {row["method"]: row for row in (*on, *off)}
    return [
        {
            "hosts": hosts,
            "rate": rate,
            "through": through,
            **row,
            "computation": TENSORS * seconds,
            "unlimited": unlimited["alone"],
            "coded": unlimited["step"],
            "alone_inside": inside[row["method"]]["alone"],
            "inside": inside[row["method"]]["step"],
        }
        for unlimited, row in zip(free, on, strict=True)
    ]


def place(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the place of a row among the others: hosts, rate and way."""
    return row["hosts"], [*SLEEPS].index(row["rate"]), row["through"] != "DDP"


def shown(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of steps."""
    heads = (
        "hosts, link; step",
        "messages alone, ms",
        "computation and coding",
        "step",
        "more than the longer one",
        "in shares of the shorter one",
        "messages inside calls only",
    )
    lines = []
    for row in rows:
        messages, hidden = parts(row)
        more = row["step"] - max(messages, row["coded"])
        lines.append(
            [
                f"{row['hosts']}, {NAMES[row['rate']]}; {named(row)}",
                *milliseconds(messages, row["coded"], row["step"], more),
                f"{more / hidden:.2f}" if hidden > NOTABLE else "",
                *milliseconds(row["inside"]),
            ]
        )
    return table(heads, lines)


def parts(row: dict[str, Any]) -> tuple[float, float]:
    """Return the seconds of the messages alone, and of what is shorter, they or computation and coding."""
    messages = max(1e-3, row["alone"] - row["unlimited"])
    return messages, min(messages, row["coded"])


def named(row: dict[str, Any]) -> str:
    """Return the method of a row, and how its tensors are started."""
    method = row["method"]
    if method not in OURS:
        return str(method)
    return f"`{method}`, DDP" if row["through"] == "DDP" else f"`{method}`"


def milliseconds(*seconds: float) -> list[str]:
    """Return times as text."""
    return [f"{1e3 * each:,.0f}" for each in seconds]


def shown_short(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of passes of DDP on two hosts at 100 Mbit/s."""
    heads = "pass", "messages alone, ms", "computation and coding", "together"
    lines = [
        [
            row["method"] if row["method"] in THEIRS else f"`{row['method']}`",
            *milliseconds(parts(row)[0], row["coded"], row["step"]),
        ]
        for row in rows
        if (row["hosts"], row["rate"], row["through"]) == (2, "100mbit", "DDP")
    ]
    return table(heads, lines)


def shown_rounds(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of rounds of local steps."""
    heads = (
        "parameters",
        "`delay`",
        "local steps, s",
        "round, s",
        "round to local steps",
    )
    lines = [
        [
            f"{row['parameters']:.2g}",
            str(row["delay"]),
            f"{row['local']:.2f}",
            f"{row['round']:.2f}",
            f"{row['round'] / row['local']:.2f}",
        ]
        for row in rows
    ]
    return table(heads, lines)


def parsed() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ways = ["start", "DDP"] if importlib.util.find_spec("torch") else ["start"]
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=[*SLEEPS], choices=SLEEPS)
    parser.add_argument("--through", nargs="+", default=ways)
    parser.add_argument(
        "--repeats", type=int, default=5, help="steps, rounds (%(default)s)"
    )
    parser.add_argument(
        "--parts", nargs="+", default=["steps", "rounds"], choices=["steps", "rounds"]
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        (options.through,) = options.through
    return options


def main() -> None:
    """Measure, print, and write the rows to the file of results, in place of those of the same places."""
    options = parsed()
    if options.rank:
        run_rank(options)
        return
    results: dict[str, Any] = {"steps": [], "rounds": []}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())

    def keep() -> None:
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")

    if "steps" in options.parts:
        for about in product(options.hosts, options.rates, options.through):
            rows = rows_of_steps(*about, options.repeats)
            others = [row for row in results["steps"] if place(row) != place(rows[0])]
            results["steps"] = sorted([*others, *rows], key=place)
            keep()
        print("\n".join(shown(results["steps"])))
    if "rounds" in options.parts:
        runs = [("rounds", 0.0, True)]
        (results["rounds"],) = measured(2, OF_ROUNDS, runs, options.repeats)
        keep()
        print("\n".join(shown_rounds(results["rounds"])))


if __name__ == "__main__":
    main()
