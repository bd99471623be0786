"""One training, and the trainings of a row: initial values and batches depend only on the seed, for all methods."""

import argparse
from collections import defaultdict
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
from descents import (
    MOMENTUM,
    Descent,
    LocalDescent,
    Recorder,
    Terms,
    at_density,
    descent_of,
    entries,
)
from layers import Floats
from network import Network
from tasks import Task

from collectives import CollectiveError, traffic
from mpicomp import Compressor, SparseVector
from mpicomp.compressors.selection import Selection
from mpicomp.tensors import ALONE
from mpicomp.vector import places_of
from mpicomp_bench.measuring import Row

TUNING_SEED = 1_000_000  # never one of those that are shown
LATENCY = 50e-6  # seconds that a message takes beside its bytes: TCP over Ethernet
NETWORKS = (1e9, 1e10)  # bits per second of the simulated times
SETTLED = 50  # steps after which achieved densities count


def trained(
    task: Task,
    name: str,
    density: float | None,
    every: int | None,
    options: argparse.Namespace,
    comm: Any,
) -> Row:
    """Train one method at one density on all ranks, once for each seed, and return the row, the same on all ranks.

    density: None for a method without one. every: local steps between two exchanges,
    for a method with local steps.

    Of several rates it takes the one with the least loss on the validation part, after
    a training without that part from a separate seed. The final trainings include the
    validation part. options: rate, seeds, steps, points and batch of a rank. tried: the
    validation loss of each rate, in nats. network_seconds: of the busiest rank's
    messages in a step: a latency each, and the bits over the rate. captured: of the
    first seed; see `train`.
    """
    varied = f"{name}-{every}" if every else name
    varied = at_density(varied, density) or varied if density else varied
    # an epoch
    stage = options.warm_up_steps or -(
        -len(task.training("test")) // (options.batch * comm.size)
    )

    def outcome(rate: float, seed: int, held_out: str, points: int) -> Row:
        network, record = task.network(seed), () if seed else options.record
        terms = Terms(
            rate,
            MOMENTUM,
            options.warm_up,
            stage,
            record,
            network.tensors,
            options.averaging_period,
        )
        told = argparse.Namespace(**{**vars(options), "points": points})
        return train(
            task, network, descent_of(comm, varied, terms), seed, held_out, told
        )

    tried = {}
    if len(options.rate) > 1:
        tried = {
            rate: outcome(rate, TUNING_SEED, "validation", 1)["loss"]
            for rate in options.rate
        }
    rate = min(tried, key=lambda rate: tried[rate]) if tried else options.rate[0]
    trainings = [
        outcome(rate, seed, "test", options.points) for seed in range(options.seeds)
    ]
    fields = (
        "figure",
        "loss",
        "messages",
        "nbytes",
        "sent",
        "received",
        "seconds",
        "exchange_seconds",
    )
    means = {
        name: float(np.mean([each[name] for each in trainings])) for name in fields
    }
    spread = 0.0
    if options.seeds > 1:
        finals = [each["figure"] for each in trainings]
        spread = float(np.std(finals, ddof=1)) if np.isfinite(finals).all() else np.nan
    simulated = {
        f"{bits:g}": means["messages"] * LATENCY + 8 * means["nbytes"] / bits
        for bits in NETWORKS
    }
    about: Row = {
        "name": name,
        "warm_up": options.warm_up,
        "averaging_period": options.averaging_period,
        "density": density,
        "every": every,
        "rate": rate,
    }
    about["tried"] = {f"{each:g}": tried[each] for each in tried}
    about |= {"captured": [each.pop("captured") for each in trainings][0]}  # noqa: RUF015  (all lose it)
    return {
        **about,
        **means,
        "spread": spread,
        "network_seconds": simulated,
        "trainings": trainings,
    }


