"""What the links of the testbed do to frames: their rate by sch_tbf, their faults by sch_netem or by impairing.py."""

import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
from dataclasses import asdict

from impairing import HOLD, Faults
from namespaces import fail, inside, tc

HERE = pathlib.Path(__file__).resolve().parent
PATIENCE = 5.0  # seconds for the relay to begin, and to end


def shape(space: str, device: str, rate: float) -> None:
    """Let a device send at most at a rate; the bucket holds a millisecond, as timers are late."""
    bucket, queue = (
        clamp(rate / 8000, 32768, 1_000_000),
        clamp(rate / 160, 300_000, 50_000_000),
    )
    tbf = f"qdisc add dev {device} root handle 1: tbf rate {rate:.0f} burst {bucket} limit {queue}"
    tc(space, tbf, "the kernel has no sch_tbf")


def clamp(number: float, low: int, high: int) -> int:
    """Return the whole number nearest to `number` between two bounds."""
    return int(min(max(number, low), high))


def has_netem(space: str) -> bool:
    """Return whether the kernel has sch_netem, by a try in a namespace."""
    tried = [
        "tc",
        "-netns",
        space,
        "qdisc",
        "add",
        "dev",
        "lo",
        "root",
        "netem",
        "delay",
        "1ms",
    ]
    found = subprocess.run(tried, capture_output=True, check=False).returncode == 0
    if found:
        tc(space, "qdisc delete dev lo root", "the kernel does not let go of a netem")
    return found


def impair(space: str, device: str, faults: Faults) -> None:
    """Let sch_netem do to what a device sends, below its shaping, what the faults say."""
    tc(
        space,
        f"qdisc add dev {device} parent 1: netem {netem(faults)}",
        "the kernel's sch_netem refuses these faults",
    )


def netem(faults: Faults) -> str:
    """Return the faults as options of netem, which reorders by sending some frames at once and the others late.

    With a delay those that are to be reordered leave at once. Without one they are
    late, by HOLD, and all others leave at once.
    """
    reorder, delay = faults.reorder, faults.delay
    if reorder and not delay:
        reorder, delay = 1 - reorder, HOLD
    shares = {"loss": faults.loss, "duplicate": faults.duplicate, "reorder": reorder}
    late = f"delay {delay * 1e6:.0f}us {faults.jitter * 1e6:.0f}us " if delay else ""
    return late + " ".join(
        [
            *(f"{name} {share:.4%}" for name, share in shares.items() if share),
            "limit 100000",
        ]
    )


def dropped_by_netem(space: str, device: str) -> dict[str, int]:
    """Return what the kernel counts of a netem, which is frames and losses; nothing where there is none."""
    listed = json.loads(
        tc(
            space,
            f"-statistics -json qdisc show dev {device}",
            "the kernel does not count",
        )
    )
    found = [each for each in listed if each["kind"] == "netem"]
    return (
        {
            "frames": found[0]["packets"] + found[0]["drops"],
            "dropped": found[0]["drops"],
        }
        if found
        else {}
    )


class Relay:
    """The switch in user space of impairing.py: a process in the namespace of the switch, known by its files."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.control, self.pid, self.log = (
            folder / "relay",
            folder / "relay.pid",
            folder / "relay.log",
        )

    @property
    def made(self) -> bool:
        """Whether this testbed has one."""
        return self.pid.exists()

    def start(self, space: str, size: int, faults: Faults) -> None:
        """Start it between the ports of P hosts, which are there and up, and wait until it passes frames."""
        program = [
            sys.executable,
            str(HERE / "impairing.py"),
            str(self.control),
            str(size),
            json.dumps(asdict(faults)),
        ]
        with self.log.open("w") as log:
            process = subprocess.Popen(
                inside(space, *program),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self.pid.write_text(str(process.pid))
        with process.stdout as says:
            if says.readline() != "ready\n":
                fail(f"the relay did not start: {self.log.read_text()}")

    def counts(self) -> list[dict[str, int]]:
        """Return what each link did since the relay is there."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            try:
                asking.connect(str(self.control))
            except OSError as error:
                fail(
                    f"the relay does not answer ({error}); it said: {self.log.read_text()}"
                )
            with asking.makefile() as answer:
                return json.load(answer)

    def stop(self) -> None:
        """End the process, if it is still there and still the one that was started."""
        if not self.made:
            return
        pid = int(self.pid.read_text())
        try:
            # stays this process, whoever is given its number later
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            if str(self.control) in pathlib.Path(f"/proc/{pid}/cmdline").read_text():
                end(process)
        finally:
            os.close(process)


def end(process: int) -> None:
    """End the process of a descriptor, and wait until it has ended."""
    for how in signal.SIGTERM, signal.SIGKILL:
        signal.pidfd_send_signal(process, how)
        if select.select([process], [], [], PATIENCE)[0]:
            return
