"""`python -m collectives.torch`: the environment of a script for torchrun, on ranks of MPI; needs no PyTorch."""

import json

import pytest
from jobs import environment, mpirun, python

from collectives.launcher import torchrun_variables

SHOW = """
import json, os, sys
names = "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"
variables = {name: os.environ[name] for name in names} | {"MPI": os.environ.get("OMPI_COMM_WORLD_RANK")}
print(json.dumps([sys.argv[1:], "torch" in sys.modules, variables]))
"""


def start(folder, script, *arguments, ranks=3, **variables):
    (folder / "train.py").write_text(script)
    if ranks:
        return mpirun(ranks, "train.py", *arguments, module="collectives.torch", cwd=folder, **variables)
    return python("-m", "collectives.torch", "train.py", *arguments, cwd=folder, env=environment(**variables))


def test_local_ranks_count_the_ranks_of_a_node_wherever_they_are():
    ranks = [torchrun_variables(rank, [0, 1, 1, 0, 1], "node7", 29500) for rank in range(5)]
    assert [each["LOCAL_RANK"] for each in ranks] == ["0", "0", "1", "1", "2"]
    assert [each["LOCAL_WORLD_SIZE"] for each in ranks] == ["2", "3", "3", "2", "3"]
    assert [each["GROUP_RANK"] for each in ranks] == ["0", "1", "1", "0", "1"]
    assert {(each["WORLD_SIZE"], each["GROUP_WORLD_SIZE"]) for each in ranks} == {("5", "2")}
    assert {(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in ranks} == {("node7", "29500")}


def test_a_script_sees_the_variables_of_torchrun_and_torch_is_not_imported(tmp_path):
    done = start(tmp_path, SHOW, "--epochs", "3", WORLD_SIZE="8", RANK="7")  # left over from an earlier job
    assert done.returncode == 0, done.stderr
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    assert [arguments for arguments, _, _ in seen] == [["--epochs", "3"]] * 3
    assert not any(imported for _, imported, _ in seen)
    ranks = sorted((each for _, _, each in seen), key=lambda each: int(each["RANK"]))
    assert [each["RANK"] for each in ranks] == [each["MPI"] for each in ranks] == ["0", "1", "2"]
    assert {(each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"]) for each in ranks} == {("3", "3")}
    assert len({(each["MASTER_ADDR"], each["MASTER_PORT"], each["TORCHELASTIC_RUN_ID"]) for each in ranks}) == 1


def test_an_address_and_a_port_of_the_user_are_kept(tmp_path):
    done = start(tmp_path, SHOW, ranks=0, MASTER_ADDR="ib-node7", MASTER_PORT="29511")
    assert done.returncode == 0, done.stderr
    _, _, variables = json.loads(done.stdout)
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("ib-node7", "29511")


@pytest.mark.parametrize("fails", ["raise ValueError('bad batch')", "sys.exit(3)"])
def test_a_script_that_fails_on_one_rank_ends_the_job(tmp_path, fails):
    script = f"import os, sys\nfrom mpi4py import MPI\nif os.environ['RANK'] == '1':\n    {fails}\n"
    done = start(tmp_path, script + "MPI.COMM_WORLD.Barrier()\nprint('not reached')\n")
    assert done.returncode != 0
    assert "not reached" not in done.stdout
    assert "bad batch" in done.stderr or "sys.exit" in fails


def test_under_torchrun_it_says_how_to_start(tmp_path):
    done = start(tmp_path, SHOW, ranks=0, WORLD_SIZE="4", RANK="2")
    assert done.returncode == 1
    assert "start with: mpirun -n 4 python -m collectives.torch train.py" in done.stderr
