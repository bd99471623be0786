"""`mpicomp bench allreduce | reduce_scatter | allgather | gtopk | plot`, with tiny lengths."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from mpi4py import MPI
from test_cli import refused
from test_examples import LAUNCH

from collectives.cli import main
from collectives.cli.bench import chart, interfaces
from collectives.cli.bench.bounds import dense_nbytes, least_nbytes
from collectives.cli.bench.collective import ALGORITHMS, BASELINES
from collectives.cli.bench.step import OURS
from collectives.cli.bench.supports import PATTERNS, draw, gradient_above
from collectives.cost import index_bits
from collectives.profiles import NETWORKS
from collectives.progress import wait_for
from collectives.transport import endpoint_of
from collectives.tuning import Tuner
from mpicomp import TopK

SMALL = ["--lengths", "2000", "--repeats", "2"]


def bench(tmp_path, subject, *more):
    """Return what a quick run writes as JSON."""
    assert main(["bench", subject, *SMALL, "--json", str(tmp_path / "rows.json"), *more]) == 0
    return json.loads((tmp_path / "rows.json").read_text())


@pytest.mark.parametrize("subject", ALGORITHMS)
def test_every_algorithm_takes_part_beside_the_baselines(subject, capsys, tmp_path):
    about = bench(tmp_path, subject)
    lines = capsys.readouterr().out.splitlines()
    rows = about["rows"]
    assert (about["subject"], about["ranks"]) == (subject, 1)
    assert len(lines) == 1 + len(rows) == 1 + 2 * (len(ALGORITHMS[subject]) + len(BASELINES[subject]))
    assert [row["algorithm"] for row in rows[len(BASELINES[subject]) : len(rows) // 2]] == ALGORITHMS[subject]
    for row in rows:
        assert row["low"] <= row["seconds"] <= row["high"]
        assert row["least"] <= row["mean"] <= row["most"]
        assert row["speedup"] == pytest.approx(row["dense_seconds"] / row["seconds"])
        assert row["entries"] == row["union"] == round(row["density"] * 2000)
        assert row["nbytes"] == 0, "one rank has nobody to send to"
    assert rows[0]["speedup"] == 1


def test_lengths_patterns_types_and_codecs_are_all_combined(tmp_path):
    asked = {
        "--lengths": ["500", "2000"],
        "--densities": ["0.1", "0.2"],
        "--patterns": list(PATTERNS),
        "--dtypes": ["float16", "float64"],
        "--codecs": ["plain", "smallest"],
    }
    options = [word for option, words in asked.items() for word in (option, *words)]
    rows = bench(tmp_path, "gtopk", *options, "--algorithms", "exact", "--baselines", "none")["rows"]
    names = "length", "density", "pattern", "dtype", "codec"
    assert len({tuple(row[name] for name in names) for row in rows}) == len(rows) == math.prod(map(len, asked.values()))
    assert all(row["dense_seconds"] is None and row["speedup"] is None for row in rows)


def test_from_a_gradient_the_selection_and_the_exchange_are_timed_as_well(tmp_path):
    more = "--from-gradient", "--densities", "0.1", "--algorithms", "tree", "exact", "--baselines", "dense"
    rows = bench(tmp_path, "gtopk", *more, "--repeats", "4", "--dense-repeats", "2")["rows"]
    names = ["MPI_Allreduce", "selection alone", "tree", "exact", "GradientExchange tree"]
    assert [row["algorithm"] for row in rows] == names
    assert [row["turns"] for row in rows] == [2, 4, 4, 4, 4]
    assert all(row["from_gradient"] for row in rows)


@pytest.mark.parametrize("subject", ALGORITHMS)
def test_predictions_stand_beside_the_times(subject, capsys, tmp_path, monkeypatch):
    """By a network's profile; the model knows all of the library's algorithms. Without a profile there is none."""
    monkeypatch.setattr(endpoint_of(MPI.COMM_WORLD, wait_for), "tuner", Tuner())
    rows = bench(tmp_path, subject, "--network", "1gbit", "--densities", "0.1")["rows"]
    known = {row["algorithm"]: row["predicted"] for row in rows if not row["algorithm"].startswith("MPI_")}
    assert all(known[name] > 0 for name in ALGORITHMS[subject])
    assert all(
        row["over_measured"] == pytest.approx(row["predicted"] / row["seconds"]) for row in rows if row["predicted"]
    )
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[-3:] == ["predicted", "/", "meas."]
    ours = [line.split()[-2] for line, row in zip(lines, rows, strict=True) if row["predicted"]]
    assert ours == [f"{1e3 * row['predicted']:.3f}" for row in rows if row["predicted"]]
    assert {row["predicted"] for row in bench(tmp_path, subject)["rows"]} == {None}
    monkeypatch.setattr(endpoint_of(MPI.COMM_WORLD, wait_for), "tuner", Tuner(NETWORKS["1gbit"]))
    rows = bench(tmp_path, subject, "--densities", "0.1")["rows"]
    assert all(row["predicted"] > 0 for row in rows if row["algorithm"] in ALGORITHMS[subject])


def test_the_selection_is_added_to_predictions_as_it_was_measured(tmp_path):
    some = "--network", "1gbit", "--densities", "0.1", "--algorithms", "exact", "--baselines", "dense"
    alone = {row["algorithm"]: row for row in bench(tmp_path, "gtopk", *some)["rows"]}
    rows = {row["algorithm"]: row for row in bench(tmp_path, "gtopk", *some, "--from-gradient")["rows"]}
    selecting = rows["selection alone"]["seconds"]
    assert rows["exact"]["predicted"] == pytest.approx(alone["exact"]["predicted"] + selecting)
    assert rows["MPI_Allreduce"]["predicted"] == alone["MPI_Allreduce"]["predicted"]


KERNEL_SAYS = """\
Inter-|   Receive                            |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 111111 222 0 0 0 0 0 0 333333 444 0 0 0 0 0 0
  eth0: 555555 666 0 0 0 0 0 0 777777 888 0 0 0 0 0 0
  ib0:  1      1   0 0 0 0 0 0 23     1   0 0 0 0 0 0
