"""`collectives.torch.private`: each function does what it says in the version of PyTorch that is installed."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-torch")
from models import Weighted, inputs_of  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.join import Join  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from collectives.torch import private  # noqa: E402

pytestmark = pytest.mark.mpi


@pytest.fixture
def model(world):
    return DistributedDataParallel(Weighted())


def test_is_in_backward_and_after_backward():
    seen = []

    def note(_):
        private.after_backward(lambda: seen.append("after"))
        seen.append(private.is_in_backward())

    parameter = torch.ones(3, requires_grad=True)
    parameter.register_hook(note)
    (2 * parameter).sum().backward()
    assert seen == [True, "after"]
    assert not private.is_in_backward()
    with pytest.raises(RuntimeError):
        private.after_backward(seen.clear)


def test_versions_of():
    tensor = torch.zeros(3)
    before = private.versions_of([tensor])[0]
    tensor.add_(1)
    assert private.versions_of([tensor])[0] == before + 1
    with torch.no_grad():
        tensor.copy_(torch.ones(3))
    assert private.versions_of([tensor])[0] == before + 2


def test_gradient_hooks_of():
    calls = []
    parameter = torch.ones(3, requires_grad=True)
    assert not private.gradient_hooks_of(parameter)
    for name in "ab":
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: calls.append(name)
        )
    hooks = private.gradient_hooks_of(parameter)
    del hooks[min(hooks)]
    (2 * parameter).sum().backward()
    assert calls == ["b"]


def test_tensors_in():
    one, two = torch.zeros(3), torch.ones(2)
    assert {*map(id, private.tensors_in({"a": [one, (two, 3)]}))} == {id(one), id(two)}


def test_active_ddp(model, world):
    seen = []
    model.module.register_forward_pre_hook(lambda *_: seen.append(private.active_ddp()))
    model(inputs_of(0, world.rank))
    assert seen == [model]
    assert private.active_ddp() is None


def test_hooks_of(model):
    assert private.hooks_of(model) == []
    hook = lambda state, bucket: torch.futures.Future()  # noqa: E731
    model.register_comm_hook("state", hook)
    assert private.hooks_of(model) == [(hook, "state")]
    private.hooks_of(model)[:] = ["ours"]
    with pytest.raises(RuntimeError, match="hook"):
        model.register_comm_hook("state", hook)


@pytest.mark.parametrize("mode", ["ddp_optimizer", "python_reducer"])
def test_uses_python_reducer(world, mode):
    with torch._dynamo.config.patch(optimize_ddp=mode):
        model = DistributedDataParallel(Weighted())
    assert private.uses_python_reducer(model) == (mode == "python_reducer")


def test_reduced_parameters(world):
    network = Weighted()
    network.a.requires_grad_(False)
    model = DistributedDataParallel(network)
    network.a.requires_grad_(True)
    expected = {network.bias, network.b, network.branch}
    assert private.reduced_parameters(model) == expected


def test_has_reducer_and_drop_reducer(model, world):
    assert private.has_reducer(model)
    calls = []

    def hook(state, bucket):
        calls.append(bucket)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    model(inputs_of(0, world.rank)).backward()
    assert calls
    calls.clear()
    private.drop_reducer(model)
    assert not private.has_reducer(model)
    model.module(inputs_of(0, world.rank)).backward()
    assert not calls


@pytest.mark.parametrize("by_all", [True, False])
def test_divides_by_all_ranks(model, by_all):
    assert private.divides_by_all_ranks(model)
    with Join([model], divide_by_initial_world_size=by_all):
        assert private.divides_by_all_ranks(model) == by_all


def test_skips_unused(model):
    assert not private.skips_unused(model)
    try:
        other = DistributedDataParallel(Weighted(), skip_all_reduce_unused_params=True)
    except TypeError:
        pytest.skip("a setting of PyTorch 2.14")
    assert private.skips_unused(other)


def test_forward_hooks_of():
    module = nn.Linear(2, 2)
    module.register_forward_hook(print)
    module.register_forward_pre_hook(repr)
    assert private.forward_hooks_of(module) == [print]


def test_reduces_gradients_and_is_inner_fsdp(world):
    mesh = init_device_mesh("cpu", (world.size,))
    network = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    inner = fully_shard(network[0], mesh=mesh)
    outer = fully_shard(network, mesh=mesh)
    assert not private.is_inner_fsdp(inner)
    outer(torch.ones(2, 8)).sum().backward()
    assert private.is_inner_fsdp(inner)
    assert not private.is_inner_fsdp(outer)
    assert private.reduces_gradients(inner)
    assert private.reduces_gradients(outer)
    outer.set_requires_gradient_sync(False, recurse=False)
    assert private.reduces_gradients(inner)
    assert not private.reduces_gradients(outer)
