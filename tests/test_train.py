"""`mpicomp train` on one rank in this process, and on two under mpirun."""

import builtins
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from mpi4py import MPI
from test_examples import LAUNCH

from collectives.cli import main
from collectives.cli.train.grid import LATENCY, Grid, Row, cells
from collectives.cli.train.methods import COLLECTIVES, COMPRESSORS, FEEDBACKS, METHODS, Descent, Method
from collectives.cli.train.network import Network
from collectives.cli.train.progress import Progress
from collectives.cli.train.report import as_json, dense_bytes
from collectives.cli.train.tasks import TASKS
from collectives.cli.train.training import Outcome, Recipe, Trial, train

SHORT = ["train", "--task", "text", "--steps", "3", "--batch", "4", "--rate", "0.1"]


def told(file):
    return json.loads(file.read_text())


def lasting(about):
    """Return what a run is to give again: all but the times."""
    for row in about["rows"]:
        for part in (row, *row["trainings"]):
            del part["seconds"], part["exchange_seconds"]
    return about["rows"]


def test_every_method_trains_and_the_numbers_of_a_seed_are_the_same_again(capsys, tmp_path):
    files = [tmp_path / name for name in ("first.json", "second.json")]
    for file in files:
        assert main([*SHORT, "--seeds", "2", "--density", "0.1", "0.01", "--json", str(file)]) == 0
    printed = capsys.readouterr()
    first, second = (lasting(told(file)) for file in files)
    assert first == second
    assert len(first) == 2 * len(METHODS) - 2  # dense and AdaComp ask for no density
    assert {row["name"] for row in first} == METHODS.keys()
    for row in first:
        assert len(row["trainings"]) == 2
        assert row["figure"] == pytest.approx(np.mean([each["figure"] for each in row["trainings"]]))
        assert row["spread"] == pytest.approx(np.std([each["figure"] for each in row["trainings"]], ddof=1))
        assert row["trainings"][0]["figure"] != row["trainings"][1]["figure"]
        assert row["trainings"][0]["curve"][-1] == [3, row["trainings"][0]["figure"]]
        assert not row["tried"]
        assert f"{row['name']} " in printed.out
    assert "left" in printed.err or not printed.err  # the bar keeps to stderr


def test_seeds_are_the_same_whatever_stands_beside_them(tmp_path):
    """A row does not depend on the rows before it."""
    files = [tmp_path / name for name in ("all.json", "one.json")]
    assert main([*SHORT, "--methods", "dense", "gtopk", "dgc", "--density", "0.1", "--json", str(files[0])]) == 0
    assert main([*SHORT, "--methods", "dgc", "--density", "0.1", "--json", str(files[1])]) == 0
    assert lasting(told(files[0]))[-1:] == lasting(told(files[1]))


