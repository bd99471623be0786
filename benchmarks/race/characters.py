"""The character model of benchmarks/training in plain NumPy, trained by momentum SGD; no PyTorch is needed."""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from collectives import dense_allreduce
from mpicomp_bench.methods import construct

sys.path.append(str(Path(__file__).resolve().parent.parent / "training"))

from descents import MOMENTUM
from layers import Floats
from network import Network, perceptron
from tasks import text

BATCH = 32  # examples of a rank
WIDTH = 1024  # of the hidden layer: 0.9e6 parameters


class Trainer:
    """One rank's replica with its optimiser: the same start on all ranks, batches of its own, both by the seed."""

    def __init__(self, seed: int, rank: int, size: int) -> None:
        self.task, self.seed, self.rank = text(), seed, rank
        inputs, *_, classes = (shape for shape in self.task.network(0).shapes.values())
        self.network = Network(perceptron(inputs[0], WIDTH, classes[0]), seed)
        self.examples = self.task.training("validation")
        self.judges = np.array_split(self.task.held_out("validation"), size)[rank]
        self.mean: Any = lambda gradient: gradient
        self.velocity: Floats = np.zeros_like(self.network.parameters)
        self.rate = np.float32(0)

    @property
    def arrays(self) -> dict[str, Floats]:
        """The parameters by name, to be written in place."""
        return {"network": self.network.parameters}

    def optimise(self, name: str, rate: float) -> None:
        """Take a learning rate; all methods have the same optimiser."""
        self.rate = np.float32(rate)

    def average(self, name: str, comm: Any) -> None:
        """Let every step average the gradients over the ranks, as a method says."""
        if name == "dense":
            self.mean = lambda gradient: dense_allreduce(gradient, comm) / np.float32(comm.size)
        else:
            self.mean = construct(name, comm)

    def step(self, number: int) -> None:
        """Train on a batch that the number of the step draws."""
        drawn = np.random.default_rng([self.seed, self.rank, number]).integers(self.examples.size, size=BATCH)
        gradient = self.network.gradient(*self.task.examples(self.examples[drawn]))
        self.velocity = np.float32(MOMENTUM) * self.velocity + self.mean(gradient)
        self.network.parameters -= self.rate * self.velocity

    def loss(self) -> float:
        """Return the mean loss, in nats, on this rank's share of the held-out examples."""
        return self.task.evaluate(self.network, self.judges)[0]
