import io

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
