"""Local steps of a PyTorch module: `OuterLoop` over its trainable parameters."""

from typing import Any

import torch

from collectives.exchange import GradientExchange
from collectives.outer import OuterLoop
from collectives.torch.common import trainable


def outer_loop(model: torch.nn.Module, exchange: GradientExchange, **terms: Any) -> OuterLoop:
    """Return an `OuterLoop` (local steps) of a module's trainable parameters. terms: keyword arguments of `OuterLoop`.

    >>> outer = outer_loop(network, exchange, every=30)
    """
    return OuterLoop(exchange, dict(trainable(model)), **terms)
