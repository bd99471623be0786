"""The lines that `mpicomp explain --train` prints run, on all ranks of the world."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-torch")
import torch.distributed as dist  # noqa: E402

from mpicomp_bench import advice  # noqa: E402

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", advice.MESSAGES)
def test_the_lines_of_a_method_train(name, world):
    torch.manual_seed(0)
    network, lines = torch.nn.Linear(64, 32), advice.lines_of(name)
    names = {"network": network, "learning_rate": 0.002}
    if "init_process_group" in lines:
        dist.destroy_process_group()
    exec(lines, names)
    model = names.get("model", network)
    optimizer = names.get("optimizer") or torch.optim.AdamW(model.parameters())
    before = network.weight.detach().clone()
    for _ in range(12):
        model(torch.ones(4, 64) * (1 + world.rank)).square().sum().backward()
        optimizer.step()
        if "outer" in names:
            names["outer"].step()
    assert not torch.equal(network.weight, before)
    everyone = world.allgather(network.weight.detach().numpy().tobytes())
    assert "outer" in names or len(set(everyone)) == 1


def test_one_node_alone_trains_on_all_batches(world):
    network = torch.nn.Linear(2, 1, bias=False)
    batches = [torch.eye(2)[:1], torch.eye(2)[1:]]
    optimizer = torch.optim.SGD(network.parameters(), 1.0)
    before = network.weight.detach().clone()
    names = {"network": network, "batches": batches, "optimizer": optimizer}
    exec(advice.lines_of(advice.ALONE), {**names, "loss_of": lambda network, batch: network(batch).sum()})
    torch.testing.assert_close(before - network.weight.detach(), torch.full((1, 2), 0.5))
