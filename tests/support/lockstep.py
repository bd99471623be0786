"""A pytest plugin that keeps the ranks of `tests/launch.sh` in lockstep.

Each rank runs a pytest session of its own. Once for every test, after its call or a
setup that failed, the ranks tell each other how it went, over a communicator of their
own:

* a failure on one rank becomes a failure on all, with the text of every rank that
  failed in the report of each (one in a teardown becomes a failure of the next test;
  after the last one rank 0 prints it);
* a rank that failed while its peers are stuck in a collective ends the job after
  MPI_TEST_GRACE seconds;
* a rank that spends MPI_TEST_HANG seconds in one test, be it in C code, is ended with
  its stack, and the job with it;
* a rank that is silent beyond that (stopped, or its host gone) ends the job after
  MPI_TEST_LIMIT seconds;
* ranks never run two different tests at once, so a test that raises early cannot shift
  collectives into the next one.
"""

import faulthandler
import os
import time
import zlib

import numpy as np
import pytest
from mpi4py import MPI

GRACE = float(os.environ.get("MPI_TEST_GRACE", "5"))
LIMIT = float(os.environ.get("MPI_TEST_LIMIT", "90"))
HANG = float(os.environ.get("MPI_TEST_HANG", "60"))
ROOM = 4096  # bytes of text that a rank tells the others
STDERR = os.dup(2)  # the real one: pytest redirects descriptor 2 while a test runs


def pytest_configure(config):
    config.pluginmanager.register(Lockstep(MPI.COMM_WORLD.Dup()), "lockstep-ranks")


class Lockstep:
    def __init__(self, comm):
        self.comm = comm
        self.late = ""  # what failed on this rank and is not told yet

    def pytest_sessionstart(self, session):
        expected = int(os.environ.get("MPI_TEST_NPROCS", self.comm.size))
        if self.comm.size != expected:
            pytest.exit(
                f"expected {expected} ranks, MPI sees {self.comm.size}: is this mpirun of another MPI?",
                4,
            )

    def pytest_collection_finish(self, session):
        names = "\n".join(item.nodeid for item in session.items)
        if len(set(self.comm.allgather(names))) > 1:
            pytest.exit("the ranks collected different tests", 4)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.failed:
            self.late += f"{item.nodeid} ({report.when}): {report.longreprtext}"
        if report.when == "teardown" or (report.when == "setup" and report.passed):
            return report
        mine = f"{'failed' if self.late else report.outcome}\n{self.late}"
        heard = self.tell(
            mine, GRACE if self.late else LIMIT, f"{item.nodeid} ({report.when})"
        )
        self.late = ""
        outcomes = [text.partition("\n")[0] for text in heard]
        if report.failed or set(outcomes) != {report.outcome}:
            texts = [
                f"--- rank {rank}: {text}"
                for rank, text in enumerate(heard)
                if not text.startswith("passed")
            ]
            report.outcome, report.longrepr = (
                "failed",
                "\n".join([f"by rank: {' '.join(outcomes)}", *texts]),
            )
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self, config):
        # nobody leaves before rank 0 has written its summary
        heard = self.tell(self.late, LIMIT, "the session")
        if self.comm.rank == 0 and any(heard):
            os.write(
                STDERR,
                "\n".join(
                    f"--- rank {rank}: {text}"
                    for rank, text in enumerate(heard)
                    if text
                ).encode(),
            )
        faulthandler.cancel_dump_traceback_later()

    def tell(self, text, seconds, what):
        """Return what every rank says, in rank order; end the job when one says nothing for so many seconds.

        Waiting here is not hanging: the watch over this rank stops, and starts anew for
        its next test.
        """
        faulthandler.cancel_dump_traceback_later()
        heard = (
            [text] * self.comm.size
            if self.alike(text, seconds, what)
            else self.gather(text, seconds, what)
        )
        faulthandler.dump_traceback_later(HANG, exit=True, file=STDERR)
        return heard

    def alike(self, text, seconds, what):
        """Return whether all ranks say the same: nearly always, and this is much faster than to hear it from each."""
        code = zlib.crc32(text.encode())
        extremes = np.empty(2, np.int64)
        self.ended(
            self.comm.Iallreduce(np.array([code, -code]), extremes, MPI.MAX),
            text,
            seconds,
            what,
        )
        return extremes[0] == -extremes[1]

    def gather(self, text, seconds, what):
        mine, all_of_them = (
            np.zeros(ROOM, np.uint8),
            np.empty((self.comm.size, ROOM), np.uint8),
        )
        encoded = np.frombuffer(text.encode()[:ROOM], np.uint8)
        mine[: encoded.size] = encoded
        self.ended(self.comm.Iallgather(mine, all_of_them), text, seconds, what)
        return [
            row.tobytes().rstrip(b"\0").decode(errors="replace") for row in all_of_them
        ]

    def ended(self, request, text, seconds, what):
        """Wait for the end of a request, and give way to others meanwhile: soon often, later seldom."""
        start, nap = time.monotonic(), 1e-5
        while not request.Test():
            waited = time.monotonic() - start
            if waited > seconds:
                self.give_up(text, seconds, what)
            if waited < 1e-3:
                os.sched_yield()
            else:
                time.sleep(nap)
                nap = min(2 * nap, 2e-4 if waited < 0.05 else 2e-3)

    def give_up(self, text, seconds, what):
        said = f"\n[rank {self.comm.rank}] no answer from every rank on {what} within {seconds:g} s: ending the job\n"
        os.write(STDERR, f"{said}{text}\n".encode())
        time.sleep(0.2)  # let mpirun forward it
        self.comm.Abort(3)
