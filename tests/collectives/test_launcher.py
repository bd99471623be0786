"""`python -m collectives.torch`: the environment of a script for torchrun, on ranks of MPI; needs no PyTorch."""

import json

import pytest
from jobs import environment, mpirun, python

from collectives.runtime.launcher import torchrun_variables

SHOW = """
import json, os, sys
names = "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"
names += "OMP_NUM_THREADS", "MPICOMP_TIMEOUT"
variables = {name: os.environ.get(name) for name in names} | {"MPI": os.environ.get("OMPI_COMM_WORLD_RANK")}
print(json.dumps([sys.argv[1:], "torch" in sys.modules, variables]))
"""


def start(folder, script, *arguments, ranks=3, **variables):
    (folder / "train.py").write_text(script)
    if ranks:
        return mpirun(
            ranks,
            "train.py",
            *arguments,
            module="collectives.torch",
            cwd=folder,
            **variables,
        )
    return python(
        "-m",
        "collectives.torch",
        "train.py",
        *arguments,
        cwd=folder,
        env=environment(**variables),
    )


def test_local_ranks_count_the_ranks_of_a_node_wherever_they_are():
    ranks = [
        torchrun_variables(rank, [0, 1, 1, 0, 1], "node7", 29500) for rank in range(5)
    ]
    assert [each["LOCAL_RANK"] for each in ranks] == ["0", "0", "1", "1", "2"]
    assert [each["LOCAL_WORLD_SIZE"] for each in ranks] == ["2", "3", "3", "2", "3"]
    assert [each["GROUP_RANK"] for each in ranks] == ["0", "1", "1", "0", "1"]
    assert {(each["WORLD_SIZE"], each["GROUP_WORLD_SIZE"]) for each in ranks} == {
        ("5", "2")
    }
    assert {(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in ranks} == {
        ("node7", "29500")
    }


def test_a_script_sees_the_variables_of_torchrun_and_torch_is_not_imported(tmp_path):
    # left over from an earlier job
    done = start(tmp_path, SHOW, "--epochs", "3", WORLD_SIZE="8", RANK="7")
    assert done.returncode == 0, done.stderr
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    assert [arguments for arguments, _, _ in seen] == [["--epochs", "3"]] * 3
    assert not any(imported for _, imported, _ in seen)
    ranks = sorted((each for _, _, each in seen), key=lambda each: int(each["RANK"]))
    assert (
        [each["RANK"] for each in ranks]
        == [each["MPI"] for each in ranks]
        == ["0", "1", "2"]
    )
    assert {(each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"]) for each in ranks} == {
        ("3", "3")
    }
    assert (
        len(
            {
                (each["MASTER_ADDR"], each["MASTER_PORT"], each["TORCHELASTIC_RUN_ID"])
                for each in ranks
            }
        )
        == 1
    )
    assert {each["MPICOMP_TIMEOUT"] for each in ranks} == {"600"}


@pytest.mark.parametrize("threads", ["5", pytest.param("", marks=pytest.mark.slow)])
def test_variables_of_the_user_are_kept(tmp_path, monkeypatch, threads):
    """Without OMP_NUM_THREADS one rank on a node has all threads, and each of several has one, as under torchrun."""
    users = {"MASTER_ADDR": "ib-node7", "MASTER_PORT": "29511", "MPICOMP_TIMEOUT": ""}
    users |= {"OMP_NUM_THREADS": threads} if threads else {}
    monkeypatch.setattr("jobs.THREADS", {})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for ranks, expected in (0, threads or None), (2, threads or "1"):
        done = start(tmp_path, SHOW, ranks=ranks, **users)
        assert done.returncode == 0, done.stderr
        for line in done.stdout.splitlines():
            assert users.items() <= (variables := json.loads(line)[2]).items()
            assert variables["OMP_NUM_THREADS"] == expected


@pytest.mark.parametrize("fails", ["raise ValueError('bad batch')", "sys.exit(3)"])
def test_a_script_that_fails_on_one_rank_ends_the_job(tmp_path, fails):
    script = f"import os, sys\nfrom mpi4py import MPI\nif os.environ['RANK'] == '1':\n    {fails}\n"
    script += "MPI.COMM_WORLD.Barrier()\nprint('not reached')\n"
    done = start(tmp_path, script, ranks=2)
    assert done.returncode != 0
    assert "not reached" not in done.stdout
    assert "bad batch" in done.stderr or "sys.exit" in fails


@pytest.mark.parametrize(
    ("last", "status"),
    [
        ("MPI.COMM_WORLD.Barrier()", 1),
        pytest.param("time.sleep(2)", 0, marks=pytest.mark.slow),
    ],
)
def test_a_script_that_ends_early_on_some_ranks_is_reported_and_ended_at_the_deadline(
    tmp_path, last, status
):
    """A rank that still evaluates is left alone until then."""
    script = f"import os, time\nfrom mpi4py import MPI\nif os.environ['RANK'] == '1':\n    {last}\n"
    done = start(tmp_path, script, MPICOMP_TIMEOUT="3")
    assert min(done.returncode, 1) == status, done.stderr
    assert (
        "ago on ranks 0, 2, and has not on rank 1, which may wait for a message of the others (fewer batches?"
        in done.stderr
    )


WORKERS = """
import multiprocessing, sys
from mpi4py import MPI
from collectives import GradientExchange

if __name__ == "__main__":
    exchange = GradientExchange(MPI.COMM_WORLD, bits=4)
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        print(pool.map(abs, [-1, -2]))
"""


@pytest.mark.parametrize(
    ("method", "module"),
    [
        ("spawn", "mpi4py"),
        pytest.param("forkserver", "collectives.torch", marks=pytest.mark.slow),
        pytest.param("spawn", "collectives.torch", marks=pytest.mark.slow),
        pytest.param("forkserver", "mpi4py", marks=pytest.mark.slow),
    ],
)
def test_workers_do_not_initialise_mpi_as_the_same_rank(tmp_path, method, module):
    (tmp_path / "train.py").write_text(WORKERS)
    done = mpirun(2, "train.py", method, module=module, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, 2 * "[1, 2]\n"), done.stderr


def test_a_process_that_does_not_initialise_mpi_is_told_what_to_remove():
    done = python(
        "-m", "collectives.torch", "train.py", env=environment(MPI4PY_RC_INITIALIZE="0")
    )
    assert done.returncode == 1
    assert "needs an environment without MPI4PY_RC_INITIALIZE" in done.stderr


@pytest.mark.parametrize(("option", "status"), [("--help", 0), ("--epochs", 1)])
def test_usage_is_that_of_this_launcher(option, status):
    done = python("-m", "collectives.torch", option)
    assert done.returncode == status
    assert "mpirun -n 4 python -m collectives.torch train.py --epochs 3" in done.stdout


def test_under_torchrun_it_says_how_to_start(tmp_path):
    done = start(tmp_path, SHOW, ranks=0, WORLD_SIZE="4", RANK="2")
    assert done.returncode == 1
    assert "start with: mpirun -n 4 python -m collectives.torch train.py" in done.stderr
