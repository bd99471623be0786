"""`collectives.torch.attach`: a model in DistributedDataParallel, on all ranks of the world."""

import copy
import gc
import io
import math
import warnings
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from jobs import ROOT

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-torch")
from models import (  # noqa: E402
    SIZES,
    Weighted,
    blocking,
    gradients,
    have_same_bits,
    inputs_of,
    residuals,
)
from mpi4py import MPI  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from collectives import (  # noqa: E402
    GradientExchange,
    redistribute_state,
    sparse_allreduce,
)
from collectives.faults.errors import CollectiveError  # noqa: E402
from collectives.torch import (  # noqa: E402
    attach,
    init_process_group,
    outer_loop,
    to_arrays,
    to_tensors,
)
from mpicomp import (  # noqa: E402
    Dense,
    ErrorFeedback,
    MomentumCorrection,
    NoFeedback,
    TopK,
)

pytestmark = pytest.mark.mpi

PAGE = (ROOT / "docs" / "frameworks.md").read_text()


def wrapped(module, **settings):
    return DistributedDataParallel(module, bucket_cap_mb=0.02, **settings)


def attached(
    comm,
    settings=None,
    dtype=torch.float32,
    compressor=None,
    collective=sparse_allreduce,
    **terms,
):
    model = wrapped(Weighted(dtype), **(settings or {}))
    return model, attach(
        model,
        GradientExchange(comm, compressor or TopK(0.1), collective=collective),
        **terms,
    )


def backward(model, comm, step, names=tuple(SIZES), scale=1):
    model.zero_grad()
    (model(inputs_of(step, comm.rank, names)) * scale).backward()


def total(comm, step, names=tuple(SIZES)):
    """Return the sum over the ranks of a step's gradients, by name."""
    everyone = [inputs_of(step, rank) for rank in range(comm.size)]
    return {
        name: sum(each[name].numpy() for each in everyone) if name in names else 0
        for name in SIZES
    }


def check_conserved(found, left, given):
    for name in SIZES:
        np.testing.assert_array_equal(found[name] + left[name], given[name], name)


class Interleaved(nn.Module):
    """Matrices of float16, each followed by a norm of float32; their gradients are the inputs."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(
            torch.zeros(shape, dtype=dtype)
            for _ in range(32)
            for shape, dtype in (((16, 9), torch.float16), ((9,), torch.float32))
        )

    def forward(self, value):
        """Return the sum of all parameters times a value."""
        return sum((weight * value).sum().float() for weight in self.weights)


def test_interleaved_dtypes_are_exchanged_in_a_bucket_each(world):
    model = DistributedDataParallel(Interleaved())
    exchange = GradientExchange(world, TopK(1.0), small=0)
    attach(model, exchange)
    for _ in range(2):
        model(torch.tensor(1.0 + world.rank)).backward()
    assert len(exchange.buckets) == 2
    for weight in model.module.weights:
        mean = (world.size + 1) / 2
        assert (weight.grad == 2 * mean).all()


@pytest.mark.parametrize("views", [False, True])
def test_a_dense_exchange_trains_as_ddp_alone(world, views):
    def train(compressed):
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Linear(40, 100),
            nn.ReLU(),
            nn.Linear(100, 60),
            nn.ReLU(),
            nn.Linear(60, 5),
        )
        model = wrapped(network, gradient_as_bucket_view=views)
        if compressed:
            attach(model, GradientExchange(world, Dense(), NoFeedback()))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        generator = torch.Generator().manual_seed(world.rank)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(16, 40, generator=generator)).square().mean().backward()
            optimizer.step()
        return network

    ours, theirs = train(True), train(False)
    assert have_same_bits(ours, world)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("settings", [{}, {"static_graph": True}])
def test_the_means_are_those_of_a_loop_without_ddp(world, settings):
    model, loop = attached(world, settings)[0], GradientExchange(world, TopK(0.1))
    for step in range(3):
        backward(model, world, step)
        for name, mean in loop(
            dict(reversed(inputs_of(step, world.rank).items()))
        ).items():
            np.testing.assert_array_equal(
                gradients(model.module)[name], mean.numpy(), name
            )


@pytest.mark.parametrize("views", [False, True])
def test_nothing_is_lost_with_new_buckets_accumulation_and_unused_parameters(
    world, views
):
    """DDP has other buckets after the first step. Every third step some ranks, or all, leave the branch out."""
    model, handle = attached(
        world, {"find_unused_parameters": True, "gradient_as_bucket_view": views}
    )
    found, given = dict.fromkeys(SIZES, 0), dict.fromkeys(SIZES, 0)
    for step in range(6):
        model.zero_grad()
        for part in (0, 1):
            with model.no_sync() if part == 0 else nullcontext():
                uses = [
                    step % 3 == 0 or (step % 3 == 1 and rank == 0)
                    for rank in range(world.size)
                ]
                names = [name for name in SIZES if name != "branch" or uses[world.rank]]
                model(inputs_of(2 * step + part, world.rank, names)).backward()
            for rank in range(world.size):
                for name, values in inputs_of(2 * step + part, rank).items():
                    given[name] = given[name] + values.numpy() * (
                        name != "branch" or uses[rank]
                    )
        means = gradients(model.module)
        assert (
            len(
                set(
                    world.allgather(b"".join(mean.tobytes() for mean in means.values()))
                )
            )
            == 1
        )
        found = {name: found[name] + means[name] * world.size for name in SIZES}
    assert handle.exchange.steps == 6
    check_conserved(found, residuals(handle, world), given)
    assert np.count_nonzero(residuals(handle, world)["a"])


class Convolutions(nn.Module):
    """Two convolutions of the inputs, of which a step may leave the second out."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3), nn.Conv2d(4, 8, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, images, uses_second):
        """Return a sum whose gradients are integers, other ones for each entry of a weight."""
        found = (
            self.first(images) + self.second(images)
            if uses_second
            else self.first(images)
        )
        return (found * torch.arange(1, 9).reshape(8, 1, 1)).sum()


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("kind", ["none", "find_unused_parameters", "static_graph"])
def test_means_of_channels_last_parameters_keep_their_places(world, kind, views):
    """The second of two batches leaves a convolution out where DDP allows that: the first one's gradient is there."""
    model, reference = Convolutions(), Convolutions()
    ddp = wrapped(
        model, gradient_as_bucket_view=views, **({} if kind == "none" else {kind: True})
    )
    attach(ddp, GradientExchange(world, Dense(), NoFeedback()))
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(2):
        for each in (ddp, reference):
            each.zero_grad()
        # a static graph starts without no_sync()
        for part in (1,) if kind == "static_graph" else (0, 1):
            images = torch.randint(-4, 5, (2, 4, 5, 5), generator=generator).float()
            uses_second = part == 0 or kind != "find_unused_parameters"
            with ddp.no_sync() if part == 0 else nullcontext():
                ddp(images, uses_second).backward()
            reference(images, uses_second).backward()
        for mine, alone in zip(model.parameters(), reference.parameters(), strict=True):
            expected = (
                world.allreduce(alone.grad.contiguous().numpy(), MPI.SUM) / world.size
            )
            np.testing.assert_array_equal(mine.grad.contiguous().numpy(), expected)
            assert mine.grad.stride() == mine.stride()


