"""End ranks with operations in flight, again and again:  python tests/chaos/endings.py [--runs 100] [--seed 0]

Each run starts a job of 2 to 4 ranks that leave operations in flight, short ones and
long ones, and after a random time end in one of these ways, in turn:

    exit       the script ends
    quit       sys.exit in a function, with the requests alive
    finalize   MPI.Finalize
    fork       20 children that leave by os._exit, half of them from an exception; then the script ends
    free       20 communicators are freed; then the script ends

A job has to end with status 0 within a minute. What a run did is printed as a line, and
at the end how often each outcome came. The exit status is 1 when one did something
else; what its ranks said is printed then.
"""

import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))

from jobs import environment, parser, tally

WAYS = "exit", "quit", "finalize", "fork", "free"
ENDED = "ended"
PATIENCE = 60.0  # seconds until a job that does not end is ended
TIMES = 20  # forks, or communicators that are freed, of a rank of a job


@dataclass(frozen=True)
class Case:
    """One run."""

    number: int
    kind: str
    ranks: int
    seed: int

    @classmethod
    def drawn(cls, seed, number):
        rng = np.random.default_rng([seed, number])
        ranks, seed = int(rng.integers(2, 5)), int(rng.integers(1 << 30))
        return cls(number, WAYS[number % len(WAYS)], ranks, seed)


def in_flight(comm, seed):
    """Start operations of several rounds, short and long ones, and wait for none."""
    from collectives import (
        dense_iallreduce,
        gtopk_iallreduce,
        quantised_iallreduce,
        sparse_iallreduce,
    )
    from mpicomp import TopK

    rng = np.random.default_rng([seed, comm.rank])
    vector = TopK(k=20).compress(rng.standard_normal(500, np.float32))
    long = rng.standard_normal(300_000, np.float32)
    return [
        sparse_iallreduce(vector, comm, algorithm="recursive_doubling"),
        gtopk_iallreduce(vector, comm, k=20),
        quantised_iallreduce(long, comm, bits=8),
        sparse_iallreduce(TopK(k=100_000).compress(long), comm),
        dense_iallreduce(long, comm),
    ]


def fork(number):
    """Fork, and return the status of the child, which leaves without MPI's end."""
    child = os.fork()
    if child == 0:
        try:
            if number % 2:
                raise KeyError
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def work(way, seed):
    """End this rank. seed: the same on all ranks."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    pauses = random.Random(f"{seed} {comm.rank}")

    def compute():
        time.sleep(pauses.choice((0, 1e-4, 1e-3, 5e-3)))

    for number in range(TIMES if way == "free" else 0):
        doomed = comm.Dup()
        requests = in_flight(doomed, seed + number)
        compute()
        doomed.Free()
        assert all([request.done for request in requests])
    requests = in_flight(comm, seed)
    for number in range(TIMES if way == "fork" else 0):
        compute()
        assert fork(number) == 0
        if number % 5 == 4:
            for request in requests:
                request.wait()
            requests = in_flight(comm, seed + number)
    compute()
    if way == "finalize":
        MPI.Finalize()
    elif way == "quit":
        sys.exit(0)


def run(case):
    """Run a case; return how long its job took, what is wrong with how it ended or None, and what it said."""
    command = ["mpirun", "-n", str(case.ranks), sys.executable, __file__]
    command += ["--worker", case.kind, str(case.seed)]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out:
        job = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment()
        )
        try:
            status = job.wait(PATIENCE)
            wrong = f"status {status}" if status else None
        except subprocess.TimeoutExpired:
            job.terminate()
            job.wait()
            wrong = "did not end"
        out.seek(0)
        return time.monotonic() - began, wrong, out.read()


def main():
    options = parser(__doc__, runs=100, seed=0).parse_args()
    if options.worker:
        way, seed = options.worker
        work(way, int(seed))
        return
    cases = [Case.drawn(options.seed, number) for number in range(options.runs)]
    sys.exit(tally(cases, run, dict.fromkeys(WAYS, ENDED)))


if __name__ == "__main__":
    main()
