"""One training, and the trainings of a row: starts and batches depend on the seed alone, the same for all methods."""

import argparse
from time import perf_counter
from typing import Any

import numpy as np

from collectives import traffic
from mpicomp import CollectiveError
from mpicomp_bench.measuring import Progress, Row, progress
from mpicomp_bench.train.methods import MOMENTUM, Descent, LocalDescent, Method
from mpicomp_bench.train.network import Floats, Network
from mpicomp_bench.train.tasks import Task

TUNING_SEED = 1_000_000  # never one of those that are shown
LATENCY = 50e-6  # seconds that a message takes beside its bytes: TCP over Ethernet
NETWORKS = (1e9, 1e10)  # bits per second of the simulated times
POINTS = 25  # of a curve


def trained(
    task: Task, method: Method, density: float | None, every: int | None, options: argparse.Namespace, comm: Any
) -> Row:
    """Train one method at one density on all ranks, once for each seed, and return the row, the same on all ranks.

    every: of a method with local steps, how many there are between two exchanges.

    Of several rates it takes the one with the least loss on the validation part, after a training without that part
    from a seed of its own. The trainings that count then have the validation part as well. options: rate, seeds, steps
    and batch of a rank. tried: the validation loss of each rate, in nats. network_seconds: of the busiest rank's
    messages of a step, a latency each and the bits over the rate.
    """
    tuned = len(options.rate) > 1
    steps = (options.seeds + tuned * len(options.rate)) * options.steps
    with progress(0 if comm.rank else steps) as done:

        def outcome(rate: float, seed: int, held_out: str) -> Row:
            terms = comm, method, density or 1.0, rate, MOMENTUM
            descent = LocalDescent(*terms, every) if every else Descent(*terms)
            about = f"{method.name} {density or ''} at {rate:g}"
            return train(task, descent, seed, held_out, options, lambda figure: done(f"{about}: {figure}"))

        tried = {rate: outcome(rate, TUNING_SEED, "validation")["loss"] for rate in options.rate} if tuned else {}
        rate = min(tried, key=lambda rate: tried[rate]) if tried else options.rate[0]
        trainings = [outcome(rate, seed, "test") for seed in range(options.seeds)]
    fields = "figure", "loss", "messages", "nbytes", "sent", "seconds", "exchange_seconds"
    means = {name: float(np.mean([each[name] for each in trainings])) for name in fields}
    spread = 0.0
    if options.seeds > 1:
        finals = [each["figure"] for each in trainings]
        spread = float(np.std(finals, ddof=1)) if np.isfinite(finals).all() else np.nan
    simulated = {f"{bits:g}": means["messages"] * LATENCY + 8 * means["nbytes"] / bits for bits in NETWORKS}
    about = {
        **method._asdict(),
        "density": density,
        "every": every,
        "rate": rate,
        "tried": {f"{each:g}": tried[each] for each in tried},
    }
    return {**about, **means, "spread": spread, "network_seconds": simulated, "trainings": trainings}


def train(
    task: Task, descent: Descent | LocalDescent, seed: int, held_out: str, options: argparse.Namespace, done: Progress
) -> Row:
    """Train on all ranks, and return the outcome, the same on all of them.

    held_out: "test" or "validation". done: called after every step with the last figure. The outcome: figure, of the
    held-out part, as the task counts; loss there, in nats; curve, of (step, figure); messages and nbytes that the
    busiest rank sends a step; sent, the mean share of the entries; seconds, the median step of the slowest rank, and
    exchange_seconds, its part from gradient to update; diverged: numbers left the range, and the training ended there.
    """
    comm, network = descent.comm, Network(task.sizes, seed)
    shard = task.training(held_out)[comm.rank :: comm.size]
    batches, before = np.random.default_rng([seed, comm.rank]), traffic(comm)
    curve: list[tuple[int, float]] = []
    times: list[tuple[float, float]] = []
    shares: list[float] = []
    loss, step, interval, diverged = np.inf, 0, -(-options.steps // POINTS), False
    while True:
        if comm.rank == 0 and (step % interval == 0 or step == options.steps or diverged):
            loss, correct = network.evaluate(*task.held_out(held_out), at=descent.common(network.parameters))
            curve.append((step, task.figure_of(loss, correct)))
        if diverged or step == options.steps:
            break
        began = perf_counter()
        inputs, labels = task.examples(shard[batches.integers(shard.size, size=options.batch)])
        with np.errstate(over="ignore", invalid="ignore"):  # `updated` looks at them
            gradient = network.gradient(inputs, labels, descent.point(network.parameters))
            computed = perf_counter()
            diverged = not updated(network, descent, gradient)
        if not diverged:
            step += 1
            times.append((perf_counter() - began, perf_counter() - computed))
            shares += [sent] if (sent := descent.sent) is not None else []
        done(f"{curve[-1][1]:.2f}" if curve else "")
    now, (loss, curve) = traffic(comm), comm.bcast((loss, curve))
    counted = [now.messages - before.messages, now.nbytes - before.nbytes]
    medians = np.median(times or [(0.0, 0.0)], axis=0)
    most = np.max(comm.allgather([*(each / max(1, step) for each in counted), *medians]), axis=0).tolist()
    return {
        "figure": curve[-1][1],
        "loss": loss,
        "curve": curve,
        **dict(zip(("messages", "nbytes", "seconds", "exchange_seconds"), most, strict=True)),
        "sent": float(np.mean(comm.allgather(np.mean(shares or [0.0])))),
        "diverged": diverged,
    }


def updated(network: Network, descent: Descent | LocalDescent, gradient: Floats) -> bool:
    """Update the parameters; return False where numbers left the range, of gradients or of parameters.

    An exchange refuses what is not finite on all ranks: so they can ask each other.
    """
    try:
        descent.step(network.parameters, gradient)
    except OverflowError:  # the sum, which all ranks have
        return False
    except (ValueError, CollectiveError):
        finite = bool(np.isfinite(gradient).all() and np.isfinite(network.parameters).all())
        if all(descent.comm.allgather(finite)):
            raise
        return False
    return True
