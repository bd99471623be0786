"""The rules of benchmarks/every_step: what P gradients do to the parameters, by every method."""

import json
import pathlib

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks" / "every_step"


@pytest.fixture
def rules(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import rules

    return rules


SHAPES = [(40, 70), (70,), (33, 16)]
SIZE = 40 * 70 + 70 + 33 * 16


def gradients(ranks):
    return list(np.random.default_rng(ranks).standard_normal((ranks, SIZE)).astype(np.float32))


def stepped(rules, name, given, rate=0.5):
    method, parameters = rules.made(name), np.zeros(SIZE, np.float32)
    method.start(SHAPES, len(given))
    bits = method.step(parameters, given, rate)
    return parameters, bits


@pytest.mark.parametrize("name", ["adamw", "lion", "coefficients:basis=none,k=16,chunk=16"])
def test_a_first_step_is_against_the_sign_of_the_gradient(rules, name):
    given = gradients(1)
    parameters, bits = stepped(rules, name, given)
    np.testing.assert_allclose(parameters, -0.5 * np.sign(given[0]), rtol=1e-3)
    assert 16 < bits <= 32


@pytest.mark.parametrize("basis", ["Hadamard", "Cosine"])
@pytest.mark.parametrize("tile", [False, True])
def test_all_coefficients_are_the_gradient(rules, basis, tile):
    given = gradients(3)
    parameters, _ = stepped(rules, f"coefficients:basis={basis},k=64,chunk=64,tile={tile}", given)
    mean = np.mean(given, axis=0)
    clear = np.abs(mean) > 1e-4
    np.testing.assert_array_equal(parameters[clear], -0.5 * np.sign(mean[clear]))


def test_few_coefficients_take_few_bits_and_the_rest_is_kept(rules):
    method, parameters = rules.made("coefficients:k=2,chunk=64,decay=1,form=two_bit"), np.zeros(SIZE, np.float32)
    method.start(SHAPES, 2)
    assert method.step(parameters, gradients(2), 0.1) < 0.6
    assert set(np.abs(parameters)) == {np.float32(0), np.float32(0.1)}
    assert all(np.linalg.norm(feedback.residual) > 0 for feedback in method.feedbacks)


def test_a_mean_over_contributors_divides_by_those_of_a_coefficient(rules):
    shared, alone = np.zeros((2, SIZE), np.float32)
    shared[:2], alone[:2] = (1, 1), (-1.5, 1.5)  # sums: 2 and -1.5 of the coefficients; means: 1 and -1.5
    for mean, expected in ("ranks", -0.5), ("contributors", 0.5):
        name = f"coefficients:basis=Hadamard,k=1,chunk=2,mean={mean}"
        parameters, _ = stepped(rules, name, [shared, alone, shared])
        np.testing.assert_array_equal(parameters[:2], [expected, -0.5])


def test_tiles_are_squares_of_two_dimensional_tensors(rules):
    order = rules.tiled(SHAPES, 16)
    np.testing.assert_array_equal(np.sort(order), np.arange(SIZE))
    for tile in order[: 8 * 256].reshape(-1, 256):
        rows, columns = np.divmod(tile, 70)
        assert np.ptp(rows) == np.ptp(columns) == 15
    last = order[8 * 256 : 10 * 256]
    np.testing.assert_array_equal(np.sort(last), 40 * 70 + 70 + np.arange(2 * 256))


@pytest.mark.parametrize("name", ["sgd", "coefficients:q=3", "lion:k=3"])
def test_a_method_that_is_not_known_is_an_error(rules, name):
    with pytest.raises(ValueError, match=r"method is .*: expected one of"):
        rules.made(name)


def test_the_committed_rows_are_those_of_the_plan_and_of_known_methods(rules):
    from losses import table
    from plan import plan

    rows, planned = json.loads((ROOT / "docs" / "results" / "every_step.json").read_text())["rows"], plan()
    assert len(set(planned)) == len(planned)
    assert all(rules.made(method) for method, *_ in planned)
    names = "method", "rate", "schedule", "seed", "steps"
    assert {tuple(row[name] for name in names) for row in rows} <= set(planned)
    heads, *lines = table(rows)
    assert {len(line) for line in lines} == {len(heads)}