def mpirun(size, *arguments, cwd, module=("-m", "collectives.cli")):
    command = ["mpirun", "-n", str(size), sys.executable, "-m", "mpi4py", *module, *arguments]
    environment = {**os.environ, **LAUNCH, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_on_two_ranks_bytes_are_counted_and_rank_0_alone_speaks(tmp_path):
    done = mpirun(2, *SHORT, "--density", "0.01", "--json", "rows.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("method, density") == 1
    about = told(tmp_path / "rows.json")
    rows = {row["name"]: row for row in about["rows"]}
    assert (about["ranks"], about["task"], about["steps"], about["batch"]) == (2, "text", 3, 4)
    values = 4 * about["parameters"]
    assert rows["dense"]["nbytes"] == pytest.approx(values, rel=0.01)  # 2 (P-1)/P n v, and the terms
    for row in rows.values():
        simulated = row["messages"] * LATENCY + 8 * row["nbytes"] / 1e9
        assert row["network_seconds"]["1e+09"] == pytest.approx(simulated)
        assert 0 < row["exchange_seconds"] <= row["seconds"]
        if row["density"]:
            assert row["sent"] < 0.05
            assert row["nbytes"] < 0.2 * values


@pytest.mark.parametrize("size", [1, 2])
def test_the_digits_have_an_accuracy_and_a_plot(tmp_path, size):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    run = ["train", "--steps", "30", "--rate", "0.05", "--methods", "dense", "gtopk", "--density", "0.1"]
    done = mpirun(size, *run, "--json", "rows.json", "--plot", "here.png", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "here.png").read_bytes().startswith(b"\x89PNG")
    for row in told(tmp_path / "rows.json")["rows"]:
        assert 50 < row["figure"] <= 100


def test_a_row_takes_the_rate_with_the_least_validation_loss(tmp_path):
    file = tmp_path / "rows.json"
    rates = ["--rate", "1e-6", "0.1", "1e-5"]
    assert main([*SHORT[:-2], *rates, "--methods", "topk-allgather", "--density", "0.1", "--json", str(file)]) == 0
    row = told(file)["rows"][0]
    assert row["tried"].keys() == {"1e-06", "0.1", "1e-05"}
    assert row["rate"] == 0.1
    assert row["tried"]["0.1"] == min(row["tried"].values())
    assert row["tried"]["0.1"] != row["loss"]  # another seed, and another part


@pytest.mark.parametrize("method", ["dense", "gtopk", "step-ahead"])
def test_a_rate_that_is_too_high_ends_the_training_and_not_the_run(method, capsys, tmp_path):
    file = tmp_path / "rows.json"
    assert main([*SHORT[:-1], "1e30", "--methods", method, "--density", "0.5", "--json", str(file)]) == 0
    row = told(file)["rows"][0]
    assert row["loss"] is None
    assert row["trainings"][0]["curve"][0][1] > 0


def test_a_spread_of_what_is_not_finite_is_none(capsys, recwarn):
    assert main([*SHORT[:-1], "1e30", "--methods", "topk-allgather", "--density", "0.5", "--seeds", "2"]) == 0
    printed = capsys.readouterr()
    assert "inf +- - " in printed.out
    assert not printed.err
    assert not [each for each in recwarn if issubclass(each.category, RuntimeWarning)]


def test_what_is_named_twice_is_trained_once(tmp_path):
    file = tmp_path / "rows.json"
    assert main([*SHORT, "--methods", "gtopk", "gtopk", "--density", "0.1", "0.1", "--json", str(file)]) == 0
    assert len(told(file)["rows"]) == 1


def test_combinations_of_ones_own_stand_beside_dense(tmp_path):
    file = tmp_path / "rows.json"
    own = ["--compressor", "randomk", "mstopk", "--feedback", "none", "ef21", "--collective", "allreduce"]
    assert main([*SHORT, *own, "--density", "0.1", "--json", str(file)]) == 0
    names = [(row["compressor"], row["feedback"], row["collective"]) for row in told(file)["rows"]]
    assert names[0] == ("dense", "dense", "dense")
    assert names[1:] == [(c, f, "allreduce") for c in ("randomk", "mstopk") for f in ("none", "ef21")]


@pytest.mark.parametrize("compressor", COMPRESSORS)
@pytest.mark.parametrize("feedback", FEEDBACKS)
def test_every_name_stands_for_something_that_gives_an_update(compressor, feedback):
    gradient = np.random.default_rng(0).standard_normal(2000, np.float32)
    for collective in COLLECTIVES:
        descent = Descent(MPI.COMM_SELF, Method("own", compressor, feedback, collective), 0.1, 0.5, 0.9)
        update = descent.update(gradient)
        assert 0 < np.count_nonzero(update) < gradient.size
        assert 0 < descent.sent < 1


@pytest.mark.parametrize("feedback", FEEDBACKS)
def test_where_everything_travels_every_feedback_is_the_same_descent(feedback):
    """Momentum SGD, then, up to rounding: wherever a method has its momentum and its rate."""
    rng = np.random.default_rng(1)
    gradients = rng.standard_normal((4, 300)).astype(np.float32)
    descent = Descent(MPI.COMM_SELF, Method("own", "topk", feedback, "allreduce"), 1.0, 0.25, 0.5)
    dense = Descent(MPI.COMM_SELF, METHODS["dense"], 1.0, 0.25, 0.5)
    velocity = heavy = np.zeros(300)
    if feedback == "ef21-momentum":  # its mean starts as the first gradient, in full
        velocity = 2 * gradients[0]
    for gradient in gradients:
        velocity, heavy = 0.5 * velocity + gradient, 0.5 * heavy + gradient
        np.testing.assert_allclose(dense.update(gradient), 0.25 * heavy, atol=1e-5)
        np.testing.assert_allclose(descent.update(gradient), 0.25 * velocity, atol=1e-5)


def test_step_ahead_takes_its_gradient_ahead_and_the_others_where_they_are():
    x, gradient = np.ones(100, np.float32), np.arange(1, 101, dtype=np.float32)
    for name, method in METHODS.items():
        descent = Descent(MPI.COMM_SELF, method, 0.1, 0.5, 0.9)
        descent.update(gradient)
        assert (descent.point(x) == x).all() == (name != "step-ahead")


def test_the_gradient_of_the_network_is_the_slope_of_its_loss():
    rng = np.random.default_rng(2)
    network = Network((5, 7, 3), 0)
    inputs, labels = rng.standard_normal((20, 5)).astype(np.float32), rng.integers(3, size=20)
    gradient = network.gradient(inputs, labels)
    direction = rng.standard_normal(gradient.size).astype(np.float32)
    start, losses, h = network.parameters.copy(), [], 1e-3
    for sign in (1, -1):
        network.parameters[:] = start + np.float32(sign * h) * direction
        losses.append(network.evaluate(inputs, labels).loss)
    assert (losses[0] - losses[1]) / (2 * h) == pytest.approx(float(gradient @ direction), rel=0.01)


@pytest.mark.parametrize("name", TASKS)
def test_no_example_of_the_test_is_trained_on(name):
    if name == "digits":
        pytest.importorskip("sklearn")
    task = TASKS[name]()
    parts = {part: set(numbers.tolist()) for part, numbers in task.parts.items()}
    assert sum(map(len, parts.values())) == len(set.union(*parts.values())) == task.labels.size
    assert set(task.training("test").tolist()) == parts["training"] | parts["validation"]
    assert set(task.training("validation").tolist()) == parts["training"]
    inputs, labels = task.held_out("test")
    assert inputs.shape == (labels.size, task.sizes[0])
    assert inputs.dtype == np.float32
    assert labels.max() < task.sizes[-1]


def test_the_text_is_one_character_after_a_window():
    task = TASKS["text"]()
    inputs, labels = task.examples(np.array([100, 101]))
    window = inputs.reshape(2, -1, task.sizes[-1])
    assert (window.sum(axis=2) == 1).all()
    assert window[1, -1].argmax() == labels[0]


WRONG = [
    (["--density", "2"], "expected 0 < density <= 1"),
    (["--density", "x"], "expected 0 < density <= 1"),
    (["--seeds", "0"], "expected a whole number of at least 1"),
    (["--steps", "1.5"], "expected a whole number of at least 1"),
    (["--batch", "-1"], "expected a whole number of at least 1"),
    (["--rate", "nan"], "expected a number above 0"),
    (["--rate", "0"], "expected a number above 0"),
    (["--task", "faces"], "digits"),
    (["--methods", "topk"], "gtopk-exact"),
    (["--compressor", "best"], "sidco"),
    (["--feedback", "ef"], "error-feedback"),
    (["--collective", "ring"], "allgather"),
]


@pytest.mark.parametrize(("wrong", "expected"), WRONG)
def test_a_wrong_option_is_refused_with_what_is_expected(wrong, expected, capsys):
    with pytest.raises(SystemExit) as left:
        main(["train", *wrong])
    assert left.value.code == 2
    error = capsys.readouterr().err.rpartition("error: ")[2]
    assert wrong[0] in error
    assert wrong[1] in error
    assert expected in error


def test_options_that_contradict_each_other_are_refused_before_anything_is_trained(capsys):
    assert main([*SHORT, "--methods", "dense", "--compressor", "topk"]) == 2
    assert "expected --methods, or --compressor" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_in_no_folder_is_refused_before_anything_is_trained(option, capsys, tmp_path):
    with pytest.raises(SystemExit) as left:
        main([*SHORT, option, str(tmp_path / "none" / "file.png")])
    printed = capsys.readouterr()
    assert left.value.code == 2
    assert "there is no folder" in printed.err
    assert not printed.out


def test_a_missing_extra_is_named(monkeypatch, capsys):
    real = builtins.__import__

    def without(name, *arguments):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["train", "--task", "digits"]) == 2
    assert "pip install scikit-learn, or take --task text" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit):
        main([*SHORT, "--plot", "here.png"])
    assert "pip install matplotlib" in capsys.readouterr().err


