"""`mpicomp bench`, with tiny lengths: each suite's rows, and the measurements that all share."""

import json
import math

import few_bits
import kernels
import numpy as np
import pytest
from commands import left, written
from mpi4py import MPI

from collectives.calls.collective import COLLECTIVES
from mpicomp import SIDCo
from mpicomp_bench.bench import choice
from mpicomp_bench.bench.collective import (
    BASELINES,
    algorithms,
    dense_nbytes,
    least_nbytes,
)
from mpicomp_bench.bench.compressors import COMPRESSORS
from mpicomp_bench.bench.data import draw
from mpicomp_bench.bench.exchange import EXCHANGES
from mpicomp_bench.bounds import index_bits
from mpicomp_bench.info import library_and_version
from mpicomp_bench.measuring import Contestant, interleave

SUBJECTS = list(algorithms())
NAMES = list(COMPRESSORS)


@pytest.fixture
def bench(tmp_path):
    """Return a function from a subject and options to what a quick run writes as JSON."""
    return lambda subject, *more: written(
        tmp_path / "rows.json", "bench", subject, "--repeats", "2", *more
    )


def consistent(rows):
    """Check what all rows that compare times have in common."""
    for row in rows:
        assert row["low"] <= row["seconds"] <= row["high"]
        assert row["speedup"] == pytest.approx(row["baseline_seconds"] / row["seconds"])


def test_contestants_take_turns_in_an_order_drawn_anew():
    seen = []
    names = "abcd"
    contestants = [
        Contestant(name, lambda name=name: seen.append(name)) for name in names
    ]
    times = interleave(contestants, 6)
    # the first one is not timed
    turns = ["".join(seen[4 * turn : 4 * turn + 4]) for turn in range(7)]
    assert all(sorted(turn) == list(names) for turn in turns)
    assert len(set(turns)) > 1
    assert [each.shape for each in times] == [(1, 6)] * 4


def test_preparations_are_not_timed_and_slow_ones_have_fewer_turns():
    seen, ticks = [], iter(range(100))

    def note(what):
        return lambda: seen.append(what)

    slow = Contestant("slow", note("slow"), every=2)
    prepared = Contestant("prepared", note("call"), before=note("prepare"))
    times = interleave(
        [prepared, slow], 3, MPI.COMM_SELF, clock=lambda: next(ticks), warm=False
    )
    assert [each.tolist() for each in times] == [[[1.0] * 3], [[1.0] * 2]]
    assert [each for each in seen if each != "slow"] == ["prepare", "call"] * 3


def test_kernels(capsys, tmp_path):
    file = tmp_path / "rows.json"
    assert (
        kernels.main(["--length", "20000", "--repeats", "2", "--json", str(file)]) == 0
    )
    rows = json.loads(file.read_text())["rows"]
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)
    names = {row["name"].split()[0] for row in rows}
    assert names >= {
        "top_k",
        "sides",
        "merge",
        "accumulate",
        "scatter_add",
        "gather",
        "encode",
        "decode",
    }
    consistent(rows)


def test_exchange_compares_with_the_dense_allreduce(capsys, bench):
    rows = bench("exchange", "--length", "5000", "--density", "0.1", "0.01")["rows"]
    table = capsys.readouterr().out
    assert table.startswith(
        f"{library_and_version(MPI.Get_library_version())}, 1 rank "
    )
    assert table.count("MPI_Allreduce") == len(rows) == 22
    expected = (
        "selection, sparse_allreduce",
        "GradientExchange residual in place, sparse mean",
    )
    assert {f"0.01 {name}" for name in expected} <= {row["name"] for row in rows}
    consistent(rows)


@pytest.mark.parametrize("given", [("--tensors", "gpt"), ("--length", "5000")])
def test_whole_steps_are_compared_by_their_compressor(bench, given):
    rows = bench(
        "exchange",
        *given,
        "--density",
        "0.01",
        "--compressors",
        "TopK",
        "AdaComp",
        "--repeats",
        "1",
    )["rows"]
    assert [row["name"] for row in rows] == [
        "0.01 TopK, sparse mean",
        "0.01 AdaComp, sparse mean",
    ]


def test_sums_in_few_bits_are_compared_with_the_dense_allreduce(bench):
    rows = bench(
        "quantised", "--length", "5000", "--bits", "4", "1", "--algorithms", "direct"
    )["rows"]
    names = "4 bits direct", "1 bits direct"
    dense = "MPI_Allreduce", "16 bits"
    assert [(row["name"], row["baseline"]) for row in rows] == [
        (name, each) for name in names for each in dense
    ]
    consistent(rows)


