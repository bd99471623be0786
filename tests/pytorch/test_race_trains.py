"""The race of experiments/race and the simulation of experiments/every_step, with PyTorch."""

import json
import pathlib

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-torch")
from jobs import mpirun  # noqa: E402

EXPERIMENTS = pathlib.Path(__file__).parents[2] / "experiments"


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    """Let the modules of both import each other, as when one of them is the script."""
    for name in ("race", "every_step"):
        monkeypatch.syspath_prepend(str(EXPERIMENTS / name))


def test_a_step_of_the_simulation_is_one_of_the_race():
    import gpt
    import rules

    task = gpt.TASKS["manual"]
    trainer = gpt.Trainer(
        0, 0, 1, task._replace(sizes=task.sizes._replace(layers=1, context=8))
    )
    shapes = [tuple(each.shape) for each in trainer.network.parameters()]
    simulated, parameters = rules.Muon(), flat(trainer.network.parameters())
    simulated.start(shapes)
    trainer.optimise("muon", 0.01)
    for number in range(3):
        trainer.step(number)
        simulated.update(
            parameters, flat(each.grad for each in trainer.network.parameters()), 0.01
        )
        np.testing.assert_allclose(
            parameters, flat(trainer.network.parameters()), atol=2e-4
        )


@pytest.mark.parametrize("optimizer", ["muon", "normuon", "muon-polar-4"])
def test_muon_of_several_ranks_is_one_for_each(optimizer):
    """With updates of which the singular values are near 1, times the scale."""
    import rules

    shapes, draw = [(5, 4), (8, 4), (8, 4), (4,)], np.random.default_rng(0)
    parameters, given = np.zeros((2, 88), np.float32), draw.standard_normal((2, 88))
    given = given.astype(np.float32)
    together = rules.OPTIMISERS[optimizer]()
    together.start(shapes, 2)
    together.update(parameters, given, 1.0)
    for rank, gradient in enumerate(given):
        alone, own = rules.OPTIMISERS[optimizer](), np.zeros(88, np.float32)
        alone.start(shapes)
        alone.update(own, gradient, 1.0)
        np.testing.assert_allclose(parameters[rank], own, atol=1e-5)
    update = parameters[1, 20:52].reshape(8, 4) / (0.2 * 8**0.5)
    singular = np.linalg.svd(update, compute_uv=False)
    assert 0.4 < singular.min() < singular.max() < 1.6


def flat(tensors):
    """Return a copy of tensors as one vector."""
    return torch.cat([each.detach().reshape(-1) for each in tensors]).numpy().copy()


def test_the_race_trains_with_both_optimisers(tmp_path):
    for optimizer in ("adamw", "muon"):
        file = tmp_path / f"{optimizer}.json"
        sizes = (
            "--layers=1",
            "--width=32",
            "--context=16",
            "--batch=2",
            "--steps=20",
            "--schedule=linear",
            "--sleep=1",
        )
        methods = "few-bits-4", "local-few-bits-delayed-5", "in-basis-two-bit-8"
        arguments = *sizes, f"--optimizer={optimizer}", f"--json={file}"
        arguments = *arguments, "--methods", *methods
        done = mpirun(2, EXPERIMENTS / "race" / "rank.py", *arguments, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = json.loads(file.read_text())
        assert [row["optimizer"] for row in rows] == [optimizer, optimizer, "sgd"]
        for row in rows:
            (_, _, _, first), *_, (_, steps, _, last) = row["curve"]
            assert last < first, row["method"]
            assert steps >= 20
