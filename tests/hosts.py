"""The script of benchmarks/testbed, as tests call it."""

import os
import pathlib
import shutil
import subprocess
import sys
from functools import cache

ROOT = pathlib.Path(__file__).parent.parent
TESTBED = ROOT / "benchmarks" / "testbed" / "testbed.py"
NAME = f"test-{os.getpid()}"


def on_hosts(*arguments, name=NAME, timeout=100):
    """Run the script and return its exit status and what it printed, or its error."""
    command = [sys.executable, str(TESTBED), "--name", name, *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout, check=False)
    return done.returncode, done.stdout + done.stderr


def environment():
    lines = [line for line in (ROOT / "tests" / "openmpi.env").read_text().splitlines() if line and line[0] != "#"]
    more = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    for variable, first in ("PYTHONPATH", ROOT), ("PATH", pathlib.Path(sys.executable).parent):
        more[variable] = os.pathsep.join([str(first), *filter(None, [os.environ.get(variable)])])
    return os.environ | dict(line.split("=", 1) for line in lines) | more


@cache
def refusal(*options):
    """Return why there can be no hosts with such links on this machine; None where there can."""
    if os.geteuid() or not shutil.which("tc"):
        return "network namespaces and shaped links need root, and tc (iproute2)"
    status, said = on_hosts("up", "1", "100mbit", *options, name=f"{NAME}-try")
    if status and any(words in said for words in ("the kernel", "not permitted", "not supported")):
        return f"this machine makes no testbed: {said}"
    assert on_hosts("down", name=f"{NAME}-try") == (0, ""), said
    return None