def test_exchange_of_a_model_has_its_tensors_beside_one_vector(bench):
    about = bench("exchange", "--tensors", "gpt", "--density", "0.01", "--repeats", "1")
    assert about["length"] == 3_225_665
    tensors = [
        f"54 tensors, {returned}"
        for returned in ("sparse means", "means in out=", "new dense means")
    ]
    returned = (
        " residual in place, sparse mean",
        ", sparse mean",
        ", mean in out=",
        ", new dense mean",
    )
    names = [row["name"].partition(" ")[2] for row in about["rows"]]
    assert names == [
        *tensors,
        *(f"one vector{each}" for each in returned),
        "54 tensors, a round of OuterLoop",
    ]


@pytest.mark.parametrize("given", [("--tensors", "gpt"), ("--length", "5000")])
def test_whole_steps_are_compared_by_their_method(bench, given):
    """All that README and pages recommend: few bits, a basis, local steps; and a compressor by the tensor's name."""
    names = ["few-bits-4", "in-basis-two-bit-8", "local-few-bits-10", "adacomp"]
    rows = bench("exchange", *given, "--methods", *names, "--repeats", "1")["rows"]
    names[2] += ", a round"
    assert [row["name"] for row in rows] == ["a copy of the gradient", *names]
    consistent(rows)


@pytest.mark.parametrize(
    "name", ["few-bit-4", "fp16", "dense", "topk:(=3", "topk-0..5"]
)
def test_a_method_that_is_no_exchange_is_refused(name, capsys):
    status, error = left(["bench", "exchange", "--methods", name], capsys)
    assert status == 2
    assert f"argument --methods: got '{name}': expected one of few-bits, topk" in error


@pytest.mark.parametrize("name", EXCHANGES)
def test_every_exchange_of_the_methods_can_be_timed(name, bench):
    _, row = bench("exchange", "--length", "5000", "--methods", name)["rows"]
    assert row["seconds"] > 0


def test_the_parts_of_a_sum_in_few_bits(capsys, tmp_path, monkeypatch):
    file = tmp_path / "rows.json"
    quick = ["--length", "5000", "--repeats", "2", "--json", str(file)]
    monkeypatch.setattr("sys.argv", ["few_bits.py", *quick])
    assert few_bits.main() == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)
    consistent(rows)
    names = [row["name"] for row in rows]
    assert names[::2][:2] == ["8 bits direct", "4 bits direct"]
    assert {"8 bits: write the sum", "4 bits: as many bytes by MPI"} <= set(names)


SOME = ["compressors", "--length", "2000", "--densities", "0.1", "0.01"]


def by_place(rows):
    return {
        (row["distribution"], row["density"], row["compressor"]): row for row in rows
    }


def test_compressors_have_a_line_and_a_row_for_each(capsys, bench):
    about = bench(*SOME, "--distributions", "laplace", "cauchy", "laplace")
    rows, lines = by_place(about["rows"]), capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(rows) == 1 + 2 * 2 * len(NAMES)
    assert [line.split()[2] for line in lines[1 : 1 + len(NAMES)]] == NAMES
    assert (about["subject"], about["length"], about["options"]["skipped"]) == (
        "compressors",
        2000,
        {},
    )
    consistent(about["rows"])
    for (_, density, name), row in rows.items():
        top_k = rows[row["distribution"], density, "TopK"]
        assert row["baseline_seconds"] == top_k["seconds"]
        assert row["share_of_top_k"] == pytest.approx(
            row["captured"] / top_k["captured"]
        )
        assert row["bytes_per_entry"] == row["message_nbytes"] / row["entries"]
        assert (row["share_of_target"] is None) == (name in ("AdaComp", "Dense"))


def test_compressors_are_measured_by_what_they_keep(bench):
    rows = by_place(bench(*SOME, "--distributions", "pareto")["rows"])
    squares = np.sort(np.square(draw("pareto", 2000).astype(float)))[::-1]
    for density, k in (0.1, 200), (0.01, 20):
        found = {name: rows["pareto", density, name] for name in NAMES}
        assert found["TopK"]["captured"] == pytest.approx(
            squares[:k].sum() / squares.sum()
        )
        assert (found["TopK"]["entries"], found["TopK"]["share_of_target"]) == (
            k,
            pytest.approx(1),
        )
        assert found["Dense"]["captured"] == pytest.approx(1)
        assert 0 < found["Quantised-sign"]["captured"] < found["TopK"]["captured"]
        assert (
            found["Quantised-float16"]["message_nbytes"]
            < found["TopK"]["message_nbytes"]
        )
        fit = SIDCo(density)
        assert (
            found["SIDCo-exponential"]["first"]
            == fit.compress(draw("pareto", 2000)).density
        )
        assert found["SIDCo-exponential"]["share_of_target"] == pytest.approx(
            1, abs=0.1
        )


