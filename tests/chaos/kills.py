"""Kill a random rank at a random moment, again and again:  python tests/chaos/kills.py [--runs 200] [--seed 0]

Each run starts a job of 2 to 5 ranks that exchange gradients without a pause, and after
a random time sends one of them SIGKILL, or SIGSTOP: a rank that is there and does not
answer. A seed fixes ranks, collective, victim and moment. A job has to end within the
deadline and 5 s, in one of three ways:

    kill, ulfm    the others shrink and go on: sums are those of the ranks that are left, and no mass is missing
    kill, plain   without ULFM the launcher ends the job, and says which rank died of which signal
    stop, plain   the others raise CollectiveTimeoutError, which names the rank, save, and the job ends

What a run did is printed as a line, and at the end how often each outcome came. The
exit status is 1 when one did something else; a rank that waits for longer then has said
where, in what is printed of the job.
"""

import faulthandler
import os
import pathlib
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))

from jobs import ROOT, START, parser, tally, watched

# seconds: what the ranks are configured to, and what a job may take beyond it
DEADLINE, MORE = 2.0, 5.0
PATIENCE = 60.0  # seconds until a job that does not end is ended
LENGTH, STEPS_AFTER = 400, 20
DOCUMENTED = {
    "kill, ulfm": "the others went on",
    "kill, plain": "the launcher ended the job",
    "stop, plain": "the others saved, and the job ended",
}
COLLECTIVES = (
    "sparse_allreduce",
    "split_allgather",
    "sparse_iallreduce",
    "sparse_allgather",
    "gtopk_allreduce",
    "gtopk tree",
    "gtopk exact",
)


@dataclass(frozen=True)
class Case:
    """One run."""

    number: int
    how: str  # "kill" or "stop"
    mpi: str  # "ulfm" or "plain"
    ranks: int
    victim: int
    collective: str
    moment: float  # seconds after all ranks have begun to exchange

    @property
    def kind(self):
        return f"{self.how}, {self.mpi}"

    @classmethod
    def drawn(cls, seed, number):
        rng = np.random.default_rng([seed, number])
        how, mpi = (
            ("kill", "ulfm"),
            ("kill", "ulfm"),
            ("kill", "plain"),
            ("stop", "plain"),
        )[number % 4]
        ranks = int(rng.integers(2, 6))
        return cls(
            number,
            how,
            mpi,
            ranks,
            int(rng.integers(ranks)),
            str(rng.choice(COLLECTIVES)),
            float(rng.uniform(0, 0.3)),
        )


