"""A Slurm cluster of virtual nodes for the tests of this folder, and what they ask of it."""

import contextlib
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import pytest

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
NODES = 4
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "mpirun")
# More ranks than slots, which other tests ask for, would put all ranks on the first
# node.
OVERSUBSCRIBED = (
    "PRTE_MCA_rmaps_default_mapping_policy",
    "OMPI_MCA_rmaps_base_oversubscribe",
)


class Cluster:
    """The cluster in a folder, and a folder to submit from, which looks like the root of the repository."""

    def __init__(self, folder):
        self.folder, self.environment = folder, job_environment(folder)
        self.work = folder / "work"
        self.work.mkdir()
        (self.work / "examples").symlink_to(ROOT / "examples")

    def call(self, *command, seconds=60, **environment):
        """Run a command in the folder to submit from, and return what it prints."""
        done = subprocess.run(
            command,
            cwd=self.work,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, launch, *arguments):
        """Submit a shipped script: options of sbatch, its name, its arguments; return the number of the job."""
        here = [
            str(ROOT / "slurm" / word) if word.endswith(".sbatch") else word
            for word in arguments
        ]
        return self.call("sbatch", "--parsable", *here, LAUNCH=launch).strip()

    def facts(self, job):
        """Return what Slurm knows of a job, by name; of an array, of its first part."""
        return dict(
            re.findall(
                r"(\w+)=(\S*)",
                self.call("scontrol", "--oneliner", "show", "job", job).splitlines()[0],
            )
        )

    def until(self, job, condition, seconds):
        """Wait until a condition holds, and return its value; cancel the job and fail when it does not in time."""
        ends = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > ends:
                self.call("scancel", job)
                pytest.fail(
                    f"job {job} after {seconds} s: {self.facts(job)}\n{self.printed(job)}"
                )
            time.sleep(0.5)
        return value

    def ended(self, job, seconds=300):
        """Wait for the end of a job, and return (its state, what it printed)."""
        over = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
        state = self.until(
            job,
            lambda: (found := self.facts(job)["JobState"]) in over and found,
            seconds,
        )
        return state, self.printed(job)

    def printed(self, job):
        """Return what a job has printed until now."""
        return "".join(
            path.read_text() for path in sorted(self.work.glob(f"*-{job}*.out"))
        )


def job_environment(folder):
    """Return the environment to submit from: without what another Slurm, or mpirun, has left in this one."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "PMIX_", "SBATCH_"))
        and name not in OVERSUBSCRIBED
    }
    return {
        **clean,
        "SLURM_CONF": str(folder / "slurm.conf"),
        "TMPDIR": str(folder),  # Numba's cache, so that the kernels are compiled once
        "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}{os.pathsep}/usr/sbin",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def free_ports(count):
    """Return the first of `count` ports in a row that nobody listens on."""
    for first in range(20000 + os.getpid() % 9000, 32000, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise OSError("no free ports")


@pytest.fixture(scope="session")
def cluster():
    """Return a cluster of NODES virtual nodes that is up; it goes down after the last test."""
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}{os.pathsep}/usr/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(
            f"not installed: {', '.join(missing)}; `make test-slurm` installs Slurm"
        )
    # short, for the socket in it
    folder = pathlib.Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    script, cpus = str(HERE / "cluster.sh"), min(2, os.cpu_count())
    started = Cluster(folder)
    try:
        started.call(
            script, "up", str(folder), str(NODES), str(cpus), str(free_ports(NODES + 1))
        )
        yield started
    finally:
        started.call(script, "down", str(folder), seconds=120)
        shutil.rmtree(folder)


@pytest.fixture(params=["mpirun", "srun"])
def launch(request, cluster):
    """Return each of the two ways to start the tasks of a job."""
    if request.param == "mpirun":
        return "mpirun -n 4"
    try:
        cluster.call("srun", "--mpi=pmix", "true")
    except AssertionError as error:
        pytest.skip(
            f"this Slurm has no PMIx (Debian wants libpmix-dev): {str(error).splitlines()[0]}"
        )
    return "srun --mpi=pmix --wait=30"
