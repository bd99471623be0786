"""What editors and type checkers see of the collectives: parameters, literals and results."""

import inspect
import subprocess
import sys
from typing import get_args

import pytest

from collectives.calls.collective import COLLECTIVES
from collectives.calls.start import start
from mpicomp.codec import CODECS

RIGHT = """
from mpi4py import MPI
from collectives import gtopk_allreduce, sparse_allgather, sparse_allreduce, sparse_iallreduce, sparse_reduce
from mpicomp import SparseVector, TopK
from numpy import ones

vector = TopK(0.1).compress(ones(9))
comm = MPI.COMM_WORLD.Split(0)
total: SparseVector = sparse_allreduce(vector, comm, algorithm="split_allgather", codec="quick")
later: SparseVector = sparse_iallreduce(vector, comm).wait()
both: tuple[SparseVector, SparseVector] = gtopk_allreduce(vector, comm, k=3)
parts: list[SparseVector] = sparse_allgather(vector, comm)
root: SparseVector | None = sparse_reduce(vector, comm, root=0)
"""
WRONG = {
    'sparse_allreduce(vector, comm, algorithm="densee")': "Literal['densee']",
    'sparse_allreduce(vector, comm, codec="zip")': "Literal['zip']",
    "sparse_allreduce(ones(9), comm)": 'expected "SparseVector"',
    "sparse_allreduce(vector, comm, roots=0)": 'Unexpected keyword argument "roots"',
    "gtopk_allreduce(vector, comm, k=3).nnz": 'has no attribute "nnz"',
}


def test_a_type_checker_sees_arguments_and_results(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "calls.py").write_text(RIGHT + "\n".join(WRONG) + "\n")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--cache-dir",
        str(tmp_path),
        "calls.py",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    found = [
        line
        for line in done.stdout.splitlines()
        if "calls.py" in line and ": error:" in line
    ]
    assert len(found) == len(WRONG), done.stdout + done.stderr
    for line, words in zip(found, WRONG.values(), strict=True):
        assert words in line


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_literals_are_the_names_that_are_declared(name):
    known = {
        "algorithm": ["auto", *COLLECTIVES[name].algorithms],
        "codec": ["auto", *CODECS],
    }
    for form in (COLLECTIVES[name], COLLECTIVES[name].nonblocking):
        parameters = inspect.signature(form).parameters
        assert "kwargs" not in parameters
        for argument in known.keys() & parameters.keys():
            assert sorted(get_args(parameters[argument].annotation)) == sorted(
                known[argument]
            )


def test_a_nonblocking_form_has_its_own_name_and_a_start_leaves_others_alone():
    for name, collective in COLLECTIVES.items():
        form = collective.nonblocking
        assert form.__name__ == form.__qualname__ == name.replace("_", "_i", 1)
    assert start.__qualname__ == "start"
