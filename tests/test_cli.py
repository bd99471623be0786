import io
import json

import pytest

from collectives.cli import info, main


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
    assert info.run(out) == 1
    assert "warning: the launcher says" in out.getvalue()


def test_the_innermost_launcher_is_believed():
    """Inside a batch job mpirun starts one daemon a node through srun: 2 tasks for Slurm, 4 ranks for MPI."""
    assert info.singleton_warning(4, {"OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"}) is None


def test_without_a_command_the_usage_is_shown(capsys):
    with pytest.raises(SystemExit) as left:
        main([])
    assert left.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


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
    assert table.count("MPI_Allreduce") == 12
    assert "0.01 selection, sparse_allreduce" in table


def test_bad_bench_settings_are_refused(capsys):
    for bad in (["--length", "0"], ["--repeats", "0"], ["--density", "2"], ["--length", "x"]):
        with pytest.raises(SystemExit) as left:
            main(["bench", "exchange", *bad])
        assert left.value.code == 2
        assert f"argument {bad[0]}: " in capsys.readouterr().err
