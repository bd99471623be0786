"""The examples in the docstrings of collectives.torch run."""

import doctest

import pytest

from collectives import GradientExchange
from mpicomp import TopK

pytest.importorskip("torch", reason="needs PyTorch: make test-torch")

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", ["attach", "attach_fsdp", "outer_loop"])
def test_the_example_of_a_docstring_runs(name, world):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import collectives.torch

    if name == "attach_fsdp" and world.size != 4:
        pytest.skip("two replicas of two ranks")
    torch.manual_seed(0)
    network = torch.nn.Linear(64, 10)
    names = {
        public: getattr(collectives.torch, public)
        for public in collectives.torch.__all__
    }
    names |= {
        "comm": world,
        "GradientExchange": GradientExchange,
        "TopK": TopK,
        "network": network,
        "model": network,
    }
    names |= {"init_device_mesh": init_device_mesh, "fully_shard": fully_shard}
    names |= {
        "DistributedDataParallel": DistributedDataParallel,
        "exchange": GradientExchange(world, TopK(0.01)),
    }
    test = doctest.DocTestParser().get_doctest(
        names[name].__doc__, names, name, None, 0
    )
    assert test.examples
    said = []
    assert doctest.DocTestRunner().run(test, out=said.append).failed == 0, "".join(said)