def test_a_parameter_that_nobody_used_has_no_gradient(world):
    """As with DDP alone: weight decay would act on it."""
    model, _ = attached(world, {"find_unused_parameters": True})
    backward(model, world, 0, ["a", "bias"])
    assert model.module.b.grad is None
    np.testing.assert_array_equal(
        model.module.bias.grad.numpy() * world.size, total(world, 0)["bias"]
    )


def test_nothing_is_lost_when_a_rank_has_fewer_batches(world):
    model, handle = attached(world)
    found, given = dict.fromkeys(SIZES, 0), dict.fromkeys(SIZES, 0)
    steps = [3 if rank == 1 else 5 for rank in range(world.size)]
    means = []
    with model.join():
        for step in range(steps[world.rank]):
            backward(model, world, step)
            means.append(gradients(model.module))
    means = world.bcast(means)
    for step in range(5):
        there = [
            inputs_of(step, rank) for rank in range(world.size) if step < steps[rank]
        ]
        for name in SIZES:
            found[name] = found[name] + means[step][name] * world.size
            given[name] = given[name] + sum(each[name].numpy() for each in there)
    check_conserved(found, residuals(handle, world), given)


def test_bfloat16_parameters_have_residuals_in_float32(world):
    model, handle = attached(world, dtype=torch.bfloat16)
    for step in range(2):
        backward(model, world, step)
    assert handle.state_dict()["a/feedback/residual"].dtype == torch.float32
    assert model.module.a.grad.dtype == torch.bfloat16
    assert 0 < np.count_nonzero(gradients(model.module)["a"]) < SIZES["a"]
    assert len(set(world.allgather(gradients(model.module)["a"].tobytes()))) == 1


def test_a_gradient_is_clipped_by_its_norm_over_all_parameters(world):
    model, handle = attached(world, compressor=Dense(), clip=5.0)
    for step in range(2):
        backward(model, world, step)
    limit, expected = 5 / math.sqrt(world.size), dict.fromkeys(SIZES, 0)
    for rank in range(world.size):
        mine = {
            name: values.numpy().astype(np.float64)
            for name, values in inputs_of(1, rank).items()
        }
        norm = math.sqrt(sum(float(values @ values) for values in mine.values()))
        expected = {
            name: expected[name] + mine[name] * limit / norm / world.size
            for name in SIZES
        }
    for name, mean in gradients(model.module).items():
        np.testing.assert_allclose(mean, expected[name], rtol=1e-5, atol=1e-7)
    mine = np.concatenate(
        [values.numpy() for values in inputs_of(1, world.rank).values()]
    )
    assert handle.norm == pytest.approx(np.linalg.norm(mine.astype(np.float64)))


