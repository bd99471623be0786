"""A new algorithm appears in `mpicomp bench` and `mpicomp explain` by its declaration; tests/mpi has the sums."""

import json

import pytest

from collectives import gtopk_allreduce
from mpicomp.vector import add_up, top_k, within
from mpicomp_bench import main
from mpicomp_bench.bench.collective import algorithms


def gathering(vector, group, k):
    parts = yield from group.gather(vector, vector.nnz)
    total = add_up([theirs for theirs, _ in parts])
    result, dropped = top_k(total, max(count for _, count in parts) if k is None else k)
    return result, within(vector, dropped)


@pytest.fixture
def declared(monkeypatch):
    monkeypatch.setattr(gtopk_allreduce, "algorithms", dict(gtopk_allreduce.algorithms))
    gtopk_allreduce.algorithm(gathering)


def test_a_declared_algorithm_is_explained(declared, capsys):
    assert main(["explain", "--ranks", "8", "--length", "1e6", "--density", "0.001", "--json"]) == 0
    rows = {row["algorithm"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["gathering"]["operation"] == "gtopk_allreduce"
    assert rows["gathering"]["rounds"] == 3 + 3  # the ranks compare their calls, and gather
    assert rows["gathering"]["bytes"] > rows["exact"]["bytes"]


def test_a_declared_algorithm_is_measured(declared, tmp_path):
    assert "gathering" in algorithms()["gtopk"]
    small = ["--lengths", "1000", "--densities", "0.01", "--repeats", "1", "--baselines", "none"]
    file = tmp_path / "rows.json"
    assert main(["bench", "gtopk", "--algorithms", "gathering", *small, "--json", str(file)]) == 0
    assert [row["algorithm"] for row in json.loads(file.read_text())["rows"]] == ["gathering"]
