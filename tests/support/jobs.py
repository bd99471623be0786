"""Jobs of mpirun that tests and the scripts of this folder start, watch and count."""

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections import Counter

ROOT = pathlib.Path(__file__).parents[2]
START = 120.0  # seconds until all ranks of a job exchange
THREADS = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
# what a launcher around the tests leaves in the environment
LAUNCHED = "OMPI_", "PMI", "PRTE_"


def environment(**more):
    """Return the environment of a job: of this process, but for its launcher's, and that of tests/openmpi.env."""
    lines = [
        line
        for line in (ROOT / "tests" / "openmpi.env").read_text().splitlines()
        if line and line[0] != "#"
    ]
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHED)
    }
    for variable, first in (
        ("PYTHONPATH", ROOT),
        ("PATH", pathlib.Path(sys.executable).parent),
    ):
        own[variable] = os.pathsep.join(
            [str(first), *filter(None, [own.get(variable)])]
        )
    return {**own, **THREADS, **dict(row.split("=", 1) for row in lines), **more}


def python(*arguments, cwd=None, timeout=120, env=None, prefix=()):
    """Run this Python, and return the finished process."""
    command = [*prefix, sys.executable, *map(str, arguments)]
    env = environment() if env is None else env
    return subprocess.run(
        command,
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def mpirun(
    size, *program, ulfm=False, module="mpi4py", cwd=None, timeout=120, **variables
):
    """Run a Python program on so many ranks, and return the finished job."""
    prefix = ["mpirun", *(["--with-ft", "ulfm"] * ulfm), "-n", str(size)]
    return python(
        "-m",
        module,
        *program,
        cwd=cwd,
        timeout=timeout,
        env=environment(**variables),
        prefix=prefix,
    )


def launcher():
    """Return what the launcher says that it is."""
    try:
        return subprocess.run(
            ["mpirun", "--version"], env=environment(), capture_output=True, text=True
        ).stdout
    except OSError:
        return ""


def watched(command, folder, ranks, moment, strike, patience):
    """Start a job, and strike `moment` seconds after all ranks have begun to exchange.

    Returns how long it took to end then, infinity where it had to be ended, its exit
    status, and what it said.
    """
    log = pathlib.Path(folder, "log")
    with log.open("w") as out:
        job = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,
        )
        try:
            wait_for(
                lambda: len(list(pathlib.Path(folder).glob("*.pid"))) == ranks, job, log
            )
            time.sleep(moment)
            began = time.monotonic()
            strike()
            job.wait(patience)
            took = time.monotonic() - began
        except subprocess.TimeoutExpired:
            took = float("inf")
        finally:
            if job.poll() is None:  # its launcher, and by it the ranks
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
    return took, job.returncode, log.read_text(errors="replace")


def wait_for(reached, job, log):
    began = time.monotonic()
    while not reached():
        if job.poll() is not None or time.monotonic() - began > START:
            raise RuntimeError(
                f"the job did not begin: {log.read_text(errors='replace')}"
            )
        time.sleep(5e-3)


def tally(cases, tried, documented):
    """Try cases; print a line for each, and how often each outcome came; return the exit status of a script.

    tried: returns of a case the seconds, what is wrong with how it ended or None, and
    what the job said.
    """
    ends, slowest = Counter(), Counter()
    for case in cases:
        try:
            took, wrong, said = tried(case)
        except RuntimeError as error:
            took, wrong, said = 0.0, "did not begin", str(error)
        outcome = wrong or documented[case.kind]
        ends[case.kind, outcome] += 1
        slowest[case.kind] = max(slowest[case.kind], took)
        print(f"{case}: {took:.2f} s, {outcome}", flush=True)
        if wrong:
            print(said, flush=True)
    for (kind, outcome), times in sorted(ends.items()):
        print(f"{kind}: {times} times {outcome}; slowest {slowest[kind]:.2f} s")
    return int(any(outcome != documented[kind] for kind, outcome in ends))


def parser(description, **numbers):
    """Return a parser of a script's options: these numbers with their defaults, and those of its own workers."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in numbers.items():
        made.add_argument(f"--{name}", type=type(default), default=default)
    made.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    return made