def train(
    task: Task,
    network: Network,
    descent: Descent | LocalDescent,
    seed: int,
    held_out: str,
    options: argparse.Namespace,
) -> Row:
    """Train on all ranks, and return the outcome, the same on all of them except `captured`.

    network: with initial parameters. held_out: "test" or "validation". options: steps,
    batch of a rank, and points of the curve after its start.

    The outcome: figure, the task's result on the held-out part; loss there, in nats;
    curve, of (step, figure, loss in nats on a sample of the training part, seconds of
    training on rank 0); messages and nbytes sent by the busiest rank in a step; sent
    and received, the mean fractions of the entries; achieved, the mean and the 5 and 95
    % quantiles of the fractions sent after `SETTLED` steps; tensors, the mean fraction
    of each; seconds, the median step of the slowest rank, and exchange_seconds, its
    part from gradient to update; diverged: values left the range, and the training
    stopped; captured, the recorded gradients of rank 0 by step and tensor.
    """
    comm, log = descent.comm, Log()
    judges = task.held_out(held_out), task.sample()
    shard = task.training(held_out)[comm.rank :: comm.size]
    batches, before = np.random.default_rng([seed, comm.rank]), traffic(comm)
    curve: list[tuple[int, float, float, float]] = []
    loss, step, interval, diverged = (
        np.inf,
        0,
        -(-options.steps // options.points),
        False,
    )
    while True:
        if comm.rank == 0 and (
            step % interval == 0 or step == options.steps or diverged
        ):
            at = descent.common(network.parameters)
            (loss, correct), (fitted, _) = (
                task.evaluate(network, each, at) for each in judges
            )
            curve.append((step, task.figure_of(loss, correct), fitted, log.elapsed))
        if diverged or step == options.steps:
            break
        began = perf_counter()
        inputs, labels = task.examples(
            shard[batches.integers(shard.size, size=options.batch)]
        )
        with np.errstate(over="ignore", invalid="ignore"):  # `updated` looks at them
            gradient = network.gradient(
                inputs, labels, descent.point(network.parameters)
            )
            computed = perf_counter()
            diverged = not updated(network, descent, gradient)
        if not diverged:
            step += 1
            log.add(descent, perf_counter() - began, perf_counter() - computed)
    now, (loss, curve) = traffic(comm), comm.bcast((loss, curve))
    counted = [
        (now.messages - before.messages) / max(1, step),
        (now.nbytes - before.nbytes) / max(1, step),
    ]
    about = {"figure": curve[-1][1], "loss": loss, "curve": curve, "diverged": diverged}
    return {**about, **log.outcome(counted, comm), "captured": captured(descent)}


class Log:
    """A log of the steps on this rank: seconds, fractions of entries, and those of each tensor."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []
        self.shares: list[tuple[float, float]] = []
        self.by_tensor: dict[str, list[float]] = defaultdict(list)
        self.elapsed = 0.0
        self._select = Selection.select
        Selection.select = self._selecting()  # type: ignore[method-assign]

    def _selecting(self) -> Callable[..., SparseVector]:
        """Return `Selection.select`, with a record of the fraction that it selects of each tensor."""

        def select(selection: Selection, *arguments: Any) -> SparseVector:
            vector = self._select(selection, *arguments)
            counts = np.diff(places_of(vector, selection.bounds))
            densities = counts / np.maximum(1, np.diff(selection.bounds))
            for name, density in zip(selection.names, densities.tolist(), strict=True):
                self.by_tensor[name or ALONE].append(density)
            return vector

        return select

    def add(
        self, descent: Descent | LocalDescent, seconds: float, exchange_seconds: float
    ) -> None:
        """Add a step."""
        self.elapsed += seconds
        self.times.append((seconds, exchange_seconds))
        self.shares.append(entries(descent))

    def outcome(self, counted: list[float], comm: Any) -> Row:
        """Return the outcome of the steps, the same on all ranks; all ranks call. counted: messages and bytes."""
        Selection.select = self._select  # type: ignore[method-assign]
        medians = np.median(self.times or [(0.0, 0.0)], axis=0)
        most = np.max(comm.allgather([*counted, *medians]), axis=0).tolist()
        named = dict(
            zip(
                ("messages", "nbytes", "seconds", "exchange_seconds"), most, strict=True
            )
        )
        tensors = {
            name: float(np.mean(found)) for name, found in self.by_tensor.items()
        }
        return {
            **named,
            **densities(comm.allgather(self.shares)),
            "tensors": comm.bcast(tensors),
        }


def densities(shares: list[list[tuple[float, float]]]) -> Row:
    """Return the outcome of `train` for the fractions sent and received, by rank and step; nan without an exchange."""
    found = np.array(shares, float).reshape(len(shares), -1, 2)
    if not np.isfinite(found).any():
        return {"sent": 0.0, "received": 0.0, "achieved": None}
    sent, received = np.nanmean(found, axis=(0, 1)).tolist()
    late = found[:, SETTLED if found.shape[1] > SETTLED else 0 :, 0]
    achieved = [float(np.nanmean(late)), *np.nanquantile(late, [0.05, 0.95]).tolist()]
    return {"sent": sent, "received": received, "achieved": achieved}


def compressors(descent: Descent | LocalDescent) -> dict[str, Compressor]:
    """Return the compressors of a descent by tensor; that of one vector is "gradient"."""
    return descent.exchange.compressors if descent.exchange else {}


def captured(descent: Descent | LocalDescent) -> dict[str, Floats]:
    """Return the gradients that the compressors of a descent recorded, by step and tensor."""
    return {
        f"{step} {name}": gradient
        for name, compressor in compressors(descent).items()
        if isinstance(compressor, Recorder)
        for step, gradient in compressor.captured.items()
    }


def updated(
    network: Network, descent: Descent | LocalDescent, gradient: Floats
) -> bool:
    """Update the parameters; return False if gradients or parameters left the range of their dtype.

    An exchange raises for values that are not finite on all ranks, so the ranks can
    then agree.
    """
    try:
        descent.step(network.parameters, gradient)
    except OverflowError:  # the sum, which all ranks have
        return False
    except (ValueError, CollectiveError):
        finite = bool(
            np.isfinite(gradient).all() and np.isfinite(network.parameters).all()
        )
        if all(descent.comm.allgather(finite)):
            raise
        return False
    return True
