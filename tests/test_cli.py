import argparse
import io
import json
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from collectives.cli import info, main
from collectives.cli.bench.compressors import captured
from collectives.cli.bench.contestants import MAKERS
from collectives.cli.bench.data import FAMILIES, draw
from collectives.cli.bench.overlap import Link
from collectives.cli.bench.progress import progress
from collectives.cli.bench.settings import positive
from collectives.cli.bench.timing import Prepared, taking_turns
from mpicomp import AdaComp, SIDCo, SparseVector


def test_info_prints_what_the_installation_is_made_of(capsys):
    assert main(["info"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines.keys() >= {"python", "mpicomp", "numpy", "numba", "mpi4py", "MPI", "ranks", "arrays"}
    assert lines["ranks"] == "1 on 1 host"


@pytest.mark.parametrize("name", info.LAUNCHER_SIZES)
def test_a_launcher_of_another_mpi_is_noticed(name, monkeypatch):
    assert info.singleton_warning(4, {name: "4"}) is None
    assert f"{name}=4, and MPI sees 1" in info.singleton_warning(1, {name: "4"})
    monkeypatch.setenv(name, "4")
    out = io.StringIO()
    assert info.run(argparse.Namespace(json=False), out) == 1
    assert "warning: the launcher says" in out.getvalue()


def test_the_innermost_launcher_is_believed():
    """Inside a batch job mpirun starts one daemon a node through srun: 2 tasks for Slurm, 4 ranks for MPI."""
    assert info.singleton_warning(4, {"OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"}) is None


def test_without_a_command_the_usage_is_shown(capsys):
    with pytest.raises(SystemExit) as left:
        main([])
    assert left.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_bench_kernels_of_a_gpu_says_what_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert main(["bench", "kernels", "--device", "gpu"]) == 2
    assert "bench kernels: CuPy is not installed" in capsys.readouterr().err
    unseeing = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "cupy", unseeing)
    assert main(["bench", "kernels", "--device", "gpu"]) == 2
    assert "CuPy sees no GPU here" in capsys.readouterr().err


def test_bench_kernels_prints_a_table_and_writes_json(capsys, tmp_path):
    assert (
        main(["bench", "kernels", "--length", "100000", "--repeats", "1", "--json", str(tmp_path / "rows.json")]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    about = json.loads((tmp_path / "rows.json").read_text())
    assert (about["subject"], about["ranks"], about["length"]) == ("kernels", 1, 100_000)
    assert len(lines) == 1 + len(about["rows"])
    names = {row["name"].split()[0] for row in about["rows"]}
    assert names >= {"top_k", "moments", "merge", "accumulate", "scatter_add", "gather", "encode", "decode"}
    for row in about["rows"]:
        assert row["low"] <= row["seconds"] <= row["high"]
        assert row["speedup"] == pytest.approx(row["baseline_seconds"] / row["seconds"])


def test_bench_exchange_compares_with_the_dense_allreduce(capsys):
    assert main(["bench", "exchange", "--length", "50000", "--density", "0.1", "0.01", "--repeats", "2"]) == 0
    table = capsys.readouterr().out
    assert table.startswith(f"{info.library_and_version(MPI.Get_library_version())}, 1 rank ")
    assert table.count("MPI_Allreduce") == 26
    assert "0.01 selection, sparse_allreduce" in table
    assert "0.01 GradientExchange residual in place, sparse mean" in table


def test_bench_exchange_of_a_model_has_its_tensors_beside_one_vector(capsys, tmp_path):
    file = tmp_path / "rows.json"
    assert (
        main(["bench", "exchange", "--tensors", "gpt", "--density", "0.01", "--repeats", "1", "--json", str(file)]) == 0
    )
    about = json.loads(file.read_text())
    assert about["length"] == 3_225_665
    assert about["MPI"] in capsys.readouterr().out
    assert [row["name"].partition(" ")[2] for row in about["rows"]] == [
        "54 tensors, sparse means",
        "54 tensors, means in out=",
        "54 tensors, new dense means",
        "one vector residual in place, sparse mean",
        "one vector, sparse mean",
        "one vector, mean in out=",
        "one vector, new dense mean",
    ]


def test_what_is_prepared_before_a_turn_is_not_timed():
    seen = []
    call = Prepared(lambda: seen.append("call"), lambda: seen.append("prepare"))

    def around(call):
        seen.append("clock")
        call()
        return 1.0

    assert taking_turns([call], 2, around) == [[1.0, 1.0]]
    assert seen == ["call", *["prepare", "clock", "call"] * 2]


@pytest.mark.parametrize(
    ("described", "found"),
    [
        ("Open MPI v5.0.11, package: Open MPI user@host, Sep 16, 2026\0", "Open MPI v5.0.11"),
        ("MPICH Version:      5.0.2\nMPICH Release date: unreleased\n", "MPICH Version: 5.0.2"),
        ("Intel(R) MPI Library 2021.17 for Linux* OS\n", "Intel(R) MPI Library 2021.17 for Linux* OS"),
    ],
)
def test_the_mpi_library_is_named_in_one_line(described, found):
    assert info.library_and_version(described) == found


def test_bench_overlap_compares_with_a_step_that_waits(capsys):
    """Also over a slow link, where one vector after the other has to pass."""
    some = ["bench", "overlap", "--length", "4000", "--tensors", "8", "--compute", "0.01", "--repeats", "2"]
    for link in [], ["--link", "1e8"]:
        assert main([*some, "--density", "0.1", *link]) == 0
        table = capsys.readouterr().out.splitlines()
        assert table[1].startswith("0.1 overlapped, a bucket a tensor")
        assert table[2].startswith("0.1 overlapped, 2 in a bucket")
        assert "compute, then one bucket" in table[2]


def test_a_vector_passes_a_link_behind_those_before_it(monkeypatch):
    link, vector = Link(8e6), SparseVector(np.arange(1250), np.ones(1250, np.float32), 5000)  # 10 kB: 10 ms
    began = time.perf_counter()
    with monkeypatch.context() as clock:
        clock.setattr(time, "perf_counter", lambda: began)  # both come at once
        first, second = (link(vector, MPI.COMM_SELF) for _ in range(2))
    assert second.end - first.end == pytest.approx(0.01)
    assert first.wait().nnz == second.wait().nnz == 1250
    assert time.perf_counter() - began > 0.02
    assert first.test()


SOME = ["bench", "compressors", "--length", "2000", "--repeats", "2", "--densities", "0.1", "0.01"]


def bench_compressors(tmp_path, *more):
    """Return what a quick run writes as JSON: the rows by what they are about, and the rest."""
    assert main([*SOME, "--json", str(tmp_path / "rows.json"), *more]) == 0
    about = json.loads((tmp_path / "rows.json").read_text())
    return {(row["distribution"], row["density"], row["compressor"]): row for row in about.pop("rows")}, about


def test_bench_compressors_prints_a_line_and_writes_a_row_for_each(capsys, tmp_path):
    rows, about = bench_compressors(tmp_path, "--distributions", "laplace", "cauchy", "laplace")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(rows) == 1 + 2 * 2 * len(MAKERS)
    assert [line.split()[2] for line in lines[1 : 1 + len(MAKERS)]] == list(MAKERS)
    assert (about["subject"], about["length"], about["skipped"]) == ("compressors", 2000, {})
    for (_, density, name), row in rows.items():
        top_k = rows[row["distribution"], density, "TopK"]
        assert row["low"] <= row["seconds"] <= row["high"]
        assert row["baseline_seconds"] == top_k["seconds"]
        assert row["speedup"] == pytest.approx(top_k["seconds"] / row["seconds"])
        assert row["share_of_top_k"] == pytest.approx(row["captured"] / top_k["captured"])
        assert row["bytes_per_entry"] == row["message_nbytes"] / row["entries"]
        assert (row["share_of_target"] is None) == (name in ("AdaComp", "Dense"))


def test_bench_compressors_measures_what_is_kept(tmp_path):
    rows, _ = bench_compressors(tmp_path, "--distributions", "pareto")
    squares = np.sort(np.square(draw("pareto", 2000).astype(float)))[::-1]
    for density, k in (0.1, 200), (0.01, 20):
        found = {name: rows["pareto", density, name] for name in MAKERS}
        for name in "TopK", "RedSync", "Threshold":
            assert found[name]["captured"] == pytest.approx(squares[:k].sum() / squares.sum())
            assert (found[name]["entries"], found[name]["share_of_target"]) == (k, pytest.approx(1))
        assert found["Dense"]["captured"] == pytest.approx(1)
        assert 0 < found["RandomK"]["captured"] < found["Quantised-sign"]["captured"] < found["TopK"]["captured"]
        assert found["Quantised-float16"]["message_nbytes"] < found["TopK"]["message_nbytes"]
        fit = SIDCo(density)
        assert found["SIDCo-exponential"]["first"] == fit.compress(draw("pareto", 2000)).density
        assert found["SIDCo-exponential"]["share_of_target"] == pytest.approx(1, abs=0.1)


def test_values_that_are_not_sent_as_they_are_count_by_what_they_leave():
    gradient = draw("normal", 1000)
    vector = AdaComp(50).compress(gradient, gradient=gradient)
    left = np.square(gradient - vector.to_dense(), dtype=float).sum()
    square = np.square(gradient, dtype=float).sum()
    assert captured(gradient, vector, square) == pytest.approx(1 - left / square)


def test_bench_compressors_always_has_the_baseline(capsys):
    assert main([*SOME, "--distributions", "layers", "--compressors", "GaussianK"]) == 0
    lines = [line.split()[:3] for line in capsys.readouterr().out.splitlines()[1:]]
    assert lines == [["layers", density, name] for density in ("0.1", "0.01") for name in ("TopK", "GaussianK")]


def test_bench_compressors_can_leave_out_the_waiting_for_a_core(tmp_path):
    few = "--distributions", "normal", "--compressors", "RedSync"
    assert bench_compressors(tmp_path, *few)[1]["clock"] == "perf_counter"
    rows, about = bench_compressors(tmp_path, *few, "--cpu-time")
    assert about["clock"] == "thread_time"
    assert all(row["seconds"] > 0 for row in rows.values())


def test_bench_compressors_goes_on_without_scipy(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    rows, about = bench_compressors(
        tmp_path, "--distributions", "gamma", "--compressors", "SIDCo-gamma", "SIDCo-pareto"
    )
    assert {name for _, _, name in rows} == {"TopK", "SIDCo-pareto"}
    assert "pip install scipy" in about["skipped"]["SIDCo-gamma"]
    assert "SIDCo-gamma is left out: distribution='gamma' needs SciPy" in capsys.readouterr().err


def test_bench_compressors_writes_a_table_for_a_page(tmp_path):
    page = tmp_path / "table.md"
    bench_compressors(tmp_path, "--compressors", "Dense", "GaussianK", "--markdown", str(page))
    first, second = page.read_text().split("Density ")[1:]
    assert (first.split()[0], second.split()[0]) == ("0.1:", "0.01:")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in second.splitlines() if line.startswith("|")]
    assert [line[0] for line in cells] == ["compressor", "---", "TopK", "Dense", "GaussianK"]
    assert cells[0][4:] == list(FAMILIES)
    assert cells[2][4:] == ["1.00, 1.00"] * len(FAMILIES)
    assert cells[3][4].startswith("(1), ")


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_bench_compressors_draws(ending, tmp_path):
    pytest.importorskip("matplotlib")
    figure = tmp_path / f"figure.{ending}"
    bench_compressors(tmp_path, "--distributions", "normal", "--plot", str(figure))
    drawn = figure.read_bytes()
    assert drawn.startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    assert len(drawn) > 10_000


def test_a_terminal_gets_a_progress_bar_where_tqdm_is_installed(monkeypatch):
    pytest.importorskip("tqdm")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = progress(3)
    bar.update()
    bar.refresh()
    bar.close()
    assert "1/3" in terminal.getvalue()


def test_without_tqdm_the_benchmark_runs_as_well(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert main([*SOME, "--distributions", "normal", "--compressors", "Dense"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 5
    assert captured.err == ""


@pytest.mark.parametrize("length", [1, 19, 21, 1000])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_of_every_distribution_are_sound_and_the_same_in_every_run(family, length):
    values = draw(family, length)
    assert (values.dtype, values.shape) == (np.float32, (length,))
    assert np.isfinite(values).all()
    assert values.any()
    assert values.tobytes() == draw(family, length).tobytes()


def test_help_shows_an_example_that_can_be_run(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as left:
        main(["bench", "compressors", "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*MAKERS, *FAMILIES))
    examples = [line.split()[1:] for line in shown.partition("examples:")[2].splitlines() if line.strip()]
    small = ["--length", "500", "--repeats", "1"]
    assert len(examples) == 3
    for example in examples:
        assert main([*example[: example.index("--json") if "--json" in example else None], *small]) == 0


def refused(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        main(["bench", *arguments])
    assert left.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "-3", "x", "2.5", "nan", "inf", ""])
def test_a_bad_number_is_refused(number, capsys):
    for subject in "exchange", "kernels", "compressors":
        for option in "--length", "--repeats":
            error = refused([subject, f"{option}={number}"], capsys)
            assert f"argument {option}: got {number!r}: expected a whole number of at least 1" in error


@pytest.mark.parametrize("number", ["0", "-1", "inf", "nan", "fast"])
def test_a_bad_rate_is_refused(number, capsys):
    for option in "--link", "--compute":
        assert f"{option}: got {number!r}: expected a number above 0" in refused(
            ["overlap", f"{option}={number}"], capsys
        )


@pytest.mark.parametrize("density", ["0", "2", "-0.1", "nan", "few"])
def test_a_bad_density_is_refused(density, capsys):
    for subject, option in ("exchange", "--density"), ("compressors", "--densities"):
        error = refused([subject, f"{option}={density}"], capsys)
        assert f"argument {option}: got {density!r}: expected 0 < density <= 1" in error


def test_other_bad_settings_are_refused_before_anything_is_measured(capsys, tmp_path):
    missing = str(tmp_path / "missing" / "file.png")
    for option in "--json", "--markdown", "--plot":
        assert f"argument {option}: got {missing!r}: there is no folder" in refused(
            ["compressors", option, missing], capsys
        )
        assert "it is a folder" in refused(["compressors", option, str(tmp_path)], capsys)
    for option, known in ("--distributions", FAMILIES), ("--compressors", MAKERS):
        error = refused(["compressors", option, "other"], capsys)
        assert f"argument {option}: invalid choice: 'other'" in error
        assert all(name in error for name in known)


def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_is_measured(capsys, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    assert "expected a name that ends in .eps" in refused(["compressors", "--plot", str(tmp_path / "x.doc")], capsys)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install matplotlib" in refused(["compressors", "--plot", str(tmp_path / "x.png")], capsys)


def test_a_length_may_be_written_as_one_reads_it():
    assert positive("25_000_000") == positive("25e6") == positive("25000000") == 25_000_000
    assert positive("9007199254740993") == 9007199254740993
