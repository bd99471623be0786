"""A GPT in plain PyTorch, its optimisers, and the ways to average its gradients in every step."""

import sys
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple

import numpy as np
import text
import torch
from joining import is_in_every_step
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from mpicomp_bench.methods import construct, method

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from muon import new_muon

WINDOWS = 256  # of held-out text that judge the model, all ranks together


WEIGHT_DECAY = 0.01


class Sizes(NamedTuple):
    """Of the model and of a rank's batch. The defaults have 3.2e6 parameters."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 64
    batch: int = 4


class Task(NamedTuple):
    """A model and the text that it learns."""

    sizes: Sizes
    load: Callable[[], text.Text]


TASKS = {
    "gpt": Task(Sizes(), text.library),
    "manual": Task(Sizes(width=128, batch=12), text.manual),
    # for many trainings
    "small": Task(Sizes(layers=3, width=64), text.library),
    "small-manual": Task(Sizes(layers=3, width=64), text.manual),
}


class Block(nn.Module):
    """A layer: attention, then a perceptron, each after a normalisation and beside a direct connection."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.before_attention, self.before_mlp = (
            nn.LayerNorm(width),
            nn.LayerNorm(width),
        )
        self.attention, self.projection = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, of the shape (batch, context, width) of its input."""
        parts = self.attention(self.before_attention(x)).chunk(3, dim=-1)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts
        )
        heads = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        x = x + self.projection(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class Gpt(nn.Module):
    """A model of the next symbol."""

    def __init__(self, symbols: int, sizes: Sizes) -> None:
        super().__init__()
        self.symbols, self.places = (
            nn.Embedding(symbols, sizes.width),
            nn.Embedding(sizes.context, sizes.width),
        )
        self.blocks = nn.Sequential(*(Block(sizes) for _ in range(sizes.layers)))
        self.norm, self.head = (
            nn.LayerNorm(sizes.width),
            nn.Linear(sizes.width, symbols, bias=False),
        )

    def forward(self, windows: Tensor) -> Tensor:
        """Return the mean cross entropy in nats of windows of shape (batch, context + 1)."""
        inputs, targets = windows[:, :-1], windows[:, 1:]
        x = self.symbols(inputs) + self.places.weight
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def muon_and_adamw(network: Gpt, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW at the same rate for all other parameters.

    Muon's updates are as large as AdamW's (arXiv 2502.16982), so that one rate fits
    both.
    """
    hidden = [weight for weight in network.blocks.parameters() if weight.ndim == 2]
    others = [
        each
        for each in network.parameters()
        if all(each is not weight for weight in hidden)
    ]
    adamw = torch.optim.AdamW(others, lr=rate, weight_decay=WEIGHT_DECAY)
    return [new_muon(hidden, rate, WEIGHT_DECAY), adamw]


class Trainer:
    """One rank's replica with its optimiser: the same start on all ranks, batches of its own, both by the seed."""

    def __init__(self, seed: int, rank: int, size: int, task: Task) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        sizes = task.sizes
        self.text, self.sizes, self.seed, self.rank = task.load(), sizes, seed, rank
        self.network = Gpt(self.text.count, sizes)
        # that computes the loss of a batch: the replica, or what wraps it
        self.model: nn.Module = self.network
        self.optimizers: list[torch.optim.Optimizer] = []
        self.buckets: dict[str, int] = {}  # of DistributedDataParallel
        windows = self.text.judges(WINDOWS, sizes.context + 1)
        self.judges = torch.from_numpy(np.array_split(windows, size)[rank])

    @property
    def arrays(self) -> dict[str, Tensor]:
        """The parameters by name, to be written in place."""
        return dict(self.network.named_parameters())

    def optimise(self, optimizer: str, rate: float) -> None:
        """Make the optimisers: sgd for an exchange that returns signs; muon for the matrices of the layers."""
        self.rate = rate
        if optimizer == "muon":
            self.optimizers = muon_and_adamw(self.network, rate)
        else:
            kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]
            self.optimizers = [
                kind(self.network.parameters(), lr=rate, weight_decay=WEIGHT_DECAY)
            ]

    def sleep(self, seconds: float) -> None:
        """Sleep in each backward pass, a part in each block: the core is free, as if a GPU or other cores computed.

        Buckets of 2 MB then: the default, 25 MB, is the whole model, and would leave nothing to overlap with.
        """
        self.buckets = {"bucket_cap_mb": 2}
        part = seconds / len(self.network.blocks)
        for block in self.network.blocks:
            block.register_full_backward_hook(lambda *given: sleep(part))

    def set_rate(self, part: float) -> None:
        """Take a part of the rate; what an exchange of signs keeps is scaled, as its products with the rate stay."""
        for optimizer in self.optimizers:
            (group,) = optimizer.param_groups
            before, group["lr"] = group["lr"], part * self.rate
        if isinstance(optimizer, torch.optim.SGD) and group["lr"] not in (0, before):
            self.exchange.rescale(before / group["lr"])

    def average(self, name: str, comm: Any) -> None:
        """Let every step average the gradients over the ranks, by a method."""
        # with several it fails over gloo
        buckets = (
            {"bucket_cap_mb": 1000} if name.startswith("powersgd") else self.buckets
        )
        self.model = DistributedDataParallel(self.network, **buckets)
        if is_in_every_step(name):
            from collectives.torch import attach

            self.exchange = construct(name, comm)
            attach(self.model, self.exchange)
        elif method(name).line:
            hook = construct(
                name, comm, default_hooks=default_hooks, powerSGD_hook=powerSGD_hook
            )
            self.model.register_comm_hook(*hook)

    def step(self, number: int) -> None:
        """Train on a batch that the number of the step draws."""
        self.model.zero_grad()
        self.model(self.batch(number, self.rank)).backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def batch(self, number: int, rank: int) -> Tensor:
        """Return the windows of a rank in a step, of shape (batch, context + 1)."""
        seed = [self.seed, rank, number]
        return torch.from_numpy(
            self.text.windows(seed, self.sizes.batch, self.sizes.context + 1)
        )

    @torch.no_grad()
    def loss(self) -> float:
        """Return the mean loss, in nats, on this rank's share of the held-out windows."""
        return float(self.network(self.judges))
