"""A new algorithm appears in `mpicomp bench` and `mpicomp explain` by its declaration; tests/mpi has the sums."""

import json

from cases import declare_gathering

from mpicomp_bench import main
from mpicomp_bench.bench.collective import algorithms


def test_a_declared_algorithm_is_explained(monkeypatch, capsys):
    declare_gathering(monkeypatch)
    assert (
        main(
            [
                "explain",
                "--ranks",
                "8",
                "--length",
                "1e6",
                "--density",
                "0.001",
                "--json",
            ]
        )
        == 0
    )
    rows = {
        row["algorithm"]: row for row in json.loads(capsys.readouterr().out)["rows"]
    }
    assert rows["gathering"]["operation"] == "gtopk_allreduce"
    # the ranks compare their calls, and gather
    assert rows["gathering"]["rounds"] == 3 + 3
    assert rows["gathering"]["bytes"] > rows["exact"]["bytes"]


def test_a_declared_algorithm_is_measured(monkeypatch, tmp_path):
    declare_gathering(monkeypatch)
    assert "gathering" in algorithms()["gtopk"]
    small = [
        "--lengths",
        "1000",
        "--densities",
        "0.01",
        "--repeats",
        "1",
        "--baselines",
        "none",
    ]
    file = tmp_path / "rows.json"
    assert (
        main(
            ["bench", "gtopk", "--algorithms", "gathering", *small, "--json", str(file)]
        )
        == 0
    )
    assert [row["algorithm"] for row in json.loads(file.read_text())["rows"]] == [
        "gathering"
    ]