@pytest.mark.parametrize("parts", [1, 2])
def test_residuals_do_not_depend_on_the_scale_of_the_loss(world, parts):
    """parts: of a step, accumulated."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    model, handle = attached(world, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    found, given = dict.fromkeys(SIZES, 0), dict.fromkeys(SIZES, 0)
    for step in range(4):
        optimizer.zero_grad()
        for part in range(parts):
            with nullcontext() if part == parts - 1 else model.no_sync():
                scaler.scale(
                    model(inputs_of(parts * step + part, world.rank))
                ).backward()
            given = {
                name: given[name] + values
                for name, values in total(world, parts * step + part).items()
            }
        scaler.unscale_(optimizer)
        found = {
            name: found[name] + mean * world.size
            for name, mean in gradients(model.module).items()
        }
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**14
    check_conserved(found, residuals(handle, world), given)


@pytest.mark.parametrize("collective", [sparse_allreduce, blocking])
@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("kind", ["none", "find_unused_parameters", "static_graph"])
def test_a_step_that_is_refused_raises_from_backward_and_the_model_goes_on(
    world, collective, steps, kind
):
    """A collective that blocks raises from the hook of a bucket, which is not the last one."""
    settings = {} if kind == "none" else {kind: True}
    model, handle = attached(world, settings, collective=collective)
    for step in range(steps):
        backward(model, world, step)
    before = handle.state_dict()
    with pytest.raises(ValueError if world.rank == 0 else CollectiveError):
        backward(model, world, 3, scale=math.inf if world.rank == 0 else 1)
    assert all(np.isnan(mean).all() for mean in gradients(model.module).values())
    after = handle.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    for step in (4, 5):
        backward(model, world, step)
    assert handle.exchange.steps == steps + 2
    assert all(np.isfinite(mean).all() for mean in gradients(model.module).values())


def test_the_scaler_skips_a_step_with_infinities_on_all_ranks(world):
    scaler, model = torch.amp.GradScaler("cpu", init_scale=4.0), wrapped(Weighted())
    exchange = GradientExchange(world, TopK(0.1), nonfinite="skip")
    attach(model, exchange, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    for step, bad in enumerate([False, True, False]):
        optimizer.zero_grad()
        before = [each.detach().clone() for each in model.parameters()]
        loss = model(inputs_of(step, world.rank)) * (
            math.inf if bad and world.rank == 1 else 1
        )
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        same = all(
            torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)
        )
        assert (same, exchange.finite) == (bad, not bad)
    assert (scaler.get_scale(), exchange.steps) == (2.0, 2)
    assert have_same_bits(model, world)


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", enabled=False)])
@pytest.mark.parametrize("views", [False, True])
def test_a_skipped_step_leaves_no_gradients_where_no_scaler_looks_for_nan(
    world, views, scaler
):
    """AdamW with weight decay and momentum passes over the parameters, and the next step is a usual one."""
    model = wrapped(Weighted(), gradient_as_bucket_view=views)
    exchange = GradientExchange(world, TopK(0.1), nonfinite="skip")
    attach(model, exchange, scaler=scaler)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for step, bad in enumerate([False, True, False]):
        optimizer.zero_grad()
        before = [each.detach().clone() for each in model.parameters()]
        (
            model(inputs_of(step, world.rank))
            * (math.inf if bad and world.rank == 1 else 1)
        ).backward()
        assert [each.grad is None for each in model.parameters()] == [bad] * len(SIZES)
        optimizer.step()
        same = all(
            torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)
        )
        assert (same, exchange.finite) == (bad, not bad)
    assert exchange.skipped == 1
    assert all(each.isfinite().all() for each in model.parameters())
    assert have_same_bits(model, world)


METHODS = {
    "topk": lambda comm: GradientExchange(comm, TopK(0.1), small=0),
    "small": lambda comm: GradientExchange(comm, TopK(0.1), small=4500),
    "bits=4": lambda comm: GradientExchange(comm, bits=4),
    "bits=2": lambda comm: GradientExchange(comm, bits=2),
    "momentum": lambda comm: GradientExchange(comm, TopK(0.1), MomentumCorrection(0.9)),
    "skip": lambda comm: GradientExchange(comm, bits=4, nonfinite="skip"),
}


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_frozen_layer_does_not_move_and_thaws(world, method, views):
    """Its residual and its gradient stay as they are, also in a step that is skipped, and with a clip and a scaler."""
    model = wrapped(
        Weighted(), find_unused_parameters=True, gradient_as_bucket_view=views
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=3.0, enabled=method != "skip")
    handle = attach(model, METHODS[method](world), clip=100.0, scaler=scaler)
    optimizer, frozen, five = (
        torch.optim.SGD(model.parameters(), 0.1),
        model.module.branch,
        torch.full((4000,), 5.0),
    )
    for step in range(9):
        optimizer.zero_grad()
        is_frozen, before = 2 <= step < 6, frozen.detach().clone()
        frozen.requires_grad_(not is_frozen)
        residual = handle.state_dict().get("branch/feedback/residual")
        frozen.grad = five.clone() if is_frozen else None
        scale = math.inf if method == "skip" and step == 3 and world.rank == 1 else 1
        scaler.scale(model(inputs_of(step, world.rank)) * scale).backward()
        if is_frozen:
            assert torch.equal(frozen.grad, five)
            assert torch.equal(
                handle.state_dict()["branch/feedback/residual"], residual
            )
            frozen.grad = None  # else SGD would use it
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(frozen.detach(), before) == is_frozen
    assert handle.exchange.steps == 9 - handle.exchange.skipped
    assert have_same_bits(model, world)


def test_a_layer_that_only_one_rank_froze_raises_on_all(world):
    model, handle = attached(world, {"find_unused_parameters": True})
    for step in range(4):
        odd = step % 2 == 1
        model.module.branch.requires_grad_(not (odd and world.rank == 0))
        with (
            pytest.raises(CollectiveError, match=r"hold\(branch\).* on rank 0")
            if odd
            else nullcontext()
        ):
            backward(model, world, step)
    assert handle.exchange.steps == 2
    assert have_same_bits(model, world)


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, inputs):
        """Return what the inner module returns."""
        return self.inner(inputs)


def compiled(module):
    return torch.compile(module, backend="eager")


def test_a_model_that_is_frozen_as_a_whole_for_a_while_goes_on(world):
    """As a discriminator while the generator is trained: its forward pass is part of another model's step."""
    model, handle = attached(world)
    backward(model, world, 0)
    before = handle.state_dict()
    model.requires_grad_(False)
    inputs = {
        name: values.requires_grad_()
        for name, values in inputs_of(1, world.rank).items()
    }
    model(inputs).backward()
    assert all(values.grad is not None for values in inputs.values())
    assert all(
        torch.equal(before[key], value) for key, value in handle.state_dict().items()
    )
    model.requires_grad_(True)
    backward(model, world, 1)
    assert handle.exchange.steps == 2


@pytest.mark.parametrize(
    "wrap", [compiled, Wrapper, lambda module: compiled(Wrapper(module))]
)
def test_wrappers_change_neither_means_nor_names(world, wrap):
    model, plain = (
        wrap(DistributedDataParallel(compiled(Weighted()))),
        wrapped(Weighted()),
    )
    handles = [
        attach(each, GradientExchange(world, TopK(0.1))) for each in (model, plain)
    ]
    for step in range(2):
        for each in (model, plain):
            backward(each, world, step)
    assert handles[0].state_dict().keys() == handles[1].state_dict().keys()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


def assign(model):
    model.load_state_dict(
        {name: each.clone() for name, each in model.state_dict().items()}, assign=True
    )


def replace(model):
    model.module.inner.a = nn.Parameter(torch.ones(3000))


def replace_module(model):
    model.module.inner = Weighted()


def add(model):
    model.module.inner.head = nn.Linear(2, 2)


def thaw(model):
    model.module.inner.bias.requires_grad_(True)


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("change", [assign, replace, replace_module, add, thaw])
def test_other_parameters_than_those_attached_raise_on_all_ranks(
    world, change, everywhere, unused
):
    """Before a gradient is exchanged; the model can be wrapped and attached again."""
    if unused and not everywhere and change in (assign, replace_module):
        pytest.skip("DDP's own sum waits for this rank: the job ends (test_scripts.py)")
    module = Wrapper(Weighted())
    module.inner.bias.requires_grad_(False)
    model = wrapped(module, find_unused_parameters=unused)
    handle = attach(model, GradientExchange(world, TopK(0.1)))
    backward(model, world, 0)
    if here := everywhere or world.rank == 1:
        change(model)
    name = {add: "inner.head.weight", thaw: "inner.bias"}.get(change, "inner.a")
    with pytest.raises(
        ValueError if here else CollectiveError,
        match=f"{name}'.*: wrap it in Distributed.* again",
    ):
        backward(model, world, 1)
    assert handle.exchange.steps == 1
    if everywhere:
        model = wrapped(module, find_unused_parameters=True)
        attach(model, GradientExchange(world, TopK(0.1)))
        backward(model, world, 2)


