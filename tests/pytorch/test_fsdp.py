"""`collectives.torch.attach_fsdp`: an FSDP2 model, sharded over two ranks; the other ranks are its replicas."""

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-torch")
from models import blocking  # noqa: E402
from mpi4py import MPI  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from collectives import GradientExchange, sparse_allreduce  # noqa: E402
from collectives.faults.errors import CollectiveError  # noqa: E402
from collectives.torch import attach_fsdp, outer_loop  # noqa: E402
from mpicomp import Dense, NoFeedback, TopK  # noqa: E402

pytestmark = pytest.mark.mpi


class Network(nn.Module):
    """Three layers, of which a step may leave the middle one out."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (
            nn.Linear(40, 100),
            nn.Linear(100, 100),
            nn.Linear(100, 5),
        )

    def forward(
        self,
        inputs,
        uses_middle=True,
        run=lambda rest, hidden: rest(hidden),
        form=lambda outputs: outputs,
    ):
        """Return the outputs in a form. run: calls all but the first layer."""

        def rest(hidden):
            return self.last(self.middle(hidden).relu() if uses_middle else hidden)

        return form(run(rest, self.first(inputs).relu()))


@pytest.fixture(scope="module")
def mesh(world):
    return init_device_mesh(
        "cpu", (world.size // 2, 2), mesh_dim_names=("replica", "shard")
    )


def sharded(mesh, dtype=torch.float32):
    torch.manual_seed(0)
    model, policy = (
        Network().to(dtype),
        MixedPrecisionPolicy(reduce_dtype=torch.float32),
    )
    for layer in (model.first, model.middle, model.last):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def between_replicas(world, mesh):
    return world.Split(mesh.get_local_rank("shard"), world.rank)


def shards(model):
    """Return copies of this rank's gradient shards, by name; zeros where there is none."""
    return {
        name: (torch.zeros_like(each) if each.grad is None else each.grad)
        .to_local()
        .numpy()
        .copy()
        for name, each in model.named_parameters()
    }


def batch(world, step):
    return torch.randn(
        8, 40, generator=torch.Generator().manual_seed(100 * step + world.rank)
    )


def test_a_dense_exchange_trains_as_hybrid_sharding_alone(world, mesh):
    def train(model):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for step in range(4):
            optimizer.zero_grad()
            for part in (0, 1):
                model.set_requires_gradient_sync(part == 1)
                model(batch(world, 2 * step + part)).square().mean().backward()
            optimizer.step()
        return [each.detach().full_tensor() for each in model.parameters()]

    ours = sharded(mesh["shard"])
    exchange = GradientExchange(between_replicas(world, mesh), Dense(), NoFeedback())
    attach_fsdp(ours, exchange)
    mine, theirs = train(ours), train(sharded(mesh))
    assert exchange.steps == 4
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert (
        len(
            set(
                world.allgather(
                    torch.cat([each.reshape(-1) for each in mine]).numpy().tobytes()
                )
            )
        )
        == 1
    )


@dataclass
class Output:
    """Outputs of a model, in a dict in a list."""

    parts: list

    @classmethod
    def of(cls, outputs):
        """Return the outputs in this form."""
        return cls([{"outputs": outputs}])


def accumulated(model, loss):
    for part in (0, 1):
        model.set_requires_gradient_sync(part == 1)
        loss().backward()


REENTRANT = {"run": partial(checkpoint, use_reentrant=True)}
CALLS = {  # the arguments of the model, and what calls backward
    "alone": ({}, lambda model, loss: loss().backward()),
    "reentrant": (REENTRANT, lambda model, loss: loss().backward()),
    "in a dataclass": (
        REENTRANT | {"form": Output.of},
        lambda model, loss: loss().backward(),
    ),
    "checkpointed": (
        {"run": partial(checkpoint, use_reentrant=False)},
        lambda model, loss: loss().backward(),
    ),
    "several forward passes": ({}, lambda model, loss: (loss() + loss()).backward()),
    "the same graph again": (
        {},
        lambda model, loss: [each.backward(retain_graph=True) for each in [loss()] * 2],
    ),
    "accumulated": (REENTRANT, accumulated),
}


