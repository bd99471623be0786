"""Parameters are compared between the ranks in the first step and in every `check_every`-th one."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-torch")
from models import Weighted, inputs_of  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.join import Join  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from collectives import CollectiveError, GradientExchange  # noqa: E402
from collectives.torch import attach, attach_fsdp, outer_loop  # noqa: E402
from mpicomp import TopK  # noqa: E402

pytestmark = pytest.mark.mpi

DIFFERS = (
    r"the parameters of rank 1 differ from .* in 1 of 4 tensors; the first is 'branch'"
)


def change(parameter, by):
    """Change a parameter as a load, a pruning or an exponential mean of one rank would."""
    with torch.no_grad():
        parameter[-1:] += by


def backward(model, world, step):
    model.zero_grad()
    model(inputs_of(step, world.rank)).backward()


@pytest.mark.parametrize("step", [0, 2])
def test_a_change_on_one_rank_raises_on_all_and_the_model_goes_on(world, step):
    model = DistributedDataParallel(Weighted())
    handle = attach(model, GradientExchange(world, TopK(0.1)), check_every=2)
    for before in range(step):
        backward(model, world, before)
    branch = model.module.branch
    change(branch, world.rank == 1)
    residuals = handle.exchange.residual_norm
    with pytest.raises(CollectiveError, match=DIFFERS):
        backward(model, world, step)
    assert handle.exchange.residual_norm == residuals
    change(branch, -(world.rank == 1))
    backward(model, world, step)
    assert handle.exchange.steps == step + 1


def test_a_change_between_two_comparisons_is_found_by_the_next_one(world):
    model = DistributedDataParallel(Weighted())
    attach(model, GradientExchange(world, bits=4), check_every=3)
    backward(model, world, 0)
    change(model.module.branch, world.rank == 1)
    for step in 1, 2:
        backward(model, world, step)
    with pytest.raises(CollectiveError, match=DIFFERS):
        backward(model, world, 3)


def test_a_rank_that_has_joined_is_not_compared(world):
    """Its parameters stay as they were at its last step, until `join` ends and copies those of the others."""
    model = DistributedDataParallel(Weighted())
    handle = attach(model, GradientExchange(world, TopK(0.1)), check_every=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with Join([model]):
        for step in range(2 + 2 * (world.rank == 0)):
            backward(model, world, step)
            optimizer.step()
    assert handle.exchange.steps == 4


@pytest.mark.parametrize("bad", [0, 1.5, "often"])
def test_a_bad_number_of_steps_raises_before_anything_is_sent(world, bad):
    model = DistributedDataParallel(Weighted())
    exchange = GradientExchange(world, bits=4)
    with pytest.raises((ValueError, TypeError), match="check_every"):
        attach(model, exchange, check_every=bad)
    attach(model, exchange)


def test_shards_are_compared_between_replicas(world):
    mesh = init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("replica", "shard"))
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(40, 30), mesh=mesh["shard"])
    attach_fsdp(model, GradientExchange(world, bits=4), check_every=2)

    def train():
        model(torch.ones(4, 40)).sum().backward()

    train()
    change(model.bias.to_local(), world.rank == 1)
    train()
    with pytest.raises(
        CollectiveError,
        match=r"of rank 1 differ .* in 1 of 2 tensors; the first is 'bias'",
    ):
        train()


def test_the_anchors_of_local_steps_are_compared(world):
    model = Weighted()
    outer = outer_loop(model, GradientExchange(world, bits=4), every=1, check_every=2)
    outer.step()
    outer.anchor["branch"].base[-1:] += world.rank == 1
    outer.step()
    with pytest.raises(CollectiveError, match=DIFFERS):
        outer.step()