def test_a_frozen_layer_for_which_ddp_waits_is_refused(world):
    model, _ = attached(world)
    backward(model, world, 0)
    model.module.bias.requires_grad_(False)
    with pytest.raises(
        ValueError,
        match=r"'bias' is frozen, and DDP waits for its gradient.*find_unused_parameters=True",
    ):
        backward(model, world, 1)


def test_a_parameter_unfrozen_before_attach_is_refused(world):
    module = Weighted()
    module.bias.requires_grad_(False)
    model = wrapped(module)
    module.bias.requires_grad_(True)
    with pytest.raises(
        ValueError,
        match=r"'bias' did not require a gradient when DistributedDataParallel was made",
    ):
        attach(model, GradientExchange(world, TopK(0.1)))


def test_a_layer_beside_ddp_is_refused(world):
    """The ranks would train it apart."""
    model = nn.Sequential(wrapped(Weighted()), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"'1\.weight'.* outside Distributed"):
        attach(model, GradientExchange(world, TopK(0.1)))
    model[1].requires_grad_(False)
    attach(model, GradientExchange(world, TopK(0.1)))


def interrupt(model, comm, step):
    """Take a step that an error of rank 0 in its backward pass interrupts; the others have to raise it at its end."""

    def fail(gradient):
        raise MemoryError("no room")

    if comm.rank > 0:
        return backward(model, comm, step)
    hook = model.module.b.register_hook(fail)
    with pytest.raises(MemoryError, match="no room"):
        backward(model, comm, step)
    hook.remove()
    return model(inputs_of(step + 1, comm.rank))


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("steps", [0, 2])
def test_after_an_interrupted_backward_pass_the_next_forward_pass_names_the_remedy(
    world, steps, views
):
    """Which works: the model is wrapped again, the exchange goes on as if there had been no such step."""
    lines = (
        "state = handle.state_dict()",
        "model = DistributedDataParallel(model.module)",
        "handle = attach(model, new_exchange)",
        "handle.load_state_dict(state)",
    )
    assert all(f"`{line}`" in PAGE for line in lines)
    settings = {"gradient_as_bucket_view": views}
    (model, handle), (twin, _) = attached(world, settings), attached(world, settings)
    for step in range(steps):
        backward(model, world, step)
        backward(twin, world, step)
    before = handle.state_dict()
    here = world.rank == 0
    with pytest.raises(
        RuntimeError if here else CollectiveError,
        match=r"interrupted the last backward pass.*attach it with a new exchange",
    ):
        interrupt(model, world, steps)
    after = handle.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    if here:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="interrupted"):
                model(inputs_of(0, world.rank))
        with torch.no_grad():
            model(inputs_of(0, world.rank))
    names = {"model": model, "handle": handle, "attach": attach}
    names["new_exchange"] = GradientExchange(world, TopK(0.1))
    names["DistributedDataParallel"] = partial(wrapped, **settings)
    exec("\n".join(lines), names)
    again, handle = names["model"], names["handle"]
    for step in (7, 8):
        backward(again, world, step)
        backward(twin, world, step)
    assert handle.exchange.steps == steps + 2
    for name, mean in gradients(again.module).items():
        np.testing.assert_array_equal(mean, gradients(twin.module)[name])


