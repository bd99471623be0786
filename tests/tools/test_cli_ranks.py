"""The `mpicomp` command on two ranks, of which rank 0 alone sees the folder: one mpirun for all tests."""

import json
import os

import pytest
from jobs import mpirun

from mpicomp_bench.bounds import index_bits

SUM = [
    "bench",
    "allreduce",
    "--lengths",
    "50000",
    "--densities",
    "0.01",
    "--repeats",
    "2",
    "--patterns",
    "shared",
]
COMMANDS = [
    [*SUM, "--codecs", "plain", "--json", "../there/sum.json"],
    [*SUM, "--json", "../none/sum.json"],
    ["info", "--json"],
]
EACH = """
import json, os, sys
from mpi4py import MPI
from mpicomp_bench import main
os.chdir(sys.argv[1] if MPI.COMM_WORLD.rank == 0 else "/")
for command in json.loads(sys.argv[2]):
    try:
        status = main(command)
    except SystemExit as left:
        status = left.code
    print(f"{command[0]} ended with {status} on rank {MPI.COMM_WORLD.rank}", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder, and what the commands printed."""
    folder = tmp_path_factory.mktemp("ranks") / "there"
    folder.mkdir()
    done = mpirun(2, "-c", EACH, folder, json.dumps(COMMANDS))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done


def test_files_are_looked_at_on_rank_0_alone(ran):
    """The other rank sees neither the folder nor the file, and ends as rank 0 does."""
    folder, done = ran
    assert sorted(os.listdir(folder)) == ["sum.json"]
    assert (
        done.stderr.count(
            "error: argument --json: got '../none/sum.json': there is no folder"
        )
        == 1
    )
    for rank in 0, 1:
        ended = [
            line.split()[3]
            for line in done.stderr.splitlines()
            if line.endswith(f"on rank {rank}")
        ]
        assert ended == ["0", "2", "0"]


def test_rank_0_alone_prints(ran):
    folder, done = ran
    lines = done.stdout.splitlines()
    algorithms = [
        row["algorithm"]
        for row in json.loads((folder / "sum.json").read_text())["rows"]
    ]
    assert lines[0].split()[:2] == ["length", "dtype"]
    assert all(name in line for name, line in zip(algorithms, lines[1:], strict=False))
    assert done.stdout.count("length") == done.stdout.count("2 on 1 host") == 1


def test_where_ranks_share_memory_the_table_says_that_links_are_its_subject(ran):
    assert ran[1].stdout.count("All ranks share memory") == 1


def test_the_bytes_are_those_of_the_cost_table(ran):
    """Supports are shared: the union has as many entries as each rank's vector."""
    about = json.loads((ran[0] / "sum.json").read_text())
    sent = {row["algorithm"]: row["nbytes"] for row in about["rows"]}
    assert about["ranks"] == 2
    assert all(row["union"] == row["entries"] == 500 for row in about["rows"])
    assert sent["MPI_Allreduce"] == 200_000
    assert sent["MPI_Allgatherv"] == 4000
    for name in "recursive_doubling", "allgather", "gTop-k tree, as published":
        assert 4000 <= sent[name] < 4400
    over = {row["algorithm"]: row["over_bound"] for row in about["rows"]}
    assert over["recursive_doubling"] == pytest.approx(
        sent["recursive_doubling"] / (500 * (3 + index_bits(0.01) / 8))
    )
