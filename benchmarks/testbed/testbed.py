#!/usr/bin/env python3
"""Several hosts with slow links on one machine: network namespaces, whose links the kernel shapes and counts.

python testbed.py up 8 100mbit [DELAY]       P hosts, each with a full-duplex link of a rate to one switch
python testbed.py run python -m mpi4py x.py  one rank a host, over TCP, by Open MPI's mpirun
python testbed.py reset | bytes [--json]     what each host sent and received since `reset`, with headers
python testbed.py down                       remove everything

Needs root, and ip and tc (iproute2). README.md beside this file says what it can and cannot tell.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import NoReturn

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SUBNET = "10.77.0."  # seen inside the namespaces only, so that two testbeds may use the same
TCP = {
    "tcp_congestion_control": "cubic",  # BBR, the default of some kernels, takes the pauses of MPI for a slow link
    "tcp_slow_start_after_idle": "0",
    "tcp_no_metrics_save": "1",
}
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
    "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "tcp,self",
    "OMPI_MCA_btl_tcp_flags": "1",  # without its put protocol, which does not send and receive at the same time
    "OMPI_MCA_btl_tcp_if_include": f"{SUBNET}0/24",
    "OMPI_MCA_oob_tcp_if_include": f"{SUBNET}0/24",
    "PRTE_MCA_prte_if_include": f"{SUBNET}0/24",
    "OMPI_MCA_mpi_yield_when_idle": "1",  # each host believes that all cores are its own
    "MPICOMP_WAIT": "nap",  # likewise
}
# Stands in for ssh: enters the host's namespace, under a name and a folder for temporary files of its own.
REMOTE_SHELL = """\
#!/bin/bash
while [[ $1 == -* ]]; do shift; done
number=${{1##*.}}; shift
host={name}-$number
exec ip netns exec $host unshare --uts bash -c "hostname $host; export TMPDIR={folder}/tmp/$number; $*"
"""


class Testbed:
    """The hosts of one name: a folder that says how many they are, and the namespaces."""

    def __init__(self, name: str) -> None:
        self.name, self.folder = name, pathlib.Path("/run/mpicomp-testbed") / name

    @property
    def hosts(self) -> list[str]:
        """The namespaces of the hosts; an error when there are none."""
        try:
            size = int((self.folder / "size").read_text())
        except OSError:
            fail("it is not up: call `up P RATE` first")
        return [f"{self.name}-{number}" for number in range(1, size + 1)]

    @property
    def hub(self) -> str:
        """The namespace of the switch, from which mpirun starts the ranks."""
        return f"{self.name}-hub"

    def up(self, size: int, rate: float, delay: str | None) -> None:
        """Make the hosts and their links; leave nothing behind when that fails."""
        if self.folder.exists():
            fail("it is up already: call `down` first")
        (self.folder / "tmp").mkdir(parents=True)
        (self.folder / "size").write_text(str(size))
        shell = self.folder / "remote-shell"
        shell.write_text(REMOTE_SHELL.format(name=self.name, folder=self.folder))
        shell.chmod(0o755)
        try:
            self._make_hub()
            for number, host in enumerate(self.hosts, 1):
                self._make_host(number, host, rate, delay)
            self.reset()
        except BaseException:
            self.down()
            raise

    def _make_hub(self) -> None:
        make_namespace(self.hub)
        ip(self.hub, "link add switch type bridge")
        ip(self.hub, f"address add {SUBNET}254/24 dev switch")
        ip(self.hub, "link set switch up")

    def _make_host(self, number: int, host: str, rate: float, delay: str | None) -> None:
        (self.folder / "tmp" / str(number)).mkdir()
        make_namespace(host)
        ip(self.hub, f"link add port{number} type veth peer name eth0 netns {host}")
        bundle = clamp(rate / 8 / 4000, 3000, 65536)  # of TCP segments: a quarter of a millisecond, so that flows mix
        for space, device in (host, "eth0"), (self.hub, f"port{number}"):
            ip(space, f"link set {device} gso_max_size {bundle} gro_max_size {bundle} txqueuelen 1000")
            shape(space, device, rate, delay if device == "eth0" else None)
        ip(self.hub, f"link set port{number} master switch up")
        ip(host, f"address add {SUBNET}{number}/24 dev eth0")
        ip(host, "link set eth0 up")

    def run(self, command: list[str]) -> int:
        """Start a command on every host, one rank each, and return its exit status."""
        mpirun = shutil.which("mpirun") or fail("there is no mpirun on the PATH")
        if "Open MPI" not in call([mpirun, "--version"]):
            fail(f"{mpirun} is not Open MPI's: the ranks are started by options of its own")
        shell = str(self.folder / "remote-shell")
        agents = {"OMPI_MCA_plm_rsh_agent": shell, "PRTE_MCA_plm_ssh_agent": shell}
        hosts = ",".join(f"{SUBNET}{number}:1" for number in range(1, len(self.hosts) + 1))
        start = ["mpirun", "--host", hosts, "-n", str(len(self.hosts)), "--bind-to", "none", "--map-by", "node"]
        enter = [
            "ip",
            "netns",
            "exec",
            self.hub,
            "unshare",
            "--uts",
            "bash",
            "-c",
            f'hostname {self.hub}; exec "$@"',
            "-",
        ]
        environment = {**os.environ, **OPEN_MPI, **agents}  # the stand-in for ssh hands it on
        return subprocess.run([*enter, *start, *command], env=environment, check=False).returncode

    def counted(self) -> list[dict[str, int]]:
        """Return the bytes that the kernel counted at each host's interface since it is there."""
        links = [json.loads(ip(host, "-json -stats link show eth0"))[0] for host in self.hosts]
        return [{"sent": link["stats64"]["tx"]["bytes"], "received": link["stats64"]["rx"]["bytes"]} for link in links]

    def reset(self) -> None:
        """Count from here on."""
        (self.folder / "counted").write_text(json.dumps(self.counted()))

    def bytes(self) -> list[dict[str, int]]:
        """Return the bytes that each host sent and received since `reset`."""
        now, before = self.counted(), json.loads((self.folder / "counted").read_text())
        return [{way: new[way] - old[way] for way in new} for new, old in zip(now, before, strict=True)]

    def down(self) -> None:
        """Remove the namespaces, and with them the links, and the folder."""
        for space in [self.hub, *self.hosts] if self.folder.exists() else []:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


def make_namespace(name: str) -> None:
    """Make a network namespace with a loopback interface, and the TCP settings of a cluster."""
    call(["ip", "netns", "add", name])
    ip(name, "link set lo up")
    for setting, value in TCP.items():
        write = f"echo {value} > /proc/sys/net/ipv4/{setting}"
        call(["ip", "netns", "exec", name, "sh", "-c", write], f"the kernel refuses {setting} = {value}")


def shape(space: str, device: str, rate: float, delay: str | None) -> None:
    """Let a device send at most at a rate; the bucket holds a millisecond, as timers are late."""
    bucket, queue = clamp(rate / 8000, 32768, 1_000_000), clamp(rate / 160, 300_000, 50_000_000)
    tbf = f"qdisc add dev {device} root handle 1: tbf rate {rate:.0f} burst {bucket} limit {queue}"
    call(["tc", "-netns", space, *tbf.split()], "the kernel has no sch_tbf")
    if delay:
        netem = f"qdisc add dev {device} parent 1: netem delay {delay} limit 100000"
        call(["tc", "-netns", space, *netem.split()], "no delay here: the kernel has no sch_netem; leave DELAY out")


def clamp(number: float, low: int, high: int) -> int:
    """Return the whole number nearest to `number` between two bounds."""
    return int(min(max(number, low), high))


def ip(space: str, command: str) -> str:
    """Run ip in a namespace and return what it prints."""
    return call(["ip", "-netns", space, *command.split()])


def call(command: list[str], meaning: str = "") -> str:
    """Run a command and return what it prints; when it fails, say what that means, and what it said itself."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        fail(f"{meaning or 'failed'} ({' '.join(command)}: {done.stderr.strip()})")
    return done.stdout


def fail(reason: str) -> NoReturn:
    """End with a reason."""
    sys.exit(f"testbed: {reason}")


def rate(text: str) -> float:
    """Return the bits per second that a text says."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.lower())
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"got {text!r}: expected a rate such as 100mbit, 1gbit or 500kbit")
    return float(found[1]) * UNITS[found[2]]


def delay(text: str) -> str:
    """Return a delay as tc writes it."""
    if not re.fullmatch(r"\d+(\.\d+)?(us|ms)", text):
        raise argparse.ArgumentTypeError(f"got {text!r}: expected a delay such as 50us or 1ms")
    return text


def hosts(text: str) -> int:
    """Return the number of hosts that a text says."""
    if not text.isdigit() or not 1 <= int(text) <= 200:
        raise argparse.ArgumentTypeError(f"got {text!r}: expected 1 to 200 hosts")
    return int(text)


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Return what the command line asks for."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="testbed.py", description=__doc__, formatter_class=formatter)
    parser.add_argument("--name", default="testbed", help="of the testbed, where there are several (%(default)s)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="make hosts and links")
    up.add_argument("size", type=hosts, metavar="P", help="number of hosts: 8")
    up.add_argument("rate", type=rate, metavar="RATE", help="of each link, each way: 100mbit, 1gbit")
    up.add_argument("delay", type=delay, nargs="?", metavar="DELAY", help="one way, where the kernel has netem: 50us")
    commands.add_parser("run", help="start a command on every host").add_argument("line", nargs=argparse.REMAINDER)
    commands.add_parser("reset", help="count bytes from here on")
    commands.add_parser("bytes", help="print them").add_argument("--json", action="store_true", help="for a program")
    commands.add_parser("down", help="remove everything")
    options = parser.parse_args(arguments)
    if options.command == "run" and not options.line:
        parser.error("run: expected a command, such as: run python -m mpi4py x.py")
    return options


def main(arguments: list[str]) -> int:
    """Do what the command line asks for, and return the exit status."""
    options = parsed(arguments)
    if os.geteuid() != 0:
        fail("expected to be root: network namespaces and shaped links are made by root only")
    for tool in "ip", "tc", "unshare":
        if not shutil.which(tool):
            fail(f"there is no {tool} on the PATH: install iproute2 (ip, tc) and util-linux (unshare)")
    testbed = Testbed(options.name)
    if options.command == "up":
        testbed.up(options.size, options.rate, options.delay)
    elif options.command == "run":
        return testbed.run(options.line)
    elif options.command == "bytes":
        report(testbed.bytes(), as_json=options.json)
    else:
        testbed.reset() if options.command == "reset" else testbed.down()
    return 0


def report(counts: list[dict[str, int]], *, as_json: bool) -> None:
    """Print the bytes of each host."""
    if as_json:
        print(json.dumps(counts))
        return
    for number, count in enumerate(counts, 1):
        print(f"host {number}: sent {count['sent']:>15,}  received {count['received']:>15,}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
