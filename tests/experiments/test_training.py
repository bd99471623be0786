"""experiments/training on one rank in this process, and on two under mpirun."""

import json

import numpy as np
import pytest
import train as train_script
from descents import Descent, LocalDescent, Terms, at_density, entries, exchange_of
from jobs import mpirun
from mpi4py import MPI
from tasks import TASKS
from train import TRAINED, main
from training import LATENCY

SHORT = ["--task", "text", "--steps", "3", "--batch", "4"]


def written(file, *arguments):
    """Return what the script writes with --json."""
    assert main([*arguments, "--json", str(file)]) == 0
    return json.loads(file.read_text())


@pytest.fixture
def trained(tmp_path):
    """Return a function from options to the rows of a short training."""
    return lambda *more: written(
        tmp_path / "rows.json", *SHORT, "--rate", "0.1", *more
    )["rows"]


def lasting(rows):
    """Return rows without the times: what a run has to give again."""
    for row in rows:
        for part in (row, *row["trainings"]):
            del part["seconds"], part["exchange_seconds"]
        for each in row["trainings"]:
            each["curve"] = [point[:3] for point in each["curve"]]
    return rows


def test_every_method_trains_and_the_numbers_of_a_seed_are_the_same_again(
    capsys, trained
):
    twice = "--seeds", "2", "--points", "1"
    rows = lasting(trained(*twice, "--density", "0.1", "--every", "2"))
    printed = capsys.readouterr().out
    assert [row["name"] for row in rows] == list(TRAINED)
    for row in rows:
        assert len(row["trainings"]) == 2
        assert row["figure"] == pytest.approx(
            np.mean([each["figure"] for each in row["trainings"]])
        )
        assert row["spread"] == pytest.approx(
            np.std([each["figure"] for each in row["trainings"]], ddof=1)
        )
        assert row["trainings"][0]["figure"] != row["trainings"][1]["figure"]
        assert row["trainings"][0]["curve"][-1][:2] == [
            3,
            row["trainings"][0]["figure"],
        ]
        assert not row["tried"]
        assert f"{row['name']} " in printed
    some = lasting(
        trained(
            "--methods",
            "sidco",
            "dgc",
            "dgc",
            "--density",
            "0.1",
            "0.01",
            *twice,
        )
    )
    assert len(some) == 4
    assert [row for row in some if row["density"] == 0.1] == [
        row for row in rows if row["name"] in ("sidco", "dgc")
    ]


def test_a_row_takes_the_rate_with_the_least_validation_loss(trained):
    (row,) = trained(
        "--rate",
        "1e-6",
        "0.1",
        "1e-5",
        "--methods",
        "topk-allgather",
        "--density",
        "0.1",
    )
    assert row["tried"].keys() == {"1e-06", "0.1", "1e-05"}
    assert row["rate"] == 0.1
    assert row["tried"]["0.1"] == min(row["tried"].values())
    assert row["tried"]["0.1"] != row["loss"]  # another seed, and another part


@pytest.mark.parametrize("method", ["dense", "gtopk", "step-ahead"])
def test_a_rate_that_is_too_high_ends_the_training_and_not_the_run(
    method, capsys, trained, recwarn
):
    (row,) = trained(
        "--rate", "1e30", "--methods", method, "--density", "0.5", "--seeds", "2"
    )
    assert row["loss"] is row["figure"] is row["spread"] is None
    # a dense sum accepts what is not finite
    assert row["trainings"][0]["diverged"] == (method != "dense")
    assert row["trainings"][0]["curve"][0][1] > 0
    printed = capsys.readouterr()
    assert (
        "inf +- - 2 of 2 diverged" if method != "dense" else "inf +- - "
    ) in printed.out
    assert not printed.err
    assert not [each for each in recwarn if issubclass(each.category, RuntimeWarning)]


EXCHANGES = [name for name in TRAINED if name != "dense"]


@pytest.mark.parametrize("name", ["topk", "topk-no-feedback", "dgc", "step-ahead"])
def test_where_everything_is_sent_every_feedback_is_the_same_descent(name):
    """Momentum SGD, then, up to rounding: wherever a method has its momentum and its rate."""
    gradients = np.random.default_rng(1).standard_normal((4, 300)).astype(np.float32)
    terms, heavy = Terms(0.25, 0.5), np.zeros(300)
    descent = Descent(MPI.COMM_SELF, at_density(name, 1.0), terms)
    dense = Descent(MPI.COMM_SELF, "dense", terms)
    for gradient in gradients:
        heavy = 0.5 * heavy + gradient
        np.testing.assert_allclose(dense.update(gradient), 0.25 * heavy, atol=1e-5)
        np.testing.assert_allclose(descent.update(gradient), 0.25 * heavy, atol=1e-5)


@pytest.mark.parametrize("name", ["in-basis", "in-basis-two-bit"])
def test_a_step_by_signs_has_a_hundredth_of_the_rate_and_no_momentum(name):
    descent = Descent(MPI.COMM_SELF, at_density(name, 0.03), Terms(0.5))
    for step in range(2):
        update = descent.update(
            np.random.default_rng(step).standard_normal(1024, np.float32)
        )
        assert set(np.unique(update)) <= {np.float32(-0.005), 0, np.float32(0.005)}
        assert entries(descent)[0] == 8 / 256


