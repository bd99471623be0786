"""Lose ranks, hosts and links of a job over several hosts:  sudo python tests/chaos/lost_hosts.py [--only kill]

On hosts of benchmarks/testbed, a rank each, which exchange gradients without a pause
under the options that `mpicomp info --recovery` prints. A seed fixes victim,
collective, deadline and moment. Documented outcomes:

    kill              a rank dies: the others shrink and go on; sums are right, no mass is missing
    two hosts         the ranks of two hosts die: the others go on if they are more than half, else all of them refuse
    host              a host dies with Open MPI's daemon: the launcher ends the job, with exit status 0
    cut 3, 30, 60     a link is down for so many seconds, no deadline: all ranks go on together
    cut, deadline     a link is down for longer than the deadline: CollectiveTimeoutError on every rank
    cut, split        a link is down for longer than a detector's timeout of 10 s: ranks of one group of more than half
                      go on, or none
    busy              a rank is outside MPI for 25 s: all ranks go on together

In no run may two groups go on. What a run did is printed as a line, and at the end how
often each outcome came and how long it took at most. The exit status is 1 when one did
something else.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))

from hosts import TESTBED, on_hosts, refusal
from jobs import parser, tally, watched
from kills import COLLECTIVES, Worker

DEADLINE, BUSY = 5.0, 25.0  # seconds
# seconds from the fault to the end; else 60
PATIENCE = {"cut 60": 240.0, "cut 30": 150.0, "cut, split": 150.0}
# seconds
DOWN = {"cut 3": 3, "cut 30": 30, "cut 60": 60, "cut, deadline": 15, "cut, split": 40}
TOGETHER, WENT_ON, REFUSED, TIMED_OUT = "together", "went on", "refused", "timed out"
DOCUMENTED = {
    "kill": "the others went on",
    "two hosts": "the others went on, or refused",
    "host": "the launcher ended the job",
    "cut 3": "all went on together",
    "cut 30": "all went on together",
    "cut 60": "all went on together",
    "cut, deadline": "all raised CollectiveTimeoutError",
    "cut, split": "no two groups went on",
    "busy": "all went on together",
}


@dataclass(frozen=True)
class Case:
    """One run."""

    kind: str
    hosts: int
    victims: tuple[int, ...]  # ranks, which are hosts
    collective: str
    deadline: float  # seconds; 0 for none
    moment: float  # seconds after all ranks have begun to exchange

    @classmethod
    def drawn(cls, kind, hosts, seed, number):
        rng = np.random.default_rng([seed, number])
        victims = tuple(
            int(rank) for rank in rng.permutation(hosts)[: 1 + (kind == "two hosts")]
        )
        either = (
            DEADLINE * bool(rng.integers(2))
            if kind in ("kill", "two hosts", "host")
            else 0.0
        )
        deadline = DEADLINE if kind == "cut, deadline" else either
        return cls(
            kind,
            hosts,
            victims,
            str(rng.choice(COLLECTIVES)),
            deadline,
            float(rng.uniform(0, 0.3)),
        )

    @property
    def patience(self):
        return PATIENCE.get(self.kind, 60.0)


def run(case, name):
    """Run a case on the hosts of a testbed; return the seconds, the launcher's exit status, what ranks and job said."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            took, status, said = watched(
                command(case, name, folder),
                folder,
                case.hosts,
                case.moment,
                lambda: strike(case, name, folder),
                case.patience,
            )
            # no rank may go on without the launcher
            time.sleep(3.0 * (case.kind == "host"))
        finally:
            for rank in range(case.hosts):
                kill_all(f"{name}-{rank + 1}")
        ends = {
            int(path.stem): json.loads(path.read_text())
            for path in pathlib.Path(folder).glob("*.end")
        }
        return took, status, ends, said


def command(case, name, folder):
    from collectives.faults import ulfm

    flags = (
        "--with-ft ulfm --mca mpi_ft_detector true"
        if case.kind == "cut, split"
        else ulfm.FLAGS
    )
    worker = [__file__, "--worker", folder, case.collective, str(case.deadline)]
    if case.kind == "busy":
        worker.append(str(case.victims[0]))
    program = [sys.executable, "-m", "mpi4py", *worker]
    return [
        sys.executable,
        str(TESTBED),
        "--name",
        name,
        "run",
        "--",
        *flags.split(),
        *program,
    ]


def strike(case, name, folder):
    """Do what the case says; where nobody dies of it, let the ranks stop when it is over."""
    if case.kind in DOWN:
        switch_link(name, case.victims[0], "down")
        time.sleep(DOWN[case.kind])
        switch_link(name, case.victims[0], "up")
    if case.kind in DOWN or case.kind == "busy":
        pathlib.Path(folder, "stop").touch()
    elif case.kind == "host":
        kill_all(f"{name}-{case.victims[0] + 1}")
    else:
        for rank in case.victims:
            os.kill(
                int(pathlib.Path(folder, f"{rank}.pid").read_text()), signal.SIGKILL
            )


def switch_link(name, rank, way):
    subprocess.run(
        ["ip", "-netns", f"{name}-hub", "link", "set", f"port{rank + 1}", way],
        check=True,
    )


