"""examples/muon.py beside PyTorch's own Muon."""

import pathlib
from copy import deepcopy

import pytest
from mpi4py import MPI

from collectives import GradientExchange, OuterLoop
from mpicomp import Dense, NoFeedback

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-torch")

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
SHAPES = [(64, 64), (192, 64), (64, 256)]
BOUND = 8 * 2.0**-8  # eight times the rounding of bfloat16


@pytest.fixture
def muon(monkeypatch):
    """Return the module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import muon

    return muon


def trained(new, steps, **settings):
    """Return matrices after steps by an optimiser, with the same gradients for each of them."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.ones(shape).requires_grad_() for shape in SHAPES]
    optimizer = new(weights, 0.1, **settings)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return [weight.detach() for weight in weights]


def error(found, expected, steps):
    """Return the largest distance of a matrix, over how far the steps moved it beside its decay."""
    return max(
        float((one - other).norm() / (other - 0.99**steps).norm())
        for one, other in zip(found, expected, strict=True)
    )


def test_it_is_that_of_torch_within_the_rounding_of_bfloat16(muon):
    """Momentum, Nesterov, weight decay and scale as well: others lie outside."""
    settings = {"weight_decay": 0.1, "momentum": 0.8}
    theirs = {**settings, "adjust_lr_fn": "match_rms_adamw"}
    for steps in 1, 5:
        expected = trained(torch.optim.Muon, steps, **theirs)
        assert error(trained(muon.Muon, steps, **settings), expected, steps) < BOUND
    for other in {"momentum": 0.95}, {"weight_decay": 0.0}:
        assert error(trained(muon.Muon, 5, **settings | other), expected, 5) > BOUND
    plain = trained(torch.optim.Muon, 5, **theirs, nesterov=False)
    assert error(plain, expected, 5) > BOUND


def test_a_matrix_is_orthogonalised_in_float32(muon):
    matrix = torch.randn(300, 40, generator=torch.Generator().manual_seed(1))
    found = muon.orthogonalised(matrix)
    assert found.dtype == torch.float32
    values = torch.linalg.svdvals(found)
    assert 0.6 < values.min() <= values.max() < 1.3
    assert (found.T @ matrix).trace() > 0
    assert muon.orthogonalised(torch.zeros(3, 2)).abs().max() == 0


def test_matrices_without_a_gradient_are_left_alone(muon):
    weight = torch.ones(4, 4, requires_grad=True)
    muon.Muon([weight], 0.1).step()
    assert torch.equal(weight.detach(), torch.ones(4, 4))


@pytest.mark.parametrize(
    ("flags", "is_fast"),
    [("avx2 avx512f", False), ("avx512_bf16", True), ("amx_bf16 avx2", True)],
)
def test_the_processor_decides(muon, tmp_path, monkeypatch, flags, is_fast):
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor : 0\nflags : fpu {flags} sse\n")
    assert muon.has_bfloat16(file) == is_fast
    assert not muon.has_bfloat16(tmp_path / "missing")
    monkeypatch.setattr(muon, "has_bfloat16", lambda: is_fast)
    found = muon.new_muon(iter([torch.zeros(2, 2, requires_grad=True)]), 0.1)
    assert isinstance(found, torch.optim.Muon if is_fast else muon.Muon)
    assert found.param_groups[0]["weight_decay"] == 0.01


def test_a_run_that_is_resumed_has_the_same_bits(muon):
    """Its state is that of any optimiser."""
    weight = torch.ones(8, 4, requires_grad=True)
    first = muon.Muon([weight], 0.1)
    weight.grad = torch.arange(32.0).reshape(8, 4)
    first.step()
    copy = weight.detach().clone().requires_grad_()
    second = muon.Muon([copy], 0.5)
    second.load_state_dict(deepcopy(first.state_dict()))
    copy.grad = weight.grad.flip(0)
    weight.grad = weight.grad.flip(0)
    first.step()
    second.step()
    assert torch.equal(weight, copy)


@pytest.mark.parametrize("which", ["torch", "example"])
def test_momenta_that_exist_before_the_first_step_are_those_of_a_loop(muon, which):
    """The optimiser starts from zeros as it does without, and goes on from what a round writes."""
    new = torch.optim.Muon if which == "torch" else muon.Muon
    weights = [torch.ones(8, 4, requires_grad=True) for _ in range(2)]
    alone, looped = (new([weight], 0.1) for weight in weights)
    state = looped.state[weights[1]]
    state["momentum_buffer"] = torch.zeros_like(weights[1])
    exchange = GradientExchange(MPI.COMM_SELF, Dense(), NoFeedback())
    outer = OuterLoop(
        exchange,
        lambda: [looped.state[weights[1]]["momentum_buffer"]],
        every=2,
        rate=0.5,
    )
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.arange(32.0).reshape(8, 4)
        alone.step()
        looped.step()
        before = looped.state[weights[1]]["momentum_buffer"].clone()
        is_end = outer.step()
    assert is_end
    assert torch.equal(*weights)
    assert before.any()
    assert torch.equal(looped.state[weights[1]]["momentum_buffer"], before / 2)
