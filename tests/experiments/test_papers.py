"""The experiments of experiments/papers: commands parse, an interrupted one continues, figures are drawn."""

import json
import pathlib
import re
from statistics import NormalDist

import numpy as np
import pytest
import train
from commands import PARSER
from descents import Terms, exchange_of
from mpi4py import MPI

from collectives import GradientExchange
from mpicomp import TopK
from mpicomp_bench import COMMANDS, parser
from mpicomp_bench.bench.compressors import COMPRESSORS

PAPERS = pathlib.Path(__file__).parents[2] / "experiments" / "papers"
RESULTS = PAPERS.parent.parent / "experiments" / "results" / "papers"


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    """Let the modules of the experiments import each other, as when one of them is the script."""
    monkeypatch.syspath_prepend(str(PAPERS))


@pytest.fixture
def compared(monkeypatch):
    """Return the module of the compressors that the papers compare with, which the command knows meanwhile."""
    import compared

    for name, compressor in compared.COMPARED.items():
        monkeypatch.setitem(COMPRESSORS, name, compressor)
    return compared


def test_every_command_is_known_and_stands_once(compared):
    from figures import FIGURES

    from experiments import COMPARED, EXPERIMENTS, TRAIN

    compressors = parser(COMMANDS.values())
    known = {
        TRAIN: (train.parser(), ()),
        COMPARED: (compressors, ("bench", "compressors")),
        "": (PARSER, ("bench",)),
    }
    assert EXPERIMENTS.keys() == FIGURES.keys()
    for experiment in EXPERIMENTS.values():
        runs = list(experiment())
        assert len({run.command for run in runs}) == len(runs)
        for run in runs:
            command, words = known[run.script]
            command.parse_args([*words, *run.options])


def test_every_method_of_the_trainings_makes_two_steps():
    from experiments import EXPERIMENTS, TRAIN

    asked = [
        run.options
        for experiment in EXPERIMENTS.values()
        for run in experiment()
        if run.script == TRAIN
    ]
    for name in {
        name for options in asked for name in train.parser().parse_args(options).methods
    } - {"dense"}:
        exchange, gradient = (
            exchange_of(MPI.COMM_SELF, name, Terms(rate=0.1)),
            np.ones((50, 40), np.float32),
        )
        assert (
            exchange({"weight": gradient})["weight"].shape
            == exchange({"weight": gradient})["weight"].shape
        )


def test_rows_that_the_file_has_are_not_run_again(tmp_path, monkeypatch):
    import papers

    asked = []

    def rows_of(run):
        asked.append(run.command)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return [{"command": run.command}]

    monkeypatch.setattr(papers, "rows_of", rows_of)
    with pytest.raises(KeyboardInterrupt):
        papers.complete("E1", tmp_path / "E1.json")
    rows = papers.complete("E1", tmp_path / "E1.json")
    assert asked[1] == asked[2] not in (asked[0], *asked[3:])
    assert [row["command"] for row in rows] == [asked[0], *asked[2:]]
    assert json.loads((tmp_path / "E1.json").read_text())["rows"] == rows


@pytest.mark.parametrize(
    "file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem
)
def test_committed_rows_are_those_of_the_experiment_and_have_a_figure(
    file, tmp_path, monkeypatch
):
    import figures

    from experiments import EXPERIMENTS

    grids, rows = [], json.loads(file.read_text())["rows"]
    assert {row["command"] for row in rows} <= {
        run.command for run in EXPERIMENTS[file.stem]()
    }
    monkeypatch.setattr(figures, "draw", lambda grid, path: grids.append(grid))
    figures.FIGURES[file.stem](rows, tmp_path / "figure.svg")
    for panel in (panel for panels in grids[0] for panel in panels):
        assert panel["ylabel"]
        for line in panel["lines"]:
            assert len(line["x"]) == len(line["y"]) > 0
            assert np.isfinite(line["y"]).all()


def test_the_models_of_gtopk_are_those_of_the_paper():
    from figures import allgather_model, dense_model

    assert allgather_model(4) == pytest.approx(0.75)  # 2 (P-1) k over 4 k lg P
    assert allgather_model(32) == pytest.approx(3.1)
    assert dense_model(32) == pytest.approx(96.875)


SEARCHES = pytest.mark.parametrize("name", ["RedSync", "GaussianK", "MSTopK"])


@pytest.mark.parametrize("density", [0.3, 0.05, 0.001])
@pytest.mark.parametrize(
    "draw", ["standard_normal", "standard_cauchy", "standard_exponential"]
)
def test_redsync_trims_to_the_exact_top_k_and_mstopk_fills_up_to_k(
    compared, draw, density
):
    dense = getattr(np.random.default_rng(0), draw)(20_000).astype(np.float32)
    exact = TopK(density).compress(dense)
    np.testing.assert_array_equal(
        compared.RedSync(density).compress(dense).indices, exact.indices
    )
    found = compared.MSTopK(density).compress(dense)
    assert found.nnz == exact.nnz
    assert np.intersect1d(found.indices, exact.indices).size >= 0.99 * exact.nnz


def test_gaussian_k_corrects_its_distance_three_times_at_most(compared):
    """All values are one deviation from a mean of zero: at .67 all are selected, at 1.01 none, at .51 and .76 all."""
    compressor = compared.GaussianK(0.5)
    assert compressor.compress(np.resize([1.0, -1.0], 1000)).nnz == 500
    assert compressor.rounds == 4
    assert compressor.threshold == pytest.approx(
        NormalDist().inv_cdf(0.75) * 1.5 * 0.5 * 1.5
    )


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
def test_gaussian_k_of_a_normal_vector_has_its_density(compared, density):
    dense = np.random.default_rng(5).standard_normal(200_000).astype(np.float32)
    assert compared.GaussianK(density).compress(dense).density == pytest.approx(
        density, rel=0.15
    )


@SEARCHES
@pytest.mark.parametrize("density", [0.1, 1.0])
def test_a_compressor_of_the_contract_alone_has_its_place_in_an_exchange(
    compared, name, density
):
    """Sums and residual are what was given: of equal values, few, zeros and one."""
    exchange, rng = (
        GradientExchange(MPI.COMM_SELF, getattr(compared, name)(density)),
        np.random.default_rng(0),
    )
    given = total = np.zeros(100, np.float32)
    for gradient in (
        np.full(100, 3),
        rng.integers(-99, 99, 100),
        np.zeros(100),
        np.arange(100) == 7,
    ):
        given = given + gradient.astype(np.float32)
        total = total + exchange(gradient.astype(np.float32))
    (bucket,) = exchange.buckets
    np.testing.assert_array_equal(total + bucket.feedback.residual, given)
    with pytest.raises(
        ValueError, match=re.escape("values[3] is inf: expected finite values")
    ):
        exchange(np.where(np.arange(100) == 3, np.inf, 1).astype(np.float32))