@pytest.mark.parametrize("case", CALLS)
def test_nothing_is_lost_between_the_replicas(world, mesh, case):
    """Integers as gradients; a layer that one replica left out counts as zero there."""
    arguments, call = CALLS[case]
    model, reference = sharded(mesh["shard"]), sharded(mesh["shard"])
    comm = between_replicas(world, mesh)
    handle = attach_fsdp(model, GradientExchange(comm, TopK(0.1), small=0))
    found, given = {}, {}
    for step in range(3):
        uses = not (step == 1 and mesh.get_local_rank("replica") == 0)
        inputs = torch.randint(
            -4,
            5,
            (8, 40),
            generator=torch.Generator().manual_seed(step * 8 + world.rank),
        ).float()
        for each in (model, reference):
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.to_local().fill_(1)
            each.zero_grad()

            def loss(each=each, inputs=inputs, uses=uses):
                outputs = each(inputs, uses, **arguments)
                outputs = (
                    outputs.parts[0]["outputs"]
                    if isinstance(outputs, Output)
                    else outputs
                )
                return outputs.sum() * 2  # even: FSDP's mean over two shards is exact

            call(each, loss)
        for name, mean in shards(model).items():
            found[name] = found.get(name, 0) + mean * comm.size
        for name, mine in shards(reference).items():
            given[name] = given.get(name, 0) + comm.allreduce(mine, MPI.SUM)
    state = handle.state_dict()
    for name, parameter in model.named_parameters():
        mine = (
            state[f"{name}/feedback/residual"]
            .reshape(parameter.to_local().shape)
            .numpy()
        )
        np.testing.assert_array_equal(
            found[name] + comm.allreduce(mine, MPI.SUM), given[name], name
        )
    handle.load_state_dict(state)
    assert handle.exchange.steps == 3 * (2 if case == "the same graph again" else 1)


def test_a_layer_that_only_another_replica_used_gets_its_mean(world, mesh):
    model = sharded(mesh["shard"])
    attach_fsdp(
        model, GradientExchange(between_replicas(world, mesh), Dense(), NoFeedback())
    )
    model(
        batch(world, 0), uses_middle=mesh.get_local_rank("replica") == 0
    ).square().mean().backward()
    assert shards(model)["middle.weight"].any()


def test_a_layer_in_bfloat16_that_no_replica_used_has_no_gradient(world, mesh):
    model = sharded(mesh["shard"], torch.bfloat16)
    attach_fsdp(model, GradientExchange(between_replicas(world, mesh), TopK(0.1)))
    model(batch(world, 0).bfloat16(), uses_middle=False).square().mean().backward()
    assert model.middle.weight.grad is None
    assert model.first.weight.grad.to_local().any()


@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_an_optimizer_that_steps_in_the_backward_pass_raises_on_all_ranks(
    world, mesh, is_first, clears
):
    """On one replica, whose parameters would differ from then on; before the hooks of the exchange, or after these."""
    model, exchange = (
        sharded(mesh["shard"]),
        GradientExchange(between_replicas(world, mesh), TopK(0.1)),
    )
    steps_early = mesh.get_local_rank("replica") == 0

    def step(parameter):
        torch.optim.SGD([parameter], 0.1).step()
        if clears:
            parameter.grad = None

    def register():
        for parameter in model.parameters() if steps_early else []:
            parameter.register_post_accumulate_grad_hook(step)

    for call in (register, lambda: attach_fsdp(model, exchange))[
        :: 1 if is_first else -1
    ]:
        call()
    with pytest.raises(
        RuntimeError if steps_early else CollectiveError,
        match=r"an optimiser's step\(\) after backward",
    ):
        model(batch(world, 0)).square().mean().backward()
    assert exchange.steps == 0


def test_parameters_that_fsdp_ignores_get_their_means(world, mesh):
    """Also where a replica has no gradient of them; where gradients accumulate there is no step."""
    torch.manual_seed(0)
    model, replica = Network(), mesh.get_local_rank("replica")
    fully_shard(model, mesh=mesh["shard"], ignored_params={*model.middle.parameters()})
    exchange = GradientExchange(between_replicas(world, mesh), Dense(), NoFeedback())
    attach_fsdp(model, exchange)
    uses, given = replica == 0, []
    model.middle.bias.register_hook(given.append)
    model(batch(world, 0), uses).square().mean().backward()
    mean = sum(
        each
        for each in exchange.comm.allgather(given[0].numpy() if uses else None)
        if each is not None
    )
    np.testing.assert_allclose(
        model.middle.bias.grad, mean / exchange.comm.size, rtol=1e-6
    )
    accumulated(model, lambda: model(batch(world, 1)).square().mean())
    assert exchange.steps == 2


