"""Network namespaces by iproute2: make one, do something in one, and say what a refusal means."""

import subprocess
import sys
from typing import NoReturn

# BBR, the default of some kernels, takes the pauses of MPI for a slow link
CONGESTION_CONTROL = ("cubic", "reno")
TCP = {"tcp_slow_start_after_idle": "0", "tcp_no_metrics_save": "1"}


def make_namespace(name: str) -> None:
    """Make a network namespace with a loopback interface, and the TCP settings of a cluster."""
    call(["ip", "netns", "add", name])
    ip(name, "link set lo up")
    allowed = call(
        inside(name, "cat", "/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    ).split()
    control = next(
        (each for each in CONGESTION_CONTROL if each in allowed), CONGESTION_CONTROL[0]
    )
    for setting, value in {"tcp_congestion_control": control, **TCP}.items():
        write = f"echo {value} > /proc/sys/net/ipv4/{setting}"
        call(inside(name, "sh", "-c", write), f"the kernel refuses {setting} = {value}")


def inside(space: str, *command: str) -> list[str]:
    """Return the command that runs a command in a namespace."""
    return ["ip", "netns", "exec", space, *command]


def ip(space: str, command: str) -> str:
    """Run ip in a namespace and return what it prints."""
    return call(["ip", "-netns", space, *command.split()])


def tc(space: str, command: str, meaning: str) -> str:
    """Run tc in a namespace and return what it prints; `meaning` is that of a refusal."""
    return call(["tc", "-netns", space, *command.split()], meaning)


def call(command: list[str], meaning: str = "") -> str:
    """Run a command and return what it prints; when it fails, say what that means, and what it said itself."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        fail(f"{meaning or 'failed'} ({' '.join(command)}: {done.stderr.strip()})")
    return done.stdout


def fail(reason: str) -> NoReturn:
    """End with a reason."""
    sys.exit(f"testbed: {reason}")