def kill_all(space):
    """Kill every process of a host."""
    listed = subprocess.run(
        ["ip", "netns", "pids", space], capture_output=True, text=True, check=True
    )
    for pid in map(int, listed.stdout.split()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def fault(case, took, ends, said):
    """Return what is wrong with how a job ended; None where it is as documented."""
    groups = {
        tuple(each["ranks"])
        for each in ends.values()
        if each["outcome"] in (TOGETHER, WENT_ON)
    }
    if len(groups) > 1:
        return f"SPLIT: {sorted(groups)} went on"
    if took > case.patience:
        return f"did not end within {case.patience:.0f} s"
    if case.kind == "host":
        return (
            "ranks went on without the launcher"
            if groups or "daemon" not in said
            else None
        )
    if case.kind == "cut, split":
        minorities = [group for group in groups if len(group) <= case.hosts // 2]
        return f"a minority, {minorities}, went on" if minorities else None
    outcomes, expected = (
        {rank: each["outcome"] for rank, each in ends.items()},
        expected_outcomes(case),
    )
    wrong_groups = groups - {tuple(expected)}
    return (
        None
        if outcomes == expected and not wrong_groups
        else f"groups {groups}: expected {expected}"
    )


def expected_outcomes(case):
    """Return the documented outcome of every rank that has one, in rank order."""
    if case.kind in ("kill", "two hosts"):
        left = [rank for rank in range(case.hosts) if rank not in case.victims]
        return dict.fromkeys(left, WENT_ON if len(left) > case.hosts // 2 else REFUSED)
    return dict.fromkeys(
        range(case.hosts), TIMED_OUT if case.kind == "cut, deadline" else TOGETHER
    )


class HostWorker(Worker):
    """A rank of a job over several hosts."""

    quorum = None

    def run(self, folder):
        """Exchange until told to stop, or until a rank dies; return the outcome."""
        from collectives import CollectiveTimeoutError, RankFailedError

        try:
            while not self.told_to_stop(folder):
                self.step()
                self.check_sum()
            return TOGETHER
        except CollectiveTimeoutError:
            return TIMED_OUT
        except Exception as error:
            if not isinstance(
                error, RankFailedError
            ) and "the step is undone" not in str(error):
                raise
            return self.recover()

    def told_to_stop(self, folder):
        """Return whether a rank was told to stop, the same on all ranks."""
        from mpicomp import SparseVector

        told = float(pathlib.Path(folder, "stop").exists())
        return (
            self.collectives.sparse_allreduce(
                SparseVector([0], [told], 1), self.comm
            ).values[0]
            > 0
        )

    def recover(self):
        """Go on with the ranks that are left, again where one died meanwhile."""
        from collectives import RankFailedError

        while True:
            try:
                self.go_on()
                return WENT_ON
            except RankFailedError as error:
                if "quorum=" in str(error):
                    return REFUSED


def work(folder, name, deadline, busy=None):
    """Run as a rank, and write down how it ended."""
    from mpi4py import MPI

    import collectives

    worker = HostWorker(MPI.COMM_WORLD.Dup(), collectives, name)
    worker.step()
    worker.check_sum()
    collectives.configure(timeout=float(deadline) or None)
    pathlib.Path(folder, f"{worker.me}.pid").write_text(str(os.getpid()))
    if busy is not None and int(busy) == worker.me:
        time.sleep(BUSY)
    outcome = worker.run(folder)
    written = pathlib.Path(folder, f"{worker.me}.new")
    written.write_text(json.dumps({"outcome": outcome, "ranks": worker.ranks}))
    written.rename(written.with_suffix(".end"))
    if outcome in (TOGETHER, WENT_ON):
        worker.comm.Barrier()
    # the first rank that leaves may end the job
    time.sleep(3 * DEADLINE if outcome == TIMED_OUT else 0.5)
    os._exit(0)  # MPI_Finalize may wait for the dead


def main():
    options = parser(__doc__, hosts=4, runs=1, seed=0, name="lost-hosts")
    options.add_argument(
        "--only", choices=DOCUMENTED, action="append", help="kinds; may be given again"
    )
    asked = options.parse_args()
    if asked.worker:
        work(*asked.worker)
    if reason := refusal():
        sys.exit(reason)
    assert on_hosts("up", str(asked.hosts), "1gbit", name=asked.name) == (0, "")
    kinds = [
        (number, kind)
        for number in range(asked.runs)
        for kind in asked.only or DOCUMENTED
    ]
    try:
        cases = (
            Case.drawn(kind, asked.hosts, asked.seed, number) for number, kind in kinds
        )
        return tally(cases, lambda case: tried(case, asked.name), DOCUMENTED)
    finally:
        on_hosts("down", name=asked.name)


def tried(case, name):
    """Run a case; return the seconds, what is wrong, and how the ranks ended with what the job said."""
    took, status, ends, said = run(case, name)
    outcomes = {rank: each["outcome"] for rank, each in sorted(ends.items())}
    return (
        took,
        fault(case, took, ends, said),
        f"exit status {status}, {outcomes}\n{said}",
    )


if __name__ == "__main__":
    sys.exit(main())