"""


def test_bytes_are_read_from_all_interfaces_but_loopback():
    assert interfaces.sent(KERNEL_SAYS) == 777_777 + 23
    before = interfaces.sent()
    assert before >= 0


def test_interfaces_are_looked_at_where_each_rank_has_a_host_of_its_own(capsys):
    assert main(["bench", "gtopk", *SMALL, "--interfaces"]) == 2
    assert "expected several ranks, each on a host of its own" in capsys.readouterr().err


def test_osu_prints_a_block_for_each(capsys):
    asked = "--lengths", "100", "200", "--densities", "0.1", "--algorithms", "auto", "--baselines", "dense", "--osu"
    assert main(["bench", "allreduce", *asked, "--repeats", "3"]) == 0
    blocks = capsys.readouterr().out.split("\n\n")
    assert [block.splitlines()[0].split(", ")[1] for block in blocks] == ["MPI_Allreduce", "auto"]
    for block in blocks:
        head, *lines = block.strip().splitlines()[1:]
        assert head.split("  ")[0] == "# Size"
        figures = [[float(figure) for figure in line.split()] for line in lines]
        assert [(size, iterations) for size, _, _, _, iterations in figures] == [(400, 3), (800, 3)]
        assert all(least <= mean <= most for _, mean, least, most, _ in figures)


def test_on_two_ranks_the_bytes_are_those_of_the_cost_table(tmp_path):
    """Supports are shared: the union has as many entries as a rank brings."""
    file = tmp_path / "rows.json"
    shape = ["--lengths", "50000", "--densities", "0.01", "--repeats", "2", "--patterns", "shared", "--codecs", "plain"]
    command = ["mpirun", "-n", "2", sys.executable, "-m", "mpi4py", "-m", "collectives.cli", "bench", "allreduce"]
    done = subprocess.run(
        [*command, *shape, "--json", str(file)],
        env={**os.environ, **LAUNCH}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    about = json.loads(file.read_text())
    sent = {row["algorithm"]: row["nbytes"] for row in about["rows"]}
    assert about["ranks"] == 2
    assert len(done.stdout.splitlines()) == 1 + len(sent)
    assert all(row["union"] == row["entries"] == 500 for row in about["rows"])
    assert sent["MPI_Allreduce"] == 200_000
    assert sent["MPI_Allgatherv"] == 4000
    for name in "recursive_doubling", "allgather", "gTop-k tree, as published":
        assert 4000 <= sent[name] < 4400
    over = {row["algorithm"]: row["over_bound"] for row in about["rows"]}
    assert over["recursive_doubling"] == pytest.approx(
        sent["recursive_doubling"] / (500 * (3 + index_bits(1 / 100) / 8))
    )


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_supports_overlap_as_their_name_says(pattern, size):
    length, k = 100_000, 1000
    vectors = [draw(pattern, rank, size, length, k, "float32") for rank in range(size)]
    for vector in vectors:
        vector.validate()
        assert vector.nnz == k
    union = np.unique(np.concatenate([vector.indices for vector in vectors])).size
    if pattern in ("shared", "disjoint"):
        assert union == (k if pattern == "shared" else k * size)
    else:
        assert union == k * size if size == 1 else k < union < k * size
    hot = [np.count_nonzero(vector.indices // 5000 * 5000 // length == 0) for vector in vectors]
    assert min(hot) > 0
    inside = vectors[0].indices
    share = np.mean((inside >= length // 3) & (inside < length // 3 + length // 20))
    assert share == pytest.approx(0.9 if pattern == "hot" else 0.05, abs=0.03)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_largest_of_a_gradient_stand_where_the_vector_has_its_entries(dtype):
    vector = draw("hot", 1, 4, 10_000, 100, dtype)
    gradient = gradient_above(vector, 1)
    assert gradient.dtype == dtype
    np.testing.assert_array_equal(TopK(k=100).compress(gradient).indices, vector.indices)
    np.testing.assert_array_equal(np.delete(gradient, vector.indices).astype(bool).sum() >= 9700, True)
    spread = gradient_above(draw("independent", 1, 4, 100_000, 10_000, dtype), 1)
    largest = TopK(k=1000).compress(spread).indices  # a tenth of them: as many in each half, but for chance
    assert 400 < np.count_nonzero(largest < 50_000) < 600


def test_bounds_are_those_of_the_papers():
    assert index_bits(1.0) == index_bits(0.0) == 0
    assert index_bits(1 / 1000) == pytest.approx(math.log2(1000) + 1.44, abs=0.01)
    index = index_bits(1 / 1000) / 8
    assert least_nbytes("allreduce", 2, 10**6, 1000, 2000, 4) == pytest.approx(1000 * (3 + index))
    assert least_nbytes("allreduce", 8, 10**6, 1000, 1000, 4) == pytest.approx(1750 * (3 + index))
    assert least_nbytes("gtopk", 8, 10**6, 1000, 8000, 4) == pytest.approx(1750 * (3 + index))
    assert least_nbytes("allgather", 8, 10**6, 1000, 8000, 4) == pytest.approx(7000 * (3 + index))
    assert least_nbytes("reduce_scatter", 8, 10**6, 1000, 8000, 4) == pytest.approx(875 * (3 + index))
    assert dense_nbytes("allreduce", 8, 1000, 4) == 2 * dense_nbytes("reduce_scatter", 8, 1000, 4) == 7000
    for subject in ALGORITHMS:
        assert least_nbytes(subject, 1, 1000, 10, 10, 4) == 0


def test_a_crossover_is_where_the_times_are_equal():
    """On logarithmic axes powers are straight lines: 2 x^2 = 3 x^1/2 at x = 1.5^(2/3)."""
    along = [0.1, 1, 10]
    ours, dense = [2 * x**2 for x in along], [3 * x**0.5 for x in along]
    assert chart.crossovers(along, ours, dense) == pytest.approx([1.5 ** (2 / 3)])
    assert chart.crossovers(along, ours, ours) == chart.crossovers([1], [2], [3]) == []


def test_the_plot_has_a_panel_for_each_number_of_ranks_and_for_each_density(tmp_path):
    pytest.importorskip("matplotlib")
    rows = bench(tmp_path, "allreduce", "--densities", "0.1", "0.2", "--plot", str(tmp_path / "one.png"))["rows"]
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    assert [(axis, fixed) for axis, fixed, _ in chart.panels(rows)] == [("density", "P = 1")]
    more = {"subject": "allreduce", "rows": [{**row, "ranks": 4} for row in rows]}
    (tmp_path / "four.json").write_text(json.dumps(more))
    kinds = [(axis, fixed) for axis, fixed, _ in chart.panels([*rows, *more["rows"]])]
    assert kinds == [("density", "P = 1"), ("density", "P = 4"), ("ranks", "density 0.1"), ("ranks", "density 0.2")]
    files = [str(tmp_path / name) for name in ("rows.json", "four.json")]
    assert main(["bench", "plot", str(tmp_path / "both.svg"), *files]) == 0
    assert b"density 0.2" in (tmp_path / "both.svg").read_bytes() or (tmp_path / "both.svg").stat().st_size > 10_000


def test_help_shows_examples(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    for subject in ALGORITHMS:
        with pytest.raises(SystemExit) as left:
            main(["bench", subject, "--help"])
        assert left.value.code == 0
        shown = capsys.readouterr().out
        assert all(name in shown for name in (*PATTERNS, *ALGORITHMS[subject], *BASELINES[subject]))
        assert shown.count(f"mpirun -n 4 mpicomp bench {subject}") == 3


def test_bad_settings_are_refused_before_anything_is_measured(capsys, tmp_path):
    for option in "--algorithms", "--patterns", "--dtypes", "--codecs", "--baselines":
        error = refused(["gtopk", option, "other"], capsys)
        assert f"argument {option}: invalid choice: 'other' (choose from " in error
    assert "expected a whole number of at least 1" in refused(["gtopk", "--dense-repeats", "0"], capsys)
    assert "expected 0 < density <= 1" in refused(["allgather", "--densities", "2"], capsys)
    other = tmp_path / "other.json"
    other.write_text('{"rows": [{"name": "of another benchmark"}]}')
    for file in other, tmp_path / "missing.json", tmp_path:
        error = refused(["plot", str(tmp_path / "x.png"), str(file)], capsys)
        assert f"argument JSON: got {str(file)!r}: " in error
    assert "expected what `mpicomp bench allreduce --json FILE`" in refused(
        ["plot", str(tmp_path / "x.png"), str(other)], capsys
    )


def test_disjoint_supports_that_do_not_fit_are_refused(capsys, monkeypatch):
    from collectives.cli.bench.collective import Case, too_many

    assert too_many([Case(1000, "float32", 0.25, "disjoint")], 4) is None
    error = too_many([Case(1000, "float32", 0.5, "disjoint")], 4)
    assert error == "disjoint supports of density 0.5 are 4 x 500 entries in 1000 places: expected at most 1/4"
    monkeypatch.setattr("collectives.cli.bench.collective.too_many", lambda cases, ranks: error)
    assert main(["bench", "allreduce"]) == 2
    assert capsys.readouterr().err == f"mpicomp bench allreduce: {error}\n"


def test_a_step_is_compared_with_the_published_ways(capsys, tmp_path):
    """Computing takes as long as asked for, and efficiency is its share of the step."""
    some = ["--models", "VGG-16", "--length", "3000", "--compute", "0.01", "--density", "0.01", "--repeats", "3"]
    for pause in [], ["--pause"]:
        file = tmp_path / "steps.json"
        assert main(["bench", "step", *some, *pause, "--dense-repeats", "2", "--json", str(file)]) == 0
        *table, published = capsys.readouterr().out.splitlines()
        rows = json.loads(file.read_text())["rows"]
        names = ["MPI_Allreduce", "MPI_Allgatherv", "gTop-k tree, as published", *OURS]
        assert [row["algorithm"] for row in rows] == [*names, "GradientExchange recursive_doubling"]
        assert [row["turns"] for row in rows] == [2] + [3] * (len(rows) - 1)
        assert len(table) == 1 + len(rows)
        assert "1.1 to 1.7 times" in published
        for row in rows:
            assert (row["length"], row["compute"]) == (3000, 0.01)
            assert row["efficiency"] == pytest.approx(0.01 / row["seconds"])
            assert row["efficiency"] <= 1
            assert row["over_dense"] == pytest.approx(row["efficiency"] / rows[0]["efficiency"])
            assert row["over_top_k"] == pytest.approx(row["efficiency"] / rows[1]["efficiency"])