def test_compressors_take_captured_gradients(bench, tmp_path, capsys):
    gradient = draw("laplace", 1000)
    np.savez(tmp_path / "captured.npz", late=gradient)
    few = "--densities", "0.1", "--compressors", "TopK", "--captured"
    (row,) = bench(
        "compressors", "--length", "2000", *few, str(tmp_path / "captured.npz")
    )["rows"]
    squares = np.sort(np.square(gradient.astype(float)))[::-1]
    assert (row["distribution"], row["length"]) == ("late", 2000)
    assert row["captured"] == pytest.approx(squares[:100].sum() / squares.sum())
    np.savez(tmp_path / "captured.npz", late=gradient.reshape(10, 100))
    with pytest.raises(SystemExit):
        bench("compressors", *few, str(tmp_path / "captured.npz"))
    assert "expected vectors of floats" in capsys.readouterr().err


SMALL = ["--lengths", "2000"]


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_algorithm_takes_part_beside_the_baselines(subject, capsys, bench):
    about = bench(subject, *SMALL)
    lines = capsys.readouterr().out.splitlines()
    rows, known = about["rows"], algorithms()[subject]
    assert (about["subject"], about["ranks"]) == (subject, 1)
    assert len(lines) == 1 + len(rows) == 1 + 2 * (len(known) + len(BASELINES[subject]))
    assert [
        row["algorithm"] for row in rows[len(BASELINES[subject]) : len(rows) // 2]
    ] == known
    for row in rows:
        assert row["low"] <= row["seconds"] <= row["high"]
        assert row["speedup"] == pytest.approx(row["dense_seconds"] / row["seconds"])
        assert row["entries"] == row["union"] == round(row["density"] * 2000)
        assert row["nbytes"] == 0, "one rank has nobody to send to"
    assert rows[0]["speedup"] == 1


def test_from_a_gradient_the_selection_and_the_exchange_are_timed_as_well(bench):
    more = (
        "--from-gradient",
        "--densities",
        "0.1",
        "--algorithms",
        "tree",
        "exact",
        "--baselines",
        "dense",
    )
    rows = bench("gtopk", *SMALL, *more, "--repeats", "4", "--dense-repeats", "2")[
        "rows"
    ]
    names = [
        "MPI_Allreduce",
        "selection alone",
        "tree",
        "exact",
        "GradientExchange tree",
    ]
    assert [row["algorithm"] for row in rows] == names
    assert [row["turns"] for row in rows] == [2, 4, 4, 4, 4]
    assert all(row["from_gradient"] for row in rows)


def test_bounds_are_those_of_the_papers():
    assert index_bits(1.0) == index_bits(0.0) == 0
    assert index_bits(1 / 1000) == pytest.approx(math.log2(1000) + 1.44, abs=0.01)
    index = index_bits(1 / 1000) / 8
    assert least_nbytes("sparse_allreduce", 2, 10**6, 1000, 2000, 4) == pytest.approx(
        1000 * (3 + index)
    )
    assert least_nbytes("sparse_allreduce", 8, 10**6, 1000, 1000, 4) == pytest.approx(
        1750 * (3 + index)
    )
    assert least_nbytes("gtopk_allreduce", 8, 10**6, 1000, 8000, 4) == pytest.approx(
        1750 * (3 + index)
    )
    assert least_nbytes("sparse_allgather", 8, 10**6, 1000, 8000, 4) == pytest.approx(
        7000 * (3 + index)
    )
    assert least_nbytes(
        "sparse_reduce_scatter", 8, 10**6, 1000, 8000, 4
    ) == pytest.approx(875 * (3 + index))
    assert (
        dense_nbytes(8, 1000, 4) == 2 * dense_nbytes(8, 1000, 4, scattered=True) == 7000
    )
    for subject in SUBJECTS:
        assert least_nbytes(subject, 1, 1000, 10, 10, 4) == 0


def test_every_algorithm_of_a_collective_that_chooses_takes_part_with_auto(
    capsys, bench
):
    about = bench(
        "choice",
        "--lengths",
        "300",
        "--densities",
        "0.1",
        "--patterns",
        "independent",
        "shared",
    )
    assert [row["collective"] for row in about["rows"]] == [
        *["sparse_allreduce", "gtopk_allreduce"] * 2,
        *["quantised_allreduce"] * len(choice.BITS),
    ]
    for row in about["rows"]:
        known = {
            name
            for name in COLLECTIVES[row["collective"]].algorithms
            if not name.startswith("node")
        }
        assert row["seconds"].keys() == {"auto", *known}
        assert (
            row["best_seconds"]
            == row["seconds"][row["best"]]
            == min(row["seconds"][name] for name in known)
        )
        assert row["ratio"] == pytest.approx(
            row["seconds"]["auto"] / row["best_seconds"]
        )
    shown = capsys.readouterr().out
    assert all(f"\n{name:22}" in shown for name in COLLECTIVES)