def test_one_rank_that_cannot_begin_keeps_the_others_from_training(tmp_path):
    """The folder is looked for on rank 0 alone; both ranks leave."""
    done = mpirun(2, *SHORT, "--json", "none/rows.json", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("argument --json: got 'none/rows.json': there is no folder") == 1
    assert not done.stdout


def test_the_bar_says_how_far_all_trainings_are(capsys, monkeypatch):
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr("collectives.cli.train.progress.monotonic", lambda: next(now))
    bar = Progress(200, sys.stdout)
    bar.begin("one", 100)
    bar.tell(50, 12.5)
    bar.begin("two", 100)  # the first one ended early
    bar.tell(50, 99)
    first, second = capsys.readouterr().out.split("\r")[1:]
    assert " 25% 0:30 left  one: 12.50" in first
    assert " 75% 0:07 left  two: 99.00" in second


def test_what_is_not_finite_becomes_null_in_json():
    task = TASKS["text"]()
    lost = Outcome(np.inf, np.inf, [(0, 5.0), (1, np.nan)], 1.0, 2.0, 0.5, 0.1, 0.1, True)
    grid = Grid(task, cells([METHODS["gtopk"]], [0.1]), [1.0], 1, Recipe(1, 1))
    row = json.loads(as_json(grid, [Row(METHODS["gtopk"], 0.1, 1.0, {}, [lost])]))["rows"][0]
    assert row["figure"] is row["trainings"][0]["curve"][1][1] is None
    assert row["trainings"][0]["diverged"]


def test_the_dense_baseline_sends_what_the_table_counts_against():
    task = TASKS["text"]()
    grid = Grid(task, cells([METHODS["dense"]], [0.1]), [1.0], 1, Recipe(1, 1))
    assert dense_bytes(grid, 1) == 0
    assert dense_bytes(grid, 4) == 6 * Network(task.sizes, 0).parameters.size


def test_a_training_is_summed_up_on_one_rank():
    task, steps = TASKS["text"](), []
    trial = Trial(METHODS["gtopk"], 0.1, 0.1, seed=3)
    outcome = train(task, trial, Recipe(4, 2), MPI.COMM_SELF, lambda step, figure: steps.append(step))
    assert steps == [1, 2, 3, 4]
    assert [step for step, _ in outcome.curve] == [0, 1, 2, 3, 4]
    assert 0.05 < outcome.sent < 0.1001  # zeros do not travel
    assert outcome.nbytes == 0
