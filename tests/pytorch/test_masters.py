"""Local steps of a model whose optimiser keeps copies of the weights, and trains those."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-torch")
from torch import nn  # noqa: E402

from collectives import (  # noqa: E402
    CollectiveError,
    GradientExchange,
    OuterLoop,
    check_replicas,
)
from collectives.torch import outer_loop  # noqa: E402

pytestmark = pytest.mark.mpi

EVERY = 5


class Masters:
    """AdamW on copies of the parameters in float32, which it writes to the model after each step."""

    def __init__(self, model):
        self.model = model
        self.copies = {
            name: parameter.detach().float().clone()
            for name, parameter in model.named_parameters()
        }
        self._optimizer = torch.optim.AdamW([*self.copies.values()], 1e-2)

    def step(self):
        for name, parameter in self.model.named_parameters():
            self.copies[name].grad = parameter.grad.float()
        self._optimizer.step()
        self.write()

    def write(self):
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.copies[name])


def train(world, dtype, own, steps):
    """Train with a loop over the model, or over the optimiser's own copies; return the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 5)).to(dtype)
    optimizer = Masters(model)
    exchange = GradientExchange(world, bits=8)
    outer = (
        OuterLoop(exchange, optimizer.copies, every=EVERY)
        if own
        else outer_loop(model, exchange, every=EVERY)
    )
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(steps):
        inputs = torch.randn(16, 40, generator=generator)
        model.zero_grad()
        model(inputs.to(dtype)).float().sub(world.rank).square().mean().backward()
        optimizer.step()
        if outer.step() and own:
            optimizer.write()
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_copies_that_undo_a_round_are_noticed_after_the_next_step(world, dtype):
    train(world, dtype, own=False, steps=EVERY)
    with pytest.raises(CollectiveError, match=r"float32 masters.*to OuterLoop"):
        train(world, dtype, own=False, steps=EVERY + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_loop_over_the_copies_trains_one_model(world, dtype):
    model = train(world, dtype, own=True, steps=3 * EVERY)
    check_replicas(dict(model.named_parameters()), world)