class Encoded(nn.Module):
    """A model in DDP whose inputs are those of a layer outside of it."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Parameter(torch.ones(3000))
        self.ddp = wrapped(Weighted())

    def forward(self, inputs):
        """Return the outputs of the model in DDP."""
        return self.ddp(inputs | {"a": inputs["a"] * self.encoder})


def test_an_error_after_the_step_was_kept_is_told_by_the_next_forward_pass(world):
    """In a layer before DDP, which the backward pass reaches after DDP has exchanged: the others keep the step."""
    model = Encoded()
    handle = attach(model.ddp, GradientExchange(world, TopK(0.1)))
    hook = model.encoder.register_hook(
        lambda gradient: 1 / 0 if world.rank == 0 else gradient
    )
    with pytest.raises(ZeroDivisionError) if world.rank == 0 else nullcontext():
        model(inputs_of(0, world.rank)).backward()
    hook.remove()
    assert handle.exchange.steps == 1
    if world.rank == 0:
        with pytest.raises(
            RuntimeError, match=r"has kept its step, number 1: .* differ"
        ):
            model(inputs_of(1, world.rank))
    state = handle.state_dict()
    model.ddp = wrapped(model.ddp.module)
    handle = attach(model.ddp, GradientExchange(world, TopK(0.1)))
    handle.load_state_dict(state)
    model(inputs_of(1, world.rank)).backward()
    assert handle.exchange.steps == 2


@pytest.mark.parametrize("bad", ["none", "first", "second", "both"])
def test_two_models_in_one_backward_pass_fail_and_go_on_separately(world, bad):
    pairs = [attached(world, {"find_unused_parameters": True}) for _ in range(2)]
    fails = [bad in ("first", "both"), bad in ("second", "both")]

    def loss(step, scales):
        outputs = [model(inputs_of(step, world.rank)) for model, _ in pairs]
        return sum(out * scale for out, scale in zip(outputs, scales, strict=True))

    scales = [math.inf if each and world.rank == 0 else 1 for each in fails]
    kind = ValueError if world.rank == 0 else CollectiveError
    with pytest.raises(kind) if any(fails) else nullcontext():
        loss(0, scales).backward()
    for model, _ in pairs:
        model.zero_grad()
    loss(1, [1, 1]).backward()
    assert [handle.exchange.steps for _, handle in pairs] == [
        2 - each for each in fails
    ]
    for model, _ in pairs:
        assert all(np.isfinite(mean).all() for mean in gradients(model.module).values())


@pytest.mark.parametrize("wrap", [Wrapper, compiled])
def test_the_model_in_ddp_may_be_called_without_what_wraps_it(world, wrap):
    """Frozen layers do not move, and replaced parameters raise."""
    inner = wrapped(Weighted(), find_unused_parameters=True)
    handle = attach(wrap(inner), GradientExchange(world, TopK(0.1), small=0))
    backward(inner, world, 0)
    inner.module.branch.requires_grad_(False)
    residual = handle.state_dict()["branch/feedback/residual"]
    backward(inner, world, 1)
    assert inner.module.branch.grad is None
    assert torch.equal(handle.state_dict()["branch/feedback/residual"], residual)
    inner.module.a = nn.Parameter(torch.ones(3000))
    with pytest.raises(ValueError, match="replaced are 'a'"):
        backward(inner, world, 2)


def back_and_forth(model):
    return model.double().float()


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model.double(), r"replaced are 'a', .*by .* \.double\(\)"),
        (lambda model: model.bfloat16(), r"replaced are 'a', .*by .* \.double\(\)"),
        (back_and_forth, "exchanged no gradients .* dtype was changed"),
    ],
    ids=["double", "bfloat16", "and back"],
)
def test_another_dtype_after_attach_raises_on_all_ranks(
    world, change, words, unused, everywhere
):
    """DDP alone averages no gradient from then on, without a word."""
    if unused and not everywhere:
        pytest.skip("DDP's own sum waits for this rank: the job ends (test_scripts.py)")
    model, handle = attached(world, {"find_unused_parameters": unused})
    backward(model, world, 0)
    if here := everywhere or world.rank == 0:
        change(model)
    with pytest.raises(
        (ValueError, RuntimeError) if here else CollectiveError, match=words
    ):
        backward(model, world, 1)
    assert handle.exchange.steps == 1
    if change is back_and_forth:
        state = handle.state_dict()
        again = wrapped(model.module)
        handle = attach(again, GradientExchange(world, TopK(0.1)))
        handle.load_state_dict(state)
        backward(again, world, 2)
        assert handle.exchange.steps == 2


@pytest.mark.parametrize(
    ("first", "other", "words"),
    [
        ({"clip": 1.0}, {}, "'clip' is 1.0 on rank 0, and None on rank"),
        ({"clip": 1.0}, {"clip": 2.0}, "'clip' is 1.0 on rank 0, and 2.0 on rank"),
        ({}, {"scaler": True}, "'scaler' is none on rank 0, and one that is enabled"),
    ],
)
def test_arguments_of_attach_that_differ_between_ranks_raise(
    world, first, other, words
):
    terms = first if world.rank == 0 else other
    if "scaler" in terms:
        terms = {"scaler": torch.amp.GradScaler("cpu")}
    with pytest.raises(CollectiveError, match=words):
        attach(wrapped(Weighted()), GradientExchange(world, TopK(0.1)), **terms)
    disabled = {"scaler": torch.amp.GradScaler("cpu", enabled=False)}
    model = wrapped(Weighted())
    attach(
        model,
        GradientExchange(world, TopK(0.1)),
        **(disabled if world.rank == 0 else {}),
    )
    backward(model, world, 0)


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("clears", [False, True])
def test_an_optimizer_that_steps_in_the_backward_pass_raises_on_all_ranks(
    world, clears, everywhere
):
    """It would step with this rank's own gradient; under DDP alone it does."""
    model, handle = attached(world)
    here = everywhere or world.rank == 0

    def step(parameter):
        torch.optim.SGD([parameter], 0.1).step()
        if clears:
            parameter.grad = None

    for parameter in model.parameters() if here else []:
        parameter.register_post_accumulate_grad_hook(step)
    with pytest.raises(
        RuntimeError if here else CollectiveError,
        match=r"an optimiser's step\(\) after backward",
    ):
        backward(model, world, 0)
    assert handle.exchange.steps == 0


@pytest.mark.parametrize("unused", [False, True])
def test_a_forward_pass_of_one_rank_alone_does_not_communicate(world, unused):
    """Also after a layer was frozen, or parameters replaced, which the backward pass looks at."""
    model, _ = attached(world, {"find_unused_parameters": unused})
    for step in range(2):
        backward(model, world, step)
    model.module.branch.requires_grad_(False)
    if world.rank == 0:
        model(inputs_of(2, world.rank))
    world.Barrier()
    if unused:
        backward(model, world, 3)
    assign(model)
    if world.rank == 0:
        model(inputs_of(4, world.rank))
    world.Barrier()
    with pytest.raises(ValueError, match="replaced are"):
        backward(model, world, 5)


class Opaque(Wrapper):
    def forward(self, inputs):
        """Return an object in which nobody looks for tensors."""
        return SimpleNamespace(loss=self.inner(inputs))


def test_outputs_in_an_object_that_is_not_looked_into(world):
    model = wrapped(Opaque(Weighted()))
    handle = attach(model, GradientExchange(world, TopK(0.1)))
    kinds = nullcontext, pytest.raises, nullcontext, nullcontext
    for step, context in enumerate(kinds):
        bad = context is pytest.raises
        model.zero_grad()
        loss = model(inputs_of(step, world.rank)).loss
        with context((ValueError, CollectiveError)) if bad else context():
            (loss * (math.inf if bad and world.rank == 0 else 1)).backward()
    assert handle.exchange.steps == 3


def test_gradients_of_the_inputs_alone_are_no_step(world):
    """As of a gradient penalty; a second pass through a graph, which DDP does not average, raises."""
    model, handle = attached(world)
    inputs = {
        name: values.requires_grad_()
        for name, values in inputs_of(0, world.rank).items()
    }
    backward(model, world, 0)
    torch.autograd.grad(model(inputs), [*inputs.values()])
    backward(model, world, 1)
    assert handle.exchange.steps == 2
    loss = model(inputs_of(2, world.rank))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second pass after one forward pass"):
        loss.backward()


def test_a_residual_in_the_gradients_array_is_refused(world):
    exchange = GradientExchange(world, TopK(0.1), ErrorFeedback(in_place=True))
    with pytest.raises(ValueError, match=r"in_place=True.*\.grad receives the mean"):
        attach(wrapped(Weighted()), exchange)