def test_local_steps_with_dense_messages_on_one_rank_are_plain_descent():
    rng = np.random.default_rng(2)
    gradients, terms = (
        rng.standard_normal((6, 300)).astype(np.float32),
        Terms(0.25, 0.5),
    )
    dense, local = (
        Descent(MPI.COMM_SELF, "dense", terms),
        LocalDescent(MPI.COMM_SELF, "local-dense-2", terms),
    )
    x, y = np.zeros(300, np.float32), np.zeros(300, np.float32)
    for gradient in gradients:
        dense.step(x, gradient)
        local.point(y)
        local.step(y, gradient)
    np.testing.assert_allclose(y, x, atol=1e-5)
    assert entries(local) == (1, 1)


@pytest.mark.parametrize("name", TASKS)
def test_no_example_of_the_test_is_trained_on(name):
    try:
        task = TASKS[name]()
    except (ImportError, FileNotFoundError) as error:
        pytest.skip(str(error))
    parts = {part: set(numbers.tolist()) for part, numbers in task.parts.items()}
    assert (
        sum(map(len, parts.values()))
        == len(set.union(*parts.values()))
        == len(task.labels)
    )
    assert (
        set(task.training("test").tolist()) == parts["training"] | parts["validation"]
    )
    assert (
        set(task.training("validation").tolist())
        == parts["training"]
        >= set(task.sample().tolist())
    )
    inputs, labels = task.examples(task.held_out("test")[:4])
    assert inputs.dtype == np.float32
    loss, correct = task.evaluate(task.network(0), task.held_out("test")[:4])
    assert (loss, correct) == pytest.approx(task.network(0).evaluate(inputs, labels))
    assert labels.max() < task.network(0).shapes["output.bias"][0]


def test_a_warm_up_has_its_densities_for_an_epoch_each(trained):
    (row,) = trained(
        "--methods",
        "topk-allgather",
        "--density",
        "0.01",
        "--warm-up",
        "0.04",
        "--warm-up-steps",
        "2",
    )
    assert row["warm_up"] == [0.04]
    assert row["sent"] == pytest.approx((2 * 0.04 + 0.01) / 3, rel=0.01)


def test_gradients_are_captured(tmp_path, trained):
    file = tmp_path / "gradients.npz"
    capture = ["--capture", str(file), "--capture-steps", "2"]
    trained("--methods", "topk-allgather", "--density", "0.01", *capture)
    (captured,) = np.load(file).items()
    assert captured[0] == "topk-allgather 0.01, step 2 gradient"
    assert captured[1].size == TASKS["text"]().parameters


def test_adacomp_has_the_bins_of_the_paper_by_kind_of_layer():
    tensors = {
        "conv": np.ones((4, 3, 5, 5), "f4"),
        "full": np.ones((40, 30), "f4"),
        "bias": np.ones(30, "f4"),
    }
    exchange = exchange_of(MPI.COMM_SELF, "adacomp", Terms(0.1))
    exchange(tensors)
    made = [one for bucket in exchange.buckets for one in bucket.selection.settings]
    assert made == [
        {"class": "AdaComp", "bin_size": 50},
        {"class": "AdaComp", "bin_size": 500},
        {"class": "Dense"},
    ]


OWN = """
from mpicomp import TopK

class Half(TopK):
    def __init__(self, density, *, part=1.0):
        super().__init__(density * part)
        self.part = part
"""


def test_a_compressor_of_ones_own_is_compared_with_the_others(
    tmp_path, monkeypatch, trained
):
    (tmp_path / "my_own_module.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    lines = [
        f"GradientExchange(comm, my_own_module.Half({given}))"
        for given in ("0.1", "0.1, part=0.5")
    ]
    rows = trained("--density", "0.1", "--methods", "topk", "--lines", *lines)
    same, mine, half = (row["trainings"][0]["curve"] for row in rows)
    assert [row["name"] for row in rows] == ["topk", *lines]
    assert (
        [point[:2] for point in mine]
        == [point[:2] for point in same]
        != [point[:2] for point in half]
    )


def test_the_sum_is_compressed_as_the_gradients_are(trained):
    (row,) = trained("--methods", "topk-both-ways", "--density", "0.1")
    assert row["received"] == pytest.approx(0.1, rel=0.01)


def test_the_bytes_of_a_training_on_two_ranks_are_counted(tmp_path):
    file, steps = (
        tmp_path / "train.json",
        ["--rate", "0.1", "--density", "0.01", "--every", "3"],
    )
    some = "--methods", "dense", "gtopk", "topk-allgather", "few-bits"
    done = mpirun(2, train_script.__file__, *SHORT, *steps, *some, f"--json={file}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("method, density") == 1, "rank 0 alone prints"
    about = json.loads(file.read_text())
    rows = {row["name"]: row for row in about["rows"]}
    assert (about["ranks"], about["task"], about["steps"], about["batch"]) == (
        2,
        "text",
        3,
        4,
    )
    values = 4 * about["parameters"]
    # 2 (P-1)/P n v, and the headers
    assert rows["dense"]["nbytes"] == pytest.approx(values, rel=0.01)
    for row in rows.values():
        simulated = row["messages"] * LATENCY + 8 * row["nbytes"] / 1e9
        assert row["network_seconds"]["1e+09"] == pytest.approx(simulated)
        assert 0 < row["exchange_seconds"] <= row["seconds"]
        if row["density"]:
            assert row["sent"] < 0.05
            assert row["nbytes"] < 0.2 * values
