"""The experiments of benchmarks/papers: commands parse, an interrupted one continues, figures are drawn."""

import json
import pathlib

import numpy as np
import pytest
import train
from commands import PARSER

PAPERS = pathlib.Path(__file__).parent.parent / "benchmarks" / "papers"
RESULTS = PAPERS.parent.parent / "docs" / "results" / "papers"


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    """Let the modules of the experiments import each other, as when one of them is the script."""
    monkeypatch.syspath_prepend(str(PAPERS))


def test_every_command_is_known_and_stands_once():
    from experiments import EXPERIMENTS
    from figures import FIGURES

    assert EXPERIMENTS.keys() == FIGURES.keys()
    for experiment in EXPERIMENTS.values():
        runs = list(experiment())
        assert len({run.command for run in runs}) == len(runs)
        for run in runs:
            known, words = (train.parser(), ()) if run.trains else (PARSER, ("bench",))
            known.parse_args([*words, *run.options])


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


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_committed_rows_are_those_of_the_experiment_and_have_a_figure(file, tmp_path, monkeypatch):
    import figures
    from experiments import EXPERIMENTS

    grids, rows = [], json.loads(file.read_text())["rows"]
    assert {row["command"] for row in rows} <= {run.command for run in EXPERIMENTS[file.stem]()}
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