def test_a_frozen_layer_does_not_change_and_goes_on_where_it_stopped(world, mesh):
    model, exchange = (
        sharded(mesh["shard"]),
        GradientExchange(between_replicas(world, mesh), TopK(0.1)),
    )
    handle, optimizer = (
        attach_fsdp(model, exchange),
        torch.optim.SGD(model.parameters(), 0.1),
    )

    def train(step):
        optimizer.zero_grad()
        model(batch(world, step)).square().mean().backward()
        optimizer.step()
        state = {
            name: each.numpy().tobytes() for name, each in handle.state_dict().items()
        }
        weight = model.middle.weight.to_local().detach().numpy().tobytes()
        return (
            weight,
            state["middle.weight/feedback/residual"],
            state["first.weight/feedback/residual"],
        )

    train(0)
    before = train(1)
    model.middle.requires_grad_(False)
    for step in (2, 3):
        weight, residual, other = train(step)
        assert (weight, residual) == before[:2]
        assert other != before[2]
    model.middle.requires_grad_(True)
    assert all(now != then for now, then in zip(train(4), before, strict=True))
    assert exchange.steps == 5


def unfreeze(model):
    model.middle.requires_grad_(True)


def assign(model):
    model.load_state_dict(
        {name: each.clone() for name, each in model.state_dict().items()}, assign=True
    )


@pytest.mark.parametrize(
    ("change", "match"),
    [(unfreeze, "'middle.weight', 'middle.bias': call"), (assign, r"\(assign=True\)")],
)
def test_other_parameters_raise_on_all_ranks_and_the_remedy_works(
    world, mesh, change, match
):
    """At the end of a backward pass, where no rank of a replica waits for another one."""
    model, comm = sharded(mesh["shard"]), between_replicas(world, mesh)
    model.middle.requires_grad_(change is not unfreeze)
    exchange = GradientExchange(comm, TopK(0.1))
    handle = attach_fsdp(model, exchange)
    model(batch(world, 0)).square().mean().backward()
    change(model)
    with pytest.raises(ValueError, match=match):
        model(batch(world, 1)).square().mean().backward()
    if change is assign:
        state = handle.state_dict()
        handle.remove()
        handle = attach_fsdp(model, GradientExchange(comm, TopK(0.1)))
        handle.load_state_dict(state)
        model(batch(world, 3)).square().mean().backward()
        assert handle.exchange.steps == 2
    handle.remove()
    exchange = GradientExchange(comm, Dense(), NoFeedback())
    attach_fsdp(model, exchange)
    model.zero_grad()
    model(batch(world, 2)).square().mean().backward()
    assert exchange.steps == 1
    assert (
        len(
            {
                *comm.allgather(
                    b"".join(each.tobytes() for each in shards(model).values())
                )
            }
        )
        == 1
    )


@pytest.mark.parametrize("collective", [sparse_allreduce, blocking])
def test_a_step_that_is_refused_leaves_nan_and_the_model_goes_on(
    world, mesh, collective
):
    """A collective that blocks raises from the hook of a shard, which is not the last one."""
    model = sharded(mesh["shard"])
    exchange = GradientExchange(
        between_replicas(world, mesh), TopK(0.1), collective=collective, small=0
    )
    attach_fsdp(model, exchange)
    bad = mesh.get_local_rank("replica") == 0
    with pytest.raises(ValueError if bad else CollectiveError):
        (
            model(batch(world, 0)).square().mean() * (float("inf") if bad else 1)
        ).backward()
    assert all(np.isnan(each).all() for each in shards(model).values())
    for step in (1, 2):
        model.zero_grad()
        model(batch(world, step)).square().mean().backward()
        assert all(np.isfinite(each).all() for each in shards(model).values())
    assert exchange.steps == 2


def test_the_recipe_of_a_loop_that_catches_errors_leaves_out_one_step(world, mesh):
    """One replica has a bad gradient once: the steps after it are kept."""
    model = sharded(mesh["shard"])
    exchange = GradientExchange(between_replicas(world, mesh), TopK(0.1))
    attach_fsdp(model, exchange)
    caught = 0
    for step in range(5):
        bad = step == 1 and mesh.get_local_rank("replica") == 0
        loss = model(batch(world, step)).square().mean() * (np.inf if bad else 1)
        try:
            loss.backward()
        except (ValueError, CollectiveError):
            caught += 1
        model.zero_grad()
    assert (caught, exchange.steps) == (1, 4)


