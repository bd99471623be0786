"""A GPT in plain PyTorch, its optimisers, and the ways to average its gradients in every step."""

from collections.abc import Callable, Iterable
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

WINDOWS = 256  # of held-out text that judge the model, all ranks together


class Lion(torch.optim.Optimizer):
    """Lion (arXiv 2302.06675): steps by the sign of a momentum, with betas 0.9 and 0.99."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.state[parameter]["momentum"] = torch.zeros_like(parameter)
                momentum = self.state[parameter]["momentum"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(torch.lerp(momentum, parameter.grad, 0.1).sign_(), alpha=group["lr"])
                momentum.lerp_(parameter.grad, 0.01)


WEIGHT_DECAY = 0.01


class Sizes(NamedTuple):
    """Of the model and of a rank's batch. The defaults have 3.2e6 parameters."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 64
    batch: int = 4


class Block(nn.Module):
    """A layer: attention, then a perceptron, each after a normalisation and beside a direct connection."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, of the shape (batch, context, width) of its input."""
        parts = self.attention(self.before_attention(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        heads = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class Gpt(nn.Module):
    """A model of the next symbol."""

    def __init__(self, symbols: int, sizes: Sizes) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(symbols, sizes.width), nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.Sequential(*(Block(sizes) for _ in range(sizes.layers)))
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, symbols, bias=False)

    def forward(self, windows: Tensor) -> Tensor:
        """Return the mean cross entropy in nats of windows of shape (batch, context + 1)."""
        inputs, targets = windows[:, :-1], windows[:, 1:]
        x = self.symbols(inputs) + self.places.weight
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trainer:
    """One rank's replica with its optimiser: the same start on all ranks, batches of its own, both by the seed."""

    def __init__(self, seed: int, rank: int, size: int, sizes: Sizes) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.text, self.sizes, self.seed, self.rank = text.load(), sizes, seed, rank
        self.network = Gpt(self.text.count, sizes)
        self.model: nn.Module = self.network  # that computes the loss of a batch: the replica, or what wraps it
        self.optimizer: torch.optim.Optimizer
        windows = self.text.judges(WINDOWS, sizes.context + 1)
        self.judges = torch.from_numpy(np.array_split(windows, size)[rank])

    @property
    def arrays(self) -> dict[str, Tensor]:
        """The parameters by name, to be written in place."""
        return dict(self.network.named_parameters())

    def optimise(self, name: str, rate: float) -> None:
        """Make the optimiser of a method: SGD where its exchange returns signs."""
        optimiser: Callable[..., torch.optim.Optimizer] = Lion if name == "lion" else torch.optim.AdamW
        if name.startswith("in-basis"):
            optimiser = torch.optim.SGD
        self.optimizer = optimiser(self.network.parameters(), lr=rate, weight_decay=WEIGHT_DECAY)

    def average(self, name: str, comm: Any) -> None:
        """Let every step average the gradients over the ranks, by a method."""
        buckets = {"bucket_cap_mb": 1000} if name.startswith("powersgd") else {}  # with several it fails over gloo
        self.model = DistributedDataParallel(self.network, **buckets)
        if is_in_every_step(name):
            from collectives.torch import attach

            self.exchange = construct(name, comm)
            attach(self.model, self.exchange)
        elif method(name).line:
            hook = construct(name, comm, default_hooks=default_hooks, powerSGD_hook=powerSGD_hook)
            self.model.register_comm_hook(*hook)

    def step(self, number: int) -> None:
        """Train on a batch that the number of the step draws."""
        self.optimizer.zero_grad()
        self.model(self.batch(number, self.rank)).backward()
        self.optimizer.step()

    def batch(self, number: int, rank: int) -> Tensor:
        """Return the windows of a rank in a step, of shape (batch, context + 1)."""
        seed = [self.seed, rank, number]
        return torch.from_numpy(self.text.windows(seed, self.sizes.batch, self.sizes.context + 1))

    @torch.no_grad()
    def loss(self) -> float:
        """Return the mean loss, in nats, on this rank's share of the held-out windows."""
        return float(self.network(self.judges))