def test_the_first_skipped_step_without_a_scaler_says_that_attach_takes_one(world):
    """Of torch's own error nobody learns that; whether a scaler is there cannot be seen, as after gc.freeze()."""
    model = wrapped(Weighted())
    exchange = GradientExchange(world, TopK(0.1), nonfinite="skip")
    attach(model, exchange)
    with pytest.warns(RuntimeWarning, match=r"use attach\(..., scaler=scaler\)"):
        backward(model, world, 0, scale=math.inf)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(model, world, 1, scale=math.inf)
    assert exchange.skipped == 2


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("settings", [{}, {"static_graph": True}])
def test_a_bad_sample_is_left_out_as_the_page_says(world, settings, zero):
    """The rank takes another one, or sends a loss of zero; each time nobody waits, and nothing is lost."""
    model = wrapped(
        nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3000, bias=False)), **settings
    )
    handle = attach(model, GradientExchange(world, Dense(), NoFeedback()))
    for step in range(4):
        bad = world.rank == 0 and step % 2 == 0
        model.zero_grad()
        loss = model(torch.ones(5, 4) if bad else torch.randn(5, 4)).sum()
        (0 * loss if bad and zero else loss).backward()
        everyone = world.allgather(model.module[1].weight.grad.numpy().tobytes())
        assert len({*everyone}) == 1
    assert handle.exchange.steps == 4


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: saved(model, weights_only=False)]
)
def test_a_copy_of_a_model_has_no_hook_and_may_be_attached(world, copied):
    model, handle = attached(world)
    backward(model, world, 0)
    ema = torch.optim.swa_utils.AveragedModel(model)
    ema.update_parameters(model)
    twin = copied(model)
    backward(twin, world, 1)
    np.testing.assert_array_equal(
        gradients(twin.module)["a"] * world.size, total(world, 1)["a"]
    )
    other = attach(twin, GradientExchange(world, TopK(0.1)))
    backward(twin, world, 2)
    assert (handle.exchange.steps, other.exchange.steps) == (1, 1)


def test_a_copy_of_a_module_that_holds_its_handle_or_exchange(world):
    """A handle is left behind; an exchange cannot be, and the error names the remedy."""
    model, handle = attached(world)
    holder = Wrapper(model)
    holder.handle = handle
    ema = torch.optim.swa_utils.AveragedModel(holder)
    backward(holder, world, 0)
    ema.update_parameters(holder)
    assert handle.exchange.steps == 1
    holder.exchange = handle.exchange
    for copied in (torch.optim.swa_utils.AveragedModel, copy.deepcopy, saved):
        with pytest.raises(
            TypeError, match=r"save its state_dict\(\), and keep it outside"
        ):
            copied(holder)


class Unusual(nn.Module):
    """With an embedding of sparse gradients, or a complex parameter."""

    def __init__(self, is_sparse):
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=is_sparse)
        if not is_sparse:
            self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("is_sparse", "words"),
    [
        (True, r"table is Embedding\(sparse=True\).*sparse=False"),
        (False, "'phase' is torch.complex64.*view_as_real"),
    ],
)
def test_parameters_that_cannot_be_exchanged_are_refused_by_name(
    world, is_sparse, words
):
    with pytest.raises(TypeError, match=words):
        attach(wrapped(Unusual(is_sparse)), GradientExchange(world, TopK(0.1)))


def test_the_python_reducer_is_refused(world):
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = wrapped(Weighted())
    with pytest.raises(
        ValueError,
        match="optimize_ddp = 'python_reducer', which calls no communication hook",
    ):
        attach(model, GradientExchange(world, TopK(0.1)))