def test_after_an_interrupted_backward_pass_the_residuals_go_on(world, mesh):
    """As the error of the next forward pass says; on all ranks of one replica, which wait for each other."""
    model, comm = sharded(mesh["shard"]), between_replicas(world, mesh)
    handle = attach_fsdp(model, GradientExchange(comm, TopK(0.1), small=0))
    model(batch(world, 0)).square().mean().backward()
    before = handle.state_dict()
    here = mesh.get_local_rank("replica") == 0

    def step(number):
        model.zero_grad()
        model(batch(world, number)).square().mean().backward()

    def fail(gradient):
        raise MemoryError("no room")

    def interrupted(inputs):
        hidden = model.first(inputs)
        hidden.register_hook(fail)
        return model.last(model.middle(hidden))

    if here:
        model.forward, forward = interrupted, model.forward
        with pytest.raises(MemoryError, match="no room"):
            step(1)
        model.forward = forward
        model.reset_iter_state()
    with pytest.raises(
        RuntimeError if here else CollectiveError,
        match=r"interrupted the last.*reset_iter_state\(\); call handle.remove\(\), and attach_fsdp",
    ):
        step(1)
    after = handle.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    handle.remove()
    handle = attach_fsdp(model, GradientExchange(comm, TopK(0.1), small=0))
    handle.load_state_dict(after)
    for number in (2, 3):
        step(number)
    assert handle.exchange.steps == 3
    everyone = comm.allgather(
        b"".join(each.tobytes() for each in shards(model).values())
    )
    assert len({*everyone}) == 1