def run(case):
    """Run a case; return how long the job took to end, its exit status, how many ranks saved, and what it said."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "mpirun",
            *(["--with-ft", "ulfm"] * (case.mpi == "ulfm")),
            "-n",
            str(case.ranks),
        ]
        command += [
            sys.executable,
            "-m",
            "mpi4py",
            __file__,
            "--worker",
            folder,
            case.collective,
        ]

        def strike():
            pid = int(pathlib.Path(folder, f"{case.victim}.pid").read_text())
            os.kill(pid, signal.SIGKILL if case.how == "kill" else signal.SIGSTOP)

        took, status, said = watched(
            command, folder, case.ranks, case.moment, strike, PATIENCE
        )
        return took, status, len(list(pathlib.Path(folder).glob("*.saved"))), said


def fault(case, took, status, saved, said, limit=DEADLINE + MORE):
    """Return what is wrong with how a job ended, after `limit` seconds at most; None where nothing is."""
    others = case.ranks - 1
    if took > limit:
        return f"took {took:.1f} s"
    if case.mpi == "ulfm":
        went_on = said.count(f"went on with {others} ranks: sums right, mass conserved")
        return None if went_on == others else f"{went_on} of {others} ranks went on"
    if status == 0:
        return "the launcher said that all is well"
    if case.how == "kill":
        told = f"rank {case.victim}" in said and "signal 9" in said
        return None if told else "the launcher did not say who died of what"
    named = len(
        re.findall(
            rf"CollectiveTimeoutError: .*; rank {case.victim} did not respond within",
            said,
        )
    )
    # the one that was stopped may save too, when the launcher ends it
    if not named or saved < others:
        return f"{named} ranks named the silent one, {saved} of {others} saved"
    return None


def work(folder, name):
    """Exchange without a pause; when a rank has died, go on without it for some steps."""
    from mpi4py import MPI

    import collectives

    sys.path.append(str(ROOT / "examples"))
    from save_on_failure import saving

    comm = MPI.COMM_WORLD.Dup()
    worker = Worker(comm, collectives, name)
    worker.step()
    worker.check_sum()  # what takes long the first time has been done
    collectives.configure(timeout=DEADLINE)
    pathlib.Path(folder, f"{comm.rank}.new").write_text(str(os.getpid()))
    os.rename(f"{folder}/{comm.rank}.new", f"{folder}/{comm.rank}.pid")
    with saving(
        lambda error: pathlib.Path(folder, f"{comm.rank}.saved").touch(), grace=1.0
    ):
        worker.until_a_rank_dies()
    worker.go_on()
    print(
        f"went on with {worker.comm.size} ranks: sums right, mass conserved", flush=True
    )
    worker.comm.Barrier()
    os._exit(0)  # MPI_Finalize may wait for the dead


class Worker:
    """A rank that checks every sum, and keeps account of its exchange."""

    quorum = 1  # on one host no link can be cut: whoever is left goes on

    def __init__(self, comm, collectives, name):
        from collectives import GradientExchange
        from mpicomp import ErrorFeedback, TopK

        self.comm, self.collectives, self.me, self.ranks = (
            comm,
            collectives,
            comm.rank,
            list(range(comm.size)),
        )
        self.exchange = GradientExchange(
            comm, TopK(k=9), ErrorFeedback(), named(collectives, name), average=False
        )
        self.number = 0

    def gradient(self, rank, number):
        return (
            np.random.default_rng([rank, number])
            .integers(-9, 10, LENGTH)
            .astype(np.float64)
        )

    def step(self):
        """Exchange once, and return what came."""
        came = self.exchange(self.gradient(self.me, self.number))
        self.number += 1
        return came

    def until_a_rank_dies(self):
        from collectives import RankFailedError
        from collectives.faults import ulfm

        end = time.monotonic() + START
        while time.monotonic() < end:
            try:
                self.step()
                self.check_sum()
            except Exception as error:
                died = isinstance(
                    error, RankFailedError
                ) or "the step is undone" in str(error)
                if not (died and ulfm.survives()):
                    raise
                return
        raise RuntimeError("nobody died")

    def go_on(self):
        """Go on with the ranks that are left, and compare what they had and were given with what came of it."""
        faulthandler.dump_traceback_later(DEADLINE + MORE)
        self.comm = self.collectives.shrink(self.comm, quorum=self.quorum)
        self.exchange.continue_on(self.comm)
        self.ranks, self.number = self.comm.allgather(self.me), self.exchange.steps
        account = self.owed()
        for _ in range(STEPS_AFTER):
            account += sum(self.gradient(rank, self.number) for rank in self.ranks)
            account -= self.step()
            self.check_sum()
        np.testing.assert_array_equal(self.owed(), account)
        faulthandler.cancel_dump_traceback_later()

    def owed(self):
        return sum(self.comm.allgather(self.exchange.feedback.residual.copy()))

    def check_sum(self):
        """Check a plain sum over the ranks that are left."""
        from mpicomp import SparseVector

        total = self.collectives.sparse_allreduce(
            SparseVector([self.me], [self.number + 1.0], 9), self.comm
        )
        np.testing.assert_array_equal(total.indices, self.ranks)
        np.testing.assert_array_equal(total.values, self.number + 1.0)


def named(collectives, name):
    from functools import partial

    algorithm = {"gtopk tree": "tree", "gtopk exact": "exact"}.get(name, name)
    if name.startswith("gtopk "):
        return partial(collectives.gtopk_allreduce, algorithm=algorithm)
    if hasattr(collectives, name):
        return getattr(collectives, name)
    return partial(collectives.sparse_allreduce, algorithm=name)


def tried(case):
    took, status, saved, said = run(case)
    return took, fault(case, took, status, saved, said), said


def main():
    asked = parser(__doc__, runs=200, seed=0, first=0).parse_args()
    if asked.worker:
        work(*asked.worker)
    numbers = range(asked.first, asked.first + asked.runs)
    return tally(
        (Case.drawn(asked.seed, number) for number in numbers), tried, DOCUMENTED
    )


if __name__ == "__main__":
    sys.exit(main())