def saved(state, **how):
    """Return what `torch.load` returns with its defaults."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, **how)


def test_a_run_continues_bitwise_from_a_checkpoint(world):
    model, handle = attached(world)
    for step in range(3):
        backward(model, world, step)
    state = saved({"model": model.state_dict(), "exchange": handle.state_dict()})
    assert all(type(value) is torch.Tensor for value in state["exchange"].values())
    model2, handle2 = attached(world)
    model2.load_state_dict(state["model"])
    handle2.load_state_dict(state["exchange"])
    for each in (model, model2):
        backward(each, world, 3)
    for name, mean in gradients(model.module).items():
        np.testing.assert_array_equal(mean, gradients(model2.module)[name])


def test_a_state_is_loaded_with_other_settings_where_that_is_wanted(world):
    model, handle = attached(world)
    backward(model, world, 0)
    state, (_, other) = (
        saved(handle.state_dict()),
        attached(world, compressor=TopK(0.2)),
    )
    with pytest.raises(ValueError, match="load with same_settings=False"):
        other.load_state_dict(state)
    other.load_state_dict(state, same_settings=False)
    np.testing.assert_array_equal(
        residuals(other, world)["a"], residuals(handle, world)["a"]
    )


def test_a_state_of_a_loop_over_the_wrapped_model_is_taken(world):
    """Its names begin with `module.`; small tensors are one vector, whose names plus signs join."""
    model = wrapped(Weighted())
    exchange = GradientExchange(world, TopK(0.1), small=4001)
    exchange.register(dict(reversed([*model.named_parameters()])))
    exchange(
        {f"module.{name}": values for name, values in inputs_of(0, world.rank).items()}
    )
    loaded = attach(wrapped(Weighted()), GradientExchange(world, TopK(0.1), small=4001))
    loaded.load_state_dict(saved(to_tensors(exchange.state_dict())))
    assert torch.count_nonzero(loaded.state_dict()["b/feedback/residual"])
    with pytest.raises(ValueError, match="expected"):
        loaded.load_state_dict({"other/feedback/residual": torch.zeros(3)})


def test_a_future_for_a_bucket_on_a_device_names_the_device(monkeypatch):
    """Torch refuses a result on a device that the future does not name: there is none here, so its argument is seen."""
    from collectives.torch import ddp

    monkeypatch.setattr(torch.futures, "Future", lambda devices: devices)
    assert ddp._future(SimpleNamespace(is_cuda=True, device="cuda:1")) == ["cuda:1"]
    assert ddp._future(torch.zeros(3)) is None


def test_bytes_and_numbers_of_a_state_survive():
    state = {
        "header/json": np.frombuffer("é".encode(), np.uint8),
        "x/rank": np.array(3),
        "y": np.array(0.5),
        "z": np.zeros(0),
    }
    with pytest.raises(TypeError, match="the state is NoneType: expected arrays"):
        to_arrays(None)
    with torch.device("meta"):  # the default device of new tensors
        tensors = to_tensors(state)
    back = to_arrays(saved(tensors))
    assert back.keys() == state.keys()
    for key, value in state.items():
        np.testing.assert_array_equal(back[key], value)
        assert back[key].dtype == value.dtype


def test_a_run_continues_on_another_number_of_ranks(world):
    """Saved by all ranks, continued by half of them: the sum of the residuals stays."""
    model, handle = attached(world)
    for step in range(2):
        backward(model, world, step)
    states = world.allgather(handle.state_dict())
    with pytest.raises(ValueError, match="redistribute_state"):
        attached(world)[1].load_state_dict(states[(world.rank + 1) % world.size])
    before = residuals(handle, world)
    half = world.Split(world.rank % 2, world.rank)
    group, *_ = torch.distributed.new_subgroups_by_enumeration(
        [[*range(0, world.size, 2)], [*range(1, world.size, 2)]]
    )
    model = wrapped(Weighted(), process_group=group)
    handle = attach(model, GradientExchange(half, TopK(0.1)))
    handle.load_state_dict(
        redistribute_state(
            lambda rank: saved(states[rank]),
            world.size,
            half.rank,
            half.size,
        )
    )
    for name, left in residuals(handle, half).items():
        np.testing.assert_array_equal(left, before[name])
    backward(model, half, 2)
    assert handle.exchange.steps == 3


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"clip": 0.0}, "clip is 0.0: expected"),
        ({"clip": math.inf}, "clip is inf: expected"),
        ({"scaler": 65536.0}, "scaler is float: expected"),
    ],
)
def test_a_bad_argument_on_one_rank_raises_on_all(world, terms, words):
    model, exchange = wrapped(Weighted()), GradientExchange(world, TopK(0.1))
    last = world.rank == world.size - 1
    with pytest.raises(
        (ValueError, TypeError) if last else CollectiveError,
        match=words if last else "rank",
    ):
        attach(model, exchange, **(terms if last else {}))
    attach(model, exchange)
    backward(model, world, 0)


def test_what_is_no_model_of_ddp_and_no_exchange(world):
    with pytest.raises(
        TypeError,
        match=r"Weighted with 0 modules .* expected DistributedDataParallel\(model\)",
    ):
        attach(Weighted(), GradientExchange(world, TopK(0.1)))
    with pytest.raises(
        TypeError, match="exchange is TopK: expected an object such as GradientExchange"
    ):
        attach(wrapped(Weighted()), TopK(0.1))


def test_a_process_group_of_other_ranks(world):
    if world.size == 2:
        pytest.skip("needs two groups of two")
    inside, _ = torch.distributed.new_subgroups(world.size // 2)
    between = world.Split(world.rank % (world.size // 2), world.rank)
    with pytest.raises(
        ValueError,
        match=r"group has ranks ., ., and the exchange's communicator ranks ., .:",
    ):
        attach(
            wrapped(Weighted(), process_group=inside),
            GradientExchange(between, TopK(0.1)),
        )


def test_a_process_group_of_another_size(world):
    with pytest.raises(
        ValueError,
        match=r"group has ranks .*, and the exchange's communicator rank .*: start with",
    ):
        attach(wrapped(Weighted()), GradientExchange(MPI.COMM_SELF, TopK(0.1)))


def test_torchrun_is_refused(world, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(world.size + 1))
    with pytest.raises(
        RuntimeError,
        match=r"torchrun says WORLD_SIZE=.* mpirun -n \d python -m collectives.torch",
    ):
        attach(wrapped(Weighted()), GradientExchange(world, TopK(0.1)))


@pytest.mark.parametrize(
    "call",
    [attach, outer_loop, lambda model, exchange: init_process_group(exchange.comm)],
)
def test_ranks_of_mpi_that_torch_does_not_know_are_noticed(world, monkeypatch, call):
    """As under `mpirun -n 2 python train.py` with a script that takes itself for one process."""
    model = wrapped(Weighted())
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 1)
    with pytest.raises(
        RuntimeError,
        match=rf"has 1 process, and MPI {world.size}.* python -m collectives.torch",
    ):
        call(model, GradientExchange(world, TopK(0.1)))


def test_a_second_process_group_is_refused(world):
    with pytest.raises(RuntimeError, match="has a process group already: expected"):
        init_process_group(world)


@pytest.mark.parametrize("address", ["", "node7.invalid"])
def test_a_store_that_cannot_listen_raises_on_all_ranks(world, monkeypatch, address):
    """It listens at MASTER_ADDR, or on one node at an address that always resolves."""

    def refuse(host, *_, is_master, **__):
        assert is_master, (
            "a rank has waited for rank 0, and did not learn that it failed"
        )
        raise OSError(f"no free port at {host}")

    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.distributed, "TCPStore", refuse)
    with pytest.raises(
        OSError if world.rank == 0 else CollectiveError,
        match=f"no free port at {address or '127.0.0.1'}",
    ):
        init_process_group(world)


def test_a_second_hook_and_a_used_exchange_are_refused(world):
    model, handle = attached(world)
    backward(model, world, 0)
    with pytest.raises(ValueError, match="the model is already attached"):
        attach(model, GradientExchange(world, TopK(0.1)))
    hooked = wrapped(Weighted())
    hooked.register_comm_hook(None, lambda state, bucket: bucket)
    with pytest.raises(
        ValueError, match="has a communication hook, and DDP takes one only"
    ):
        attach(hooked, GradientExchange(world, TopK(0.1)))
    with pytest.raises(
        RuntimeError, match="the exchange is in use: expected a new one; load the state"
    ):
        attach(wrapped(Weighted()), handle.exchange)


def test_local_steps_of_a_module(world):
    network = nn.Linear(40, 100)
    with torch.no_grad():
        network.weight.fill_(1)
        network.bias.fill_(1)
    outer = outer_loop(network, GradientExchange(world, Dense(), NoFeedback()), every=2)
    for _ in range(2):
        network.weight.data = network.weight.data - world.rank  # in other memory
        outer.step()
    assert have_same_bits(network, world)
    assert float(network.weight.detach()[0, 0]) == 1 - (world.size - 1)


def test_local_steps_are_weighted_by_the_tokens_of_a_rank(world):
    """By the line of docs/slow_links.md before a round: progress is 3 + its rank, of as many tokens as its rank."""
    network = nn.Linear(40, 100)
    nn.init.ones_(network.weight)
    nn.init.ones_(network.bias)
    outer = outer_loop(network, GradientExchange(world, Dense(), NoFeedback()), every=2)
    share = world.rank * world.size / world.allreduce(world.rank)
    named = dict(network.named_parameters())
    for step in range(2):
        for weight in named.values():
            weight.data += (3 + world.rank) / 2
        if step == 1:
            for name, start in outer.anchor.items():
                named[name].data.lerp_(torch.tensor(start), 1 - share)
        outer.step()
    tokens = range(world.size)
    expected = 1 + sum(each * (3 + each) for each in tokens) / sum(tokens)
    assert have_same_bits(network, world)
    for weight in named.values():
        torch.testing.assert_close(weight.data, torch.full_like(weight, expected))


def test_local_steps_of_two_models_whose_optimizers_step_one_after_the_other(world):
    """As a generator and a discriminator, which is frozen whenever a round starts."""
    networks = [nn.Linear(40, 100) for _ in range(2)]
    for network in networks:
        for parameter in network.parameters():
            nn.init.ones_(parameter)
    loops = [
        outer_loop(network, GradientExchange(world, Dense(), NoFeedback()), every=2)
        for network in networks
    ]
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in networks]
    for _ in range(6):
        for network, loop, optimizer in zip(networks, loops, optimizers, strict=True):
            network.requires_grad_(True)
            optimizer.zero_grad()
            network(torch.full((1, 40), 1.0 + world.rank)).sum().backward()
            optimizer.step()
            network.requires_grad_(network is networks[0])
            loop.step()
    assert loops[0].rounds == loops[1].rounds == 3
    for network in networks:
        assert have_same_bits(network, world)
    assert torch.equal(networks[0].weight, networks[1].weight)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("steps", ["one", "none", "at rate 0 before"])
def test_local_steps_begin_at_the_parameters_that_were_loaded_after_the_loop_was_made(
    world, same, steps
):
    """Else the first round would send their change in a few bits, and leave most of it in the residual.

    A GradScaler takes no first step if its scale overflows; torch.distributed.checkpoint
    takes one at rate 0, on gradients of zeros, before it loads.
    """
    torch.manual_seed(0)
    network, saved = nn.Linear(40, 100), nn.Linear(40, 100).state_dict()
    outer = outer_loop(network, GradientExchange(world, bits=4), every=1)
    if steps == "at rate 0 before":
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        torch.optim.SGD(network.parameters(), 0.0).step()
        network.zero_grad()
    if not same and world.rank == 1:
        saved["bias"] += 1
    network.load_state_dict(saved)
    optimizer = torch.optim.SGD(network.parameters(), 0.0)
    network(torch.ones(1, 40)).sum().backward()
    if steps == "one":
        optimizer.step()
    if not same:
        with pytest.raises(CollectiveError, match=r"the parameters of rank 1 differ"):
            outer.step()
        return
    outer.step()
    for name, each in network.state_dict().items():
        assert torch.equal(each, saved[name])


@pytest.mark.parametrize("model", [None, [1.0], {"a": torch.ones(3)}, nn.Linear])
def test_local_steps_of_what_is_no_module_raise_on_all_ranks(world, model):
    here = world.rank == 0
    with pytest.raises(
        TypeError if here else CollectiveError, match=r"expected a torch.nn.Module"
    ):
        outer_loop(
            model if here else nn.Linear(2, 2), GradientExchange(world, TopK(0.1))
        )


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        nn.Sequential,
        partial(torch.compile, backend="eager"),
    ],
)
def test_local_steps_of_a_model_that_averages_gradients_are_refused(world, wrap):
    with pytest.raises(
        ValueError, match="again: pass the module without DistributedDataParallel"
    ):
        outer_loop(
            wrap(wrapped(Wrapper(Weighted()))), GradientExchange(world, TopK(0.1))
        )


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize(
    "inside",
    [
        lambda model: model.module,
        lambda model: nn.Sequential(model.module.inner),
    ],
)
def test_local_steps_of_a_module_in_ddp_are_refused_when_ddp_calls_it(
    world, inside, freeze
):
    model = wrapped(Wrapper(Weighted()))
    if freeze:
        gc.collect()
        gc.freeze()
    try:
        outer_loop(inside(model), GradientExchange(world, TopK(0.1)))
        with pytest.raises(
            ValueError, match="again: pass the module without DistributedDataParallel"
        ):
            model(inputs_of(0, world.rank))
        # alone it takes local steps
        model.module(inputs_of(0, world.rank)).backward()
    finally:
        gc.unfreeze()


def test_a_module_that_was_in_ddp_takes_local_steps_while_its_handle_lives(world):
    model, handle = attached(world)
    module = model.module
    backward(model, world, 0)
    del model
    outer = outer_loop(module, GradientExchange(world, Dense()), every=1)
    module(inputs_of(1, world.rank)).backward()
    assert outer.step()
    assert handle.exchange.steps == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_local_steps_of_a_model_in_channels_last_freeze_a_layer_and_refuse_others(
    world, dtype
):
    network = (
        nn.Sequential(nn.Conv2d(2, 3, 2), nn.Conv2d(3, 4, 2))
        .to(dtype)
        .to(memory_format=torch.channels_last)
    )
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(1)
    network[1].bias.requires_grad_(False)
    outer = outer_loop(network, GradientExchange(world, Dense(), NoFeedback()), every=1)
    for step in (1, 2):
        with torch.no_grad():
            network[0].weight[1] -= 0.5 * world.rank
            network[1].weight -= (0.5 * world.rank) if step == 1 else 0
        outer.step()
        network[1].weight.requires_grad_(False)
    assert have_same_bits(network, world)
    halves = 0.25 * (world.size - 1)
    assert network[0].weight[:, 0, 0, 0].tolist() == [1, 1 - 2 * halves, 1]
    assert set(network[1].weight.flatten().tolist()) == {1 - halves}
    network[1].bias.requires_grad_(True)
    with pytest.raises(
        ValueError,
        match=r"unfrozen or added are '1.bias': make a new exchange and a new loop",
    ):
        outer.step()


def test_local_steps_between_nodes_with_ddp_inside(world):
    """The ranks of a node, two in a row, hold the same parameters; after a round all ranks do."""
    groups = [[first, first + 1] for first in range(0, world.size, 2)]
    inside, _ = torch.distributed.new_subgroups_by_enumeration(groups)
    network = nn.Linear(40, 100, bias=False)
    with torch.no_grad():
        network.weight.fill_(1)
    model = DistributedDataParallel(network, process_group=inside)
    between = world.Split(world.rank % 2, world.rank)
    outer = outer_loop(model, GradientExchange(between, Dense(), NoFeedback()), every=2)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.full((1, 40), float(world.rank))).sum().backward()
        optimizer.step()
        assert outer.step() == (step == 1)
    assert have_same_bits(network, world)
    assert float(network.weight.detach()[0, 0]) == 1 - (world.size - 1)
