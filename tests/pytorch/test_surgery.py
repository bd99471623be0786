"""Models that a program copies, compiles, converts and loads around the hooks of `outer_loop` and `attach`."""

import copy
import io

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-torch")
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.nn.utils import parametrizations, prune  # noqa: E402
from torch.optim.swa_utils import AveragedModel  # noqa: E402

from collectives import CollectiveError, GradientExchange, check_replicas  # noqa: E402
from collectives.torch import attach, outer_loop  # noqa: E402
from mpicomp import Dense, NoFeedback  # noqa: E402

pytestmark = pytest.mark.mpi


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def exchange(world):
    return GradientExchange(world, Dense(), NoFeedback())


def loss_of(model, world):
    return model(torch.full((2, 6), 1.0 + world.rank)).sum()


def same(model, world):
    check_replicas(dict(model.named_parameters()), world)


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "average": lambda model: AveragedModel(model).module,
    "saved": saved,
}


@pytest.mark.parametrize("copied", [*COPIES])
def test_a_copy_before_the_first_step_has_no_hook(world, copied):
    model = network()
    outer = outer_loop(model, exchange(world), every=1)
    other = COPIES[copied](model)
    loss_of(other, world).backward()
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    optimizer.step()
    with torch.no_grad():
        model[0].bias += 1  # a load, before which the copy was trained
    loss_of(model, world).backward()
    assert outer.step()
    torch.testing.assert_close(model[0].bias, network()[0].bias + 1)


@pytest.mark.parametrize("copied", [*COPIES])
def test_a_copy_of_an_attached_model_trains_apart(world, copied):
    model = DistributedDataParallel(network())
    handle = attach(model, exchange(world))
    loss_of(COPIES[copied](model.module), world).backward()
    loss_of(model, world).backward()
    assert handle.exchange.steps == 1


@pytest.mark.parametrize("compile_first", [True, False])
def test_local_steps_of_a_model_that_is_compiled_as_a_whole(world, compile_first):
    model = network()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    outer = outer_loop(compiled if compile_first else model, exchange(world), every=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        loss_of(compiled, world).backward()
        optimizer.step()
        outer.step()
    assert outer.rounds == 2
    same(model, world)


def test_a_model_in_local_steps_is_scripted_and_exported_after_its_first_step(world):
    model = network()
    outer = outer_loop(model, exchange(world), every=1)
    loss_of(model, world).backward()
    outer.step()
    loss_of(model, world)
    inputs = torch.ones(2, 6)
    for other in (
        torch.jit.script(model),
        torch.export.export(model, (inputs,)).module(),
    ):
        torch.testing.assert_close(other(inputs), model(inputs))


def test_two_optimisers_begin_at_one_anchor(world):
    """The second one has a backward pass of its own, which does not make the first one's progress the anchor."""
    model = network()
    outer = outer_loop(model, exchange(world), every=1)
    start = copy.deepcopy(model.state_dict())
    for layer in model[0], model[2]:
        model.zero_grad()
        loss_of(model, world).backward()
        torch.optim.SGD(layer.parameters(), 0.1).step()
    assert outer.step()
    same(model, world)
    assert not torch.equal(model[0].bias, start["0.bias"])


def prune_layer(model):
    prune.l1_unstructured(model[0], "weight", 0.5)


def normalise(model):
    parametrizations.weight_norm(model[0])


def adapt(model):
    """As LoRA wraps a layer: the base is frozen, and what is new is trained."""
    model.requires_grad_(False)
    model[0] = nn.Sequential(model[0], nn.Linear(8, 8))


@pytest.mark.parametrize("change", [prune_layer, normalise, adapt])
@pytest.mark.parametrize("everywhere", [True, False])
def test_surgery_after_attach_raises_on_all_ranks(world, change, everywhere):
    model = DistributedDataParallel(network())
    handle = attach(model, exchange(world))
    loss_of(model, world).backward()
    here = everywhere or world.rank == 0
    if here:
        change(model.module)
    with pytest.raises(
        ValueError if here else CollectiveError,
        match="the model has other parameters than at attach",
    ):
        loss_of(model, world).backward()
    assert handle.exchange.steps == 1


@pytest.mark.parametrize("change", [prune_layer, normalise, adapt])
@pytest.mark.parametrize("everywhere", [True, False])
def test_surgery_in_local_steps_raises_on_all_ranks(world, change, everywhere):
    model = network()
    outer = outer_loop(model, exchange(world), every=1)
    outer.step()
    here = everywhere or world.rank == 0
    if here:
        change(model)
    with pytest.raises(
        ValueError if here else CollectiveError,
        match="the model has other parameters than at outer_loop",
    ):
        outer.step()


def test_weights_that_one_rank_swaps_for_an_average_are_found(world):
    """As where the mean is copied into the model to evaluate it, and the weights are not copied back."""
    model = DistributedDataParallel(network())
    attach(model, exchange(world), check_every=2)
    average = AveragedModel(model.module)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model, world).backward()
            optimizer.step()
            average.update_parameters(model.module)

    train(2)
    if world.rank == 1:
        model.module.load_state_dict(average.module.state_dict())
    with pytest.raises(CollectiveError, match=r"of rank 1 differ .* the first is"):
        train(1)
