"""The script of benchmarks/testbed, as tests call it."""

import os
import shutil
from functools import cache

from jobs import ROOT, python

TESTBED = ROOT / "benchmarks" / "testbed" / "testbed.py"
NAME = f"test-{os.getpid()}"


def on_hosts(*arguments, name=NAME, timeout=100):
    """Run the script and return its exit status and what it printed, or its error."""
    done = python(TESTBED, "--name", name, *arguments, timeout=timeout)
    return done.returncode, done.stdout + done.stderr


@cache
def refusal(*options):
    """Return why there can be no hosts with such links on this machine; None where there can."""
    if os.geteuid() or not shutil.which("tc"):
        return "network namespaces and shaped links need root, and tc (iproute2)"
    status, said = on_hosts("up", "1", "100mbit", *options, name=f"{NAME}-try")
    if status and any(
        words in said for words in ("the kernel", "not permitted", "not supported")
    ):
        return f"this machine makes no testbed: {said}"
    assert on_hosts("down", name=f"{NAME}-try") == (0, ""), said
    return None
