"""The lines that `mpicomp explain --train` prints run, on all ranks of the world."""

import pathlib
import re

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-torch")
import torch.distributed as dist  # noqa: E402
from mpi4py import MPI  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from collectives import GradientExchange  # noqa: E402
from collectives.planning.links import links_of  # noqa: E402
from collectives.torch import attach_fsdp  # noqa: E402
from mpicomp import Dense, NoFeedback  # noqa: E402
from mpicomp_bench import advice  # noqa: E402

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()

pytestmark = pytest.mark.mpi


def training(optimizer):
    return advice.Training(4, 10**6, 0.1, links_of("1gbit"), optimizer=optimizer)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("name", advice.MESSAGES)
def test_the_lines_of_a_method_train(name, optimizer, world):
    torch.manual_seed(0)
    layers = nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 8)
    network, lines = nn.Sequential(*layers), advice.lines_of(name, training(optimizer))
    names = {"network": network, "learning_rate": 0.002}
    if "init_process_group" in lines:
        dist.destroy_process_group()
    exec(lines, names)
    model = names.get("model", network)
    optimizers = [
        names[each] for each in ("optimizer", "muon", "adamw") if each in names
    ]
    optimizers = optimizers or [torch.optim.AdamW(model.parameters())]
    before = [each.detach().clone() for each in network.parameters()]
    for _ in range(12):
        model(torch.ones(4, 64) * (1 + world.rank)).square().sum().backward()
        for each in optimizers:
            each.step()
        if "outer" in names:
            names["outer"].step()
    after = [each.detach() for each in network.parameters()]
    assert not any(map(torch.equal, before, after))
    everyone = world.allgather(b"".join(each.numpy().tobytes() for each in after))
    assert "outer" in names or len(set(everyone)) == 1
    if optimizer == "muon" and "muon" in names:
        (group,) = names["muon"].param_groups
        hidden = [layers[0].weight, layers[2].weight]
        assert [*map(id, group["params"])] == [*map(id, hidden)]


def test_one_node_alone_trains_on_all_batches(world):
    network = torch.nn.Linear(2, 1, bias=False)
    batches = [torch.eye(2)[:1], torch.eye(2)[1:]]
    optimizer = torch.optim.SGD(network.parameters(), 1.0)
    before = network.weight.detach().clone()
    names = {"network": network, "batches": batches, "optimizer": optimizer}
    exec(
        advice.lines_of(advice.ALONE, training("adamw")),
        {**names, "loss_of": lambda network, batch: network(batch).sum()},
    )
    torch.testing.assert_close(
        before - network.weight.detach(), torch.full((1, 2), 0.5)
    )


def lines_with(text):
    """Return the block of docs/frameworks.md that contains a text."""
    (lines,) = (
        found
        for found in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
        if text in found
    )
    return lines


def test_replicas_with_uneven_numbers_of_batches_stay_the_same(world):
    mesh = init_device_mesh(
        "cpu", (world.size // 2, 2), mesh_dim_names=("replica", "shard")
    )
    torch.manual_seed(0)
    model, replica = (
        fully_shard(nn.Linear(64, 8, bias=False), mesh=mesh["shard"]),
        mesh.get_local_rank("replica"),
    )
    exchange = GradientExchange(
        world.Split(mesh.get_local_rank("shard"), world.rank), Dense(), NoFeedback()
    )
    attach_fsdp(model, exchange)
    names = {
        "comm": world,
        "MPI": MPI,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 1.0),
    }
    names["batches"] = [torch.ones(1, 64)] * (1 + 2 * replica)
    before = model.weight.full_tensor()
    lines = lines_with("len(batches)")
    exec(lines[lines.index("for step") :], names)
    # and 1, 3, 5, ... batches: their sum is the square of the number of replicas
    most = 2 * exchange.comm.size - 1
    assert exchange.steps == most
    torch.testing.assert_close(
        before - model.weight.full_tensor(),
        torch.full((8, 64), float(exchange.comm.size)),
    )