def test_a_model_is_attached_once(world, mesh):
    """Another exchange would take the place of the first one, whose handle saves what no longer changes."""
    model, comm = sharded(mesh["shard"]), between_replicas(world, mesh)
    handle = attach_fsdp(model, GradientExchange(comm, TopK(0.1)))
    for twice in (model, nn.Sequential(model)):
        with pytest.raises(ValueError, match="the model is already attached"):
            attach_fsdp(twice, GradientExchange(comm, TopK(0.1)))
    with pytest.raises(ValueError, match="the model is already attached"):
        outer_loop(model, GradientExchange(comm, TopK(0.1)))
    model(batch(world, 0)).square().mean().backward()
    assert handle.exchange.steps == 1
    handle.remove()
    again = attach_fsdp(model, GradientExchange(comm, TopK(0.1)))
    model(batch(world, 1)).square().mean().backward()
    assert (handle.exchange.steps, again.exchange.steps) == (1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replicas_that_start_with_other_parameters_are_refused(world, mesh, dtype):
    """FSDP2 does not broadcast them, as DDP does: two models would be trained."""
    model, comm = sharded(mesh["shard"], dtype), between_replicas(world, mesh)
    with torch.no_grad():
        model.middle.bias.to_local()[-1:] = mesh.get_local_rank("replica")
    exchange = GradientExchange(comm, TopK(0.1))
    if comm.size == 1:
        assert attach_fsdp(model, exchange).exchange is exchange
        return
    with pytest.raises(
        CollectiveError,
        match=r"of rank 1 differ .*; the first is 'middle.bias': .* on rank 0; .* the same torch.manual_seed",
    ):
        attach_fsdp(model, exchange)
    with torch.no_grad():
        model.middle.bias.to_local()[-1:] = 0
    assert attach_fsdp(model, exchange).exchange is exchange


def test_a_part_of_a_larger_model_is_warned_of_in_its_first_pass(world, mesh):
    model, comm = sharded(mesh["shard"]), between_replicas(world, mesh)
    attach_fsdp(model.middle, GradientExchange(comm, TopK(0.1)))
    with pytest.warns(RuntimeWarning, match="a part of a larger FSDP2 model"):
        model(batch(world, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(batch(world, 1)).square().mean().backward()
        whole = sharded(mesh["shard"])
        attach_fsdp(whole, GradientExchange(comm, TopK(0.1)))
        whole(batch(world, 0)).square().mean().backward()


def test_a_scaler_on_some_ranks_only_raises(world, mesh):
    comm = between_replicas(world, mesh)
    scaler = torch.amp.GradScaler("cpu") if comm.rank == 0 else None
    with (
        pytest.raises(
            CollectiveError, match="'scaler' is one that is enabled on rank 0"
        )
        if comm.size > 1
        else nullcontext()
    ):
        attach_fsdp(
            sharded(mesh["shard"]), GradientExchange(comm, TopK(0.1)), scaler=scaler
        )


def test_another_dtype_after_attach_raises(world, mesh):
    model, comm = sharded(mesh["shard"]), between_replicas(world, mesh)
    attach_fsdp(model, GradientExchange(comm, TopK(0.1)))
    model.double()
    with pytest.raises(
        ValueError, match=r"replaced are 'first.weight', .*\.double\(\)"
    ):
        model(batch(world, 0).double()).square().mean().backward()


@pytest.mark.parametrize("scaled", [False, True])
def test_a_skipped_step_changes_no_parameter(world, mesh, scaled):
    """Without a scaler there are no gradients; with one they are NaN, which it looks for."""
    model, scaler = (
        sharded(mesh["shard"]),
        torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None,
    )
    exchange = GradientExchange(
        between_replicas(world, mesh), TopK(0.1), nonfinite="skip"
    )
    attach_fsdp(model, exchange, scaler=scaler)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for step, bad in enumerate([False, True, False]):
        optimizer.zero_grad()
        before = [each.to_local().detach().clone() for each in model.parameters()]
        loss = model(batch(world, step)).square().mean() * (float("inf") if bad else 1)
        (scaler.scale(loss) if scaler else loss).backward()
        if bad:
            assert all((each.grad is None) != scaled for each in model.parameters())
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        same = [
            torch.equal(*pair)
            for pair in zip(
                before, (each.to_local() for each in model.parameters()), strict=True
            )
        ]
        assert all(same) == bad == (not exchange.finite)
    assert scaler is None or scaler.get_scale() == 2.0


def test_local_steps_between_nodes_with_fsdp_inside(world, mesh):
    model = sharded(mesh["shard"])
    outer = outer_loop(
        model,
        GradientExchange(between_replicas(world, mesh), Dense(), NoFeedback()),
        every=2,
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    replica = mesh.get_local_rank("replica")
    for step in range(2):
        optimizer.zero_grad()
        model(batch(world, 2 * step + replica)).square().mean().backward()
        optimizer.step()
        if step == 0:
            apart = [each.detach().full_tensor().numpy() for each in model.parameters()]
        assert outer.step() == (step == 1)
    whole = [each.detach().full_tensor().numpy() for each in model.parameters()]
    assert len(set(world.allgather(b"".join(each.tobytes() for each in whole)))) == 1
    assert (
        world.size == 2
        or len(set(world.allgather(b"".join(each.tobytes() for each in apart))))
        == world.size // 2
    )


@pytest.mark.parametrize("wrap", [lambda model: model, nn.Sequential])
def test_local_steps_of_a_model_sharded_over_ranks_of_the_exchange_are_refused(
    world, mesh, wrap
):
    with pytest.raises(ValueError, match=r"expected comm.Split\(mesh.get_local_rank"):
        outer_loop(wrap(sharded(mesh["shard"])), GradientExchange(world, TopK(0.1)))


def test_bad_meshes_models_and_communicators(world, mesh):
    exchange = GradientExchange(between_replicas(world, mesh), TopK(0.1))
    with pytest.raises(
        ValueError,
        match=r"a mesh of 2 dimensions.*use fully_shard\(model, mesh=mesh\[.shard.\]\)",
    ):
        attach_fsdp(sharded(mesh), exchange)
    with pytest.raises(
        TypeError, match=r"model is Network: expected one that fully_shard"
    ):
        attach_fsdp(Network(), exchange)
    with pytest.raises(
        ValueError,
        match=rf"a replica 2, and the process group {world.size}: expected comm.Split",
    ):
        attach_fsdp(sharded(mesh["shard"]), GradientExchange(world, TopK(0.1)))
    attach_fsdp(sharded(mesh["shard"]), exchange)


def test_ranks_that_have_different_shards_are_noticed(world, mesh):
    if world.size < 4:
        pytest.skip("needs two replicas")
    wrong = world.Split(mesh.get_local_rank("replica"), world.rank)
    with pytest.raises(
        CollectiveError, match="'index of the shard' is 0 on rank 0, and 1 on rank 1"
    ):
        attach_fsdp(sharded(mesh["shard"]), GradientExchange(wrong, TopK(0.1)))
