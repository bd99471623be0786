"""The rules of experiments/every_step: what P gradients do to the parameters, by every method."""

import json
import pathlib

import numpy as np
import pytest
from mpi4py import MPI

from collectives import GradientExchange, OuterLoop
from mpicomp import TopK
from mpicomp_bench.methods import construct, outer_settings

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "every_step"


@pytest.fixture
def rules(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import rules

    return rules


SHAPES = [(40, 70), (70,), (33, 16)]
SIZE = 40 * 70 + 70 + 33 * 16


def gradients(ranks):
    return list(
        np.random.default_rng(ranks).standard_normal((ranks, SIZE)).astype(np.float32)
    )


def stepped(rules, name, given, rate=0.5, optimizer="adamw"):
    method, parameters = rules.made(name, optimizer), np.zeros(SIZE, np.float32)
    method.start(SHAPES, len(given))
    bits = method.step(parameters, given, rate)
    return parameters, bits


DENSE = [
    (name, "adamw")
    for name in (
        "dense",
        "in-basis-16:basis=none,chunk=16",
        "powersgd",
        "local-dense-1",
    )
]


@pytest.mark.parametrize(("name", "optimizer"), [*DENSE, ("dense", "lion")])
def test_a_first_step_is_against_the_sign_of_the_gradient(rules, name, optimizer):
    given = gradients(1)
    parameters, bits = stepped(rules, name, given, optimizer=optimizer)
    np.testing.assert_allclose(parameters, -0.5 * np.sign(given[0]), rtol=1e-3)
    assert 16 < bits <= 32


def test_powersgd_sends_a_matrix_of_its_rank_whole_and_keeps_the_rest(rules):
    method, draw = rules.made("powersgd-2"), np.random.default_rng(1)
    low = draw.standard_normal((40, 2)) @ draw.standard_normal((2, 70))
    vector = np.concatenate(
        [low.ravel(), draw.standard_normal(SIZE - low.size)]
    ).astype(np.float32)
    method.start(SHAPES, 1)
    # dense at first
    assert [method.exchange.mean([vector])[1] for _ in range(2)] == [32, 32]
    mean, bits = method.exchange.mean([vector])
    assert bits < 32 * (1 - 0.9 * low.size / SIZE)
    np.testing.assert_allclose(
        mean[: low.size + 70], vector[: low.size + 70], atol=1e-4
    )
    np.testing.assert_allclose(mean + method.exchange.residual, vector, atol=1e-5)
    assert np.linalg.norm(method.exchange.residual[low.size + 70 :]) > 1


@pytest.mark.parametrize(
    "name",
    ["local-dense-2", "local-sparse-2", "local-few-bits-2", "diloco-2", "muloco-2"],
)
def test_local_steps_end_where_an_outer_loop_does(rules, name):
    anchor, replica = np.zeros((2, SIZE), np.float32)
    method, optimiser = rules.made(name), rules.AdamW()
    method.start(SHAPES, 1)
    optimiser.start(SHAPES)
    settings = outer_settings(name)
    outer = OuterLoop(construct(name, MPI.COMM_SELF), {"all": replica}, **settings)
    inner, rate = (
        (rules.INNER, settings["rate"]) if name.startswith("diloco") else (0.01, 0.01)
    )
    for number in range(6):
        gradient = gradients(number + 1)[-1]
        method.step(anchor, [gradient], rate)
        optimiser.update(replica, gradient, inner)
        outer.step()
        if number % 2:
            np.testing.assert_allclose(anchor, replica, atol=1e-6)
    assert np.linalg.norm(anchor) > 0.01


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_an_optimiser_of_several_ranks_is_one_for_each(rules, optimizer):
    together, parameters = rules.OPTIMISERS[optimizer](), np.zeros((3, SIZE), "f4")
    together.start(SHAPES, 3)
    alone = [rules.OPTIMISERS[optimizer]() for _ in range(3)]
    replicas = [np.zeros(SIZE, np.float32) for _ in alone]
    for each in alone:
        each.start(SHAPES)
    for _ in range(3):
        given = np.stack(gradients(3))
        together.update(parameters, given, 0.01)
        for each, replica, gradient in zip(alone, replicas, given, strict=True):
            each.update(replica, gradient, 0.01)
    np.testing.assert_array_equal(parameters, replicas)


def test_momenta_are_averaged_as_an_outer_loop_of_their_own_does(rules):
    """Every second step, in 2 bits, where parameters are averaged every fourth one in 4."""
    pytest.importorskip("torch")
    method, optimiser = (
        rules.made("local-few-bits-4:momenta=2,momenta_every=2", "muon"),
        rules.Muon(),
    )
    shapes = [(30, 16), (16, 16), (16,)]
    size = rules.size_of(shapes)
    anchor, replica, momenta = np.zeros((3, size), np.float32)
    method.start(shapes, 1)
    optimiser.start(shapes)
    loops = [
        OuterLoop(
            GradientExchange(MPI.COMM_SELF, bits=bits), {"all": array}, every=every
        )
        for bits, array, every in ((4, replica, 4), (2, momenta, 2))
    ]
    for number in range(8):
        given = gradients(number + 1)[-1][:size]
        bits = method.step(anchor, [given], 0.01)
        optimiser.update(replica, given, 0.01)
        momenta[...] = optimiser.momenta[0]
        for loop in loops:
            loop.step()
        optimiser.momenta = momenta[None]
    np.testing.assert_allclose(anchor, replica, atol=1e-6)
    np.testing.assert_allclose(method.optimiser.momenta[0], momenta, atol=1e-6)
    assert 4 / 4 + 2 / 2 < bits < 1.3 * (4 / 4 + 2 / 2)


def test_a_step_may_take_the_mean_gradients_of_several(rules):
    """As one step with their mean does, of a method with replicas too."""
    given = [gradients(2), [2 * each for each in gradients(2)]]
    for name, once in (
        ("few-bits-4:accumulate=2", "few-bits-4"),
        ("local-dense-1:accumulate=2", "local-dense-1"),
    ):
        method, parameters = rules.made(name), np.zeros(SIZE, np.float32)
        method.start(SHAPES, 2)
        assert method.step(parameters, given[0], 0.5) == 0
        assert not parameters.any()
        bits = method.step(parameters, given[1], 0.5)
        expected, of_one = stepped(rules, once, [1.5 * each for each in given[0]])
        np.testing.assert_allclose(parameters, expected, rtol=1e-5, atol=1e-6)
        assert bits == of_one / 2


def test_few_bits_in_a_basis_lose_nothing(rules):
    """What is not in the mean is in the residuals, which are kept in the basis."""
    method, given = rules.made("local-few-bits-in-basis-1:bits=2"), gradients(3)
    exchange = method.exchange
    exchange.start(SHAPES, 3)
    mean, bits = exchange.mean(given)
    kept = exchange.residuals.sum(0)
    exchange.basis.inverse(kept, kept)
    np.testing.assert_allclose(3 * mean + kept, sum(given), atol=1e-4)
    assert np.linalg.norm(kept) > 1
    assert bits < 2.5


def test_an_outer_step_may_have_a_radial_mean(rules):
    """Of two ranks that step in opposite directions of a tensor, and alike in the others."""
    given = gradients(1) * 2
    given[1] = np.concatenate([-given[0][:2800], given[0][2800:]])
    given[1][0] = given[0][0]
    plain, radial = (
        stepped(rules, f"local-dense-1{settings}", given)[0]
        for settings in ("", ":radial=True")
    )
    np.testing.assert_allclose(radial[2800:], plain[2800:], rtol=1e-6)
    norm = np.linalg.norm(stepped(rules, "local-dense-1", given[:1])[0][:2800])
    assert np.linalg.norm(plain[:2800]) < 0.1 * norm
    np.testing.assert_allclose(np.linalg.norm(radial[:2800]), norm, rtol=1e-4)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("length", [0, 3, 64, 100])
def test_the_cosine_basis_is_that_of_the_paper_and_a_basis_of_the_library(
    rules, dtype, chunk, length
):
    """In place, of chunks and of a shorter one at the end, each the product with its orthonormal matrix."""
    basis, tolerance = rules.Cosine(chunk), 20 * np.finfo(dtype).eps
    vector = np.random.default_rng(length).standard_normal(length).astype(dtype)
    coefficients = vector.copy()
    basis.forward(coefficients, coefficients)
    for start in range(0, length, chunk):
        part = vector[start : start + chunk].astype(float)
        order = np.arange(part.size)
        # few, for a small error of their product with pi
        steps = np.outer(order, 2 * order + 1) % (4 * part.size)
        matrix = np.sqrt(2 / part.size) * np.cos(np.pi / (2 * part.size) * steps)
        matrix[0] = np.sqrt(1 / part.size)
        np.testing.assert_allclose(
            coefficients[start : start + chunk],
            matrix @ part,
            atol=tolerance,
            rtol=tolerance,
        )
    basis.inverse(coefficients, coefficients)
    np.testing.assert_allclose(coefficients, vector, atol=tolerance, rtol=tolerance)
    exchange = GradientExchange(MPI.COMM_SELF, TopK(1.0), basis=basis)
    np.testing.assert_allclose(exchange(vector), vector, atol=tolerance, rtol=tolerance)


def test_the_committed_rows_are_those_of_the_plan_and_of_known_methods(rules):
    from losses import summary, table
    from plan import KEY, plan

    rows, planned = (
        json.loads((ROOT / "experiments" / "results" / "every_step.json").read_text())[
            "rows"
        ],
        plan(),
    )
    assert len(set(planned)) == len(planned)
    assert all(rules.made(method, optimizer) for _, method, optimizer, *_ in planned)
    assert {tuple(row[name] for name in KEY) for row in rows} <= set(planned)
    for heads, *lines in (table(rows), summary(rows)):
        assert {len(line) for line in lines} == {len(heads)}


def test_every_cell_of_the_map_has_dense_training_with_its_batch(rules):
    import cells
    from plan import KEY

    rows = json.loads((ROOT / "experiments" / "results" / "map.json").read_text())[
        "rows"
    ]
    assert len({tuple(row[name] for name in KEY) for row in rows}) == len(rows)
    assert all(rules.made(row["method"], row["optimizer"]) for row in rows)
    for cell in cells.cells(rows):
        for optimizer in ("adamw", "muon"):
            assert cell.loss(rows, cells.DENSE, optimizer), (cell, optimizer)
    tables = cells.table, cells.fewer_bits, cells.by_bits, cells.behind, cells.trainings
    for table in tables:
        heads, *lines = table(rows)
        assert {len(line) for line in lines} == {len(heads)}
