"""Passes, settings and layouts of DistributedDataParallel that the exchange cannot serve are refused, on all ranks."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-torch")
from models import Weighted, gradients, have_same_bits, inputs_of  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.join import Join  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from collectives import CollectiveError, GradientExchange  # noqa: E402
from collectives.torch import attach  # noqa: E402
from mpicomp import TopK  # noqa: E402

pytestmark = pytest.mark.mpi

ASTRAY = "a backward pass that DistributedDataParallel did not see"


class Policy(Weighted):
    """A model with a method beside `forward`, as those of reinforcement learning."""

    def log_prob(self, inputs):
        return self(inputs).square()


def attached(world, module=None, **settings):
    model = DistributedDataParallel(module or Policy(), **settings)
    return model, attach(model, GradientExchange(world, TopK(0.1)))


def passes(model, world):
    """Return the losses of calls that DDP does not see."""
    inputs = inputs_of(0, world.rank)
    return {
        "module": lambda: model.module(inputs),
        "method": lambda: model.module.log_prob(inputs),
        "a part": lambda: sum(parameter.sum() for parameter in model.parameters()),
    }


@pytest.mark.parametrize("way", ["module", "method", "a part"])
@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}])
def test_a_pass_that_ddp_does_not_see_raises_and_the_model_goes_on(
    world, way, settings
):
    model, handle = attached(world, **settings)
    for steps in range(2):
        with pytest.raises(RuntimeError, match=ASTRAY):
            passes(model, world)[way]().backward()
        assert handle.exchange.steps == steps
        model.zero_grad()
        model(inputs_of(steps, world.rank)).backward()
        assert handle.exchange.steps == steps + 1
        for mean in gradients(model.module).values():
            assert len({*world.allgather(mean.tobytes())}) == 1


def test_a_pass_of_one_rank_that_ddp_does_not_see_raises_on_all(world):
    model, handle = attached(world)
    inputs = inputs_of(0, world.rank)
    here = world.rank == 0
    with pytest.raises(RuntimeError if here else CollectiveError, match=ASTRAY):
        (model.module if here else model)(inputs).backward()
    assert handle.exchange.steps == 0


@pytest.mark.parametrize("way", ["module", "method", "a part"])
def test_gradients_that_are_not_to_be_exchanged_are_computed_in_no_sync(world, way):
    model, handle = attached(world)
    with model.no_sync():
        passes(model, world)[way]().backward()
    with model.no_sync():
        loss = model(inputs_of(0, world.rank))
    loss.backward()  # DDP synchronises by where the forward pass was
    assert handle.exchange.steps == 0
    torch.autograd.grad(model.module(inputs_of(0, world.rank)), [*model.parameters()])
    model(inputs_of(1, world.rank)).backward()
    assert handle.exchange.steps == 1


def test_after_remove_and_without_ddp_all_passes_are_free(world):
    model, handle = attached(world)
    handle.remove()
    model.module(inputs_of(0, world.rank)).backward()
    model, handle = attached(world)
    module = model.module
    del model
    module(inputs_of(0, world.rank)).backward()
    assert handle.exchange.steps == 0


def test_a_model_that_is_wrapped_and_attached_again_is_seen_by_the_last_one(world):
    old, before = attached(world)
    old(inputs_of(0, world.rank)).backward()
    model = DistributedDataParallel(old.module)
    handle = attach(model, GradientExchange(world, TopK(0.1)))
    model(inputs_of(1, world.rank)).backward()
    assert (before.exchange.steps, handle.exchange.steps) == (1, 1)
    with pytest.raises(RuntimeError, match=ASTRAY):
        old.module(inputs_of(2, world.rank)).backward()


class Critic(nn.Module):
    """The bias of its head has no gradient in a gradient penalty."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, inputs):
        return self.head(torch.tanh(self.body(inputs)))


@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}])
@pytest.mark.parametrize("remedy", [True, False])
def test_a_gradient_penalty_that_is_the_whole_loss_raises(world, settings, remedy):
    torch.manual_seed(0)
    model, handle = attached(world, Critic(), **settings)
    inputs = torch.ones(4, 8, requires_grad=True)
    outputs = model(inputs * (1 + world.rank))
    (slopes,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    penalty = (slopes.norm(dim=1) - 1).square().mean()
    if remedy:
        (penalty + 0 * outputs.sum()).backward()
        assert handle.exchange.steps == 1
        return
    with pytest.raises(
        RuntimeError, match=r"the loss is a gradient penalty alone \(add"
    ):
        penalty.backward()


def test_join_that_divides_by_the_ranks_that_are_left_is_refused(world):
    model, _ = attached(world)
    with (
        pytest.raises(
            ValueError, match="divide_by_initial_world_size=True, the default"
        ),
        Join([model], divide_by_initial_world_size=False),
    ):
        model(inputs_of(0, world.rank)).backward()


def test_unused_parameters_that_ddp_passes_over_are_refused(world):
    try:
        model = DistributedDataParallel(
            Weighted(),
            find_unused_parameters=True,
            skip_all_reduce_unused_params=True,
        )
    except TypeError:
        pytest.skip("a setting of PyTorch 2.14")
    with pytest.raises(ValueError, match="skip_all_reduce_unused_params=True"):
        attach(model, GradientExchange(world, TopK(0.1)))


class Images(nn.Module):
    """A convolution that some batches do not use."""

    def __init__(self):
        super().__init__()
        self.used = nn.Conv2d(4, 8, 3)
        self.unused = nn.Conv2d(4, 8, 3)

    def forward(self, images):
        return self.used(images).sum()


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize(
    "settings", [{"find_unused_parameters": True}, {"static_graph": True}]
)
def test_another_memory_format_before_attach_trains_as_ddp_alone_or_raises(
    world, views, settings
):
    def means(compressed):
        torch.manual_seed(0)
        model = DistributedDataParallel(
            Images(), gradient_as_bucket_view=views, **settings
        )
        model.to(memory_format=torch.channels_last)
        if compressed:
            attach(
                model,
                GradientExchange(world, bits=None, compressor=TopK(0.999), small=0),
            )
        for step in range(3):
            images = torch.full((2, 4, 5, 5), 1.0 + step + world.rank)
            model.zero_grad()
            model(images).backward()
        return {
            name: parameter.grad for name, parameter in model.module.named_parameters()
        }

    if views:  # which DDP made before
        with pytest.raises(ValueError, match="before DistributedDataParallel"):
            means(True)
        return
    ours, theirs = means(True), means(False)
    assert ours["unused.weight"] is None
    assert theirs["unused.weight"] is None
    torch.testing.assert_close(ours["used.bias"], theirs["used.bias"])
    torch.testing.assert_close(
        ours["used.weight"], theirs["used.weight"], rtol=0.1, atol=1
    )


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("views", [True, False])
def test_another_memory_format_after_attach_raises_on_all_ranks_before_a_step(
    world, views, everywhere
):
    model, handle = attached(
        world,
        Images(),
        gradient_as_bucket_view=views,
        find_unused_parameters=True,
    )
    converts = everywhere or world.rank == 1
    if converts:
        model.to(memory_format=torch.channels_last)
    with pytest.raises(
        ValueError if converts else CollectiveError,
        match=r"has another memory format than .* before DistributedDataParallel",
    ):
        model(torch.ones(2, 4, 5, 5)).backward()
    assert handle.exchange.steps == 0
    model.to(memory_format=torch.contiguous_format)
    model.zero_grad()  # NaN
    model(torch.ones(2, 4, 5, 5)).backward()
    assert handle.exchange.steps == 1
    assert have_same_bits(model, world)
