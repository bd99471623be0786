#!/usr/bin/env python3
"""Several hosts with slow links on one machine: network namespaces, whose links the kernel shapes and counts.

python testbed.py up 8 100mbit [DELAY]       P hosts, each with a full-duplex link of a rate to one switch
python testbed.py up 4 100mbit --loss 1%     the same, over links that lose, double, reorder or delay frames
python testbed.py run python -m mpi4py x.py  one rank a host, over TCP, by Open MPI's mpirun
python testbed.py run -- --with-ft ulfm ...  the same, with options of mpirun in front of the command
python testbed.py run --ranks-a-host 4 ...   several ranks a host, which share its memory
python testbed.py reset | bytes [--json]     what each host sent and received since `reset`, with headers
python testbed.py faults [--json]            what each link did to the frames of its host since `reset`
python testbed.py down                       remove everything

Needs root, and ip and tc (iproute2). README.md beside this file says what it can and
cannot tell.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from dataclasses import asdict

from impairing import Faults
from links import Relay, clamp, dropped_by_netem, has_netem, impair, shape
from namespaces import call, fail, inside, ip, make_namespace

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# seen inside the namespaces only, so that two testbeds may use the same
SUBNET = "10.77.0."
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
    "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "tcp,self",
    # without its put protocol, which does not send and receive at the same time
    "OMPI_MCA_btl_tcp_flags": "1",
    "OMPI_MCA_btl_tcp_if_include": f"{SUBNET}0/24",
    "OMPI_MCA_oob_tcp_if_include": f"{SUBNET}0/24",
    "PRTE_MCA_prte_if_include": f"{SUBNET}0/24",
    # each host believes that all cores are its own
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
# Stands in for ssh: enters the host's namespace, under a name and a folder for
# temporary files of its own. /etc/hosts has the names of all hosts, in the namespace of
# mounts that `ip netns exec` makes: gloo looks its own one up.
REMOTE_SHELL = """\
#!/bin/bash
while [[ $1 == -* ]]; do shift; done
number=${{1##*.}}; shift
host={name}-$number
start="hostname $host; mount --bind {folder}/hosts /etc/hosts; export TMPDIR={folder}/tmp/$number; $*"
exec ip netns exec $host unshare --uts bash -c "$start"
"""


Counts = list[dict[str, int]]  # of each host


class Testbed:
    """The hosts of one name: a folder that says how many they are, and the namespaces."""

    def __init__(self, name: str) -> None:
        self.name, self.folder = name, pathlib.Path("/run/mpicomp-testbed") / name
        self.relay = Relay(self.folder)

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

    def up(
        self, size: int, rate: float, faults: Faults, *, relay: bool = False
    ) -> None:
        """Make the hosts and their links; leave nothing behind when that fails.

        relay: with a switch in user space, also where the kernel has sch_netem, or
        there are no faults.
        """
        if self.folder.exists():
            fail("it is up already: call `down` first")
        (self.folder / "tmp").mkdir(parents=True)
        (self.folder / "size").write_text(str(size))
        names = [
            f"{SUBNET}{number} {host}\n" for number, host in enumerate(self.hosts, 1)
        ]
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
        shell = self.folder / "remote-shell"
        shell.write_text(REMOTE_SHELL.format(name=self.name, folder=self.folder))
        shell.chmod(0o755)
        try:
            make_namespace(self.hub)
            faulty = faults != Faults(seed=faults.seed)
            relay = relay or (faulty and not has_netem(self.hub))
            self._make_switch(relay=relay)
            for number, host in enumerate(self.hosts, 1):
                self._make_host(number, host, rate)
                self._join(number, host, relay=relay)
                if faulty and not relay:
                    impair(host, "eth0", faults)
            if relay:
                self.relay.start(self.hub, size, faults)
            self.reset()
        except BaseException:
            self.down()
            raise

    def _make_switch(self, *, relay: bool) -> None:
        """Make the device by which the hub itself is at the switch: the kernel's bridge, or a cable to the relay."""
        ip(
            self.hub,
            f"link add switch type {'veth peer name port0' if relay else 'bridge'}",
        )
        if relay:
            ip(self.hub, "link set port0 arp off up")
            self._switch_offloads_off(self.hub, "switch")
        ip(self.hub, f"address add {SUBNET}254/24 dev switch")
        ip(self.hub, "link set switch up")

    def _make_host(self, number: int, host: str, rate: float) -> None:
        """Make a host, and its link to a port of the hub."""
        (self.folder / "tmp" / str(number)).mkdir()
        make_namespace(host)
        ip(self.hub, f"link add port{number} type veth peer name eth0 netns {host}")
        # of TCP segments: a quarter of a millisecond, so that flows mix
        bundle = clamp(rate / 8 / 4000, 3000, 65536)
        for space, device in (host, "eth0"), (self.hub, f"port{number}"):
            ip(
                space,
                f"link set {device} gso_max_size {bundle} gro_max_size {bundle} txqueuelen 1000",
            )
            shape(space, device, rate)
        ip(host, f"address add {SUBNET}{number}/24 dev eth0")
        ip(host, "link set eth0 up")

    def _join(self, number: int, host: str, *, relay: bool) -> None:
        """Let a port belong to the switch."""
        if relay:
            self._switch_offloads_off(host, "eth0")
            # else the hub would answer here for its other devices
            ip(self.hub, f"link set port{number} arp off up")
        else:
            ip(self.hub, f"link set port{number} master switch up")

    def _switch_offloads_off(self, space: str, device: str) -> None:
        program = inside(
            space,
            sys.executable,
            str(pathlib.Path(__file__).with_name("offloads.py")),
            device,
        )
        call(
            program,
            "the kernel does not let the offloads of a veth pair be switched off",
        )

    def run(self, command: list[str], each: int) -> int:
        """Start a command on every host, with so many ranks each, and return its exit status."""
        mpirun = shutil.which("mpirun") or fail("there is no mpirun on the PATH")
        if "Open MPI" not in call([mpirun, "--version"]):
            fail(
                f"{mpirun} is not Open MPI's: the ranks are started by options of its own"
            )
        shell = str(self.folder / "remote-shell")
        agents = {"OMPI_MCA_plm_rsh_agent": shell, "PRTE_MCA_plm_ssh_agent": shell}
        hosts = ",".join(
            f"{SUBNET}{number}:{each}" for number in range(1, len(self.hosts) + 1)
        )
        start = [
            "mpirun",
            "--host",
            hosts,
            "-n",
            str(each * len(self.hosts)),
            "--bind-to",
            "none",
            "--map-by",
            "slot",
        ]
        enter = inside(
            self.hub,
            "unshare",
            "--uts",
            "bash",
            "-c",
            f'hostname {self.hub}; exec "$@"',
            "-",
        )
        inside_hosts = {"OMPI_MCA_btl": "tcp,sm,self"} if each > 1 else {}
        # the stand-in for ssh hands it on
        environment = {**os.environ, **OPEN_MPI, **inside_hosts, **agents}
        return subprocess.run(
            [*enter, *start, *command], env=environment, check=False
        ).returncode

    def counted(self) -> dict[str, Counts]:
        """Return what there is to count since it is there, host by host."""
        links = [
            json.loads(ip(host, "-json -stats link show eth0"))[0]
            for host in self.hosts
        ]
        sums = [
            {
                "sent": link["stats64"]["tx"]["bytes"],
                "received": link["stats64"]["rx"]["bytes"],
            }
            for link in links
        ]
        if self.relay.made:
            return {"bytes": sums, "faults": self.relay.counts()}
        return {
            "bytes": sums,
            "faults": [dropped_by_netem(host, "eth0") for host in self.hosts],
        }

    def reset(self) -> None:
        """Count from here on."""
        (self.folder / "counted").write_text(json.dumps(self.counted()))

    def since_reset(self, what: str) -> Counts:
        """Return the "bytes" that each host sent and received, or the "faults" of its link, since `reset`."""
        now, before = (
            self.counted()[what],
            json.loads((self.folder / "counted").read_text())[what],
        )
        return [
            {name: new[name] - old[name] for name in new}
            for new, old in zip(now, before, strict=True)
        ]

    def down(self) -> None:
        """End the relay, and remove the namespaces, and with them the links, and the folder."""
        self.relay.stop()
        for space in [self.hub, *self.hosts] if self.folder.exists() else []:
            subprocess.run(
                ["ip", "netns", "delete", space], capture_output=True, check=False
            )
        shutil.rmtree(self.folder, ignore_errors=True)


def rate(text: str) -> float:
    """Return the bits per second that a text says."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.lower())
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(
            f"got {text!r}: expected a rate such as 100mbit, 1gbit or 500kbit"
        )
    return float(found[1]) * UNITS[found[2]]


def seconds(text: str) -> float:
    """Return the seconds that a text says."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms)", text)
    if not found:
        raise argparse.ArgumentTypeError(
            f"got {text!r}: expected a delay such as 50us or 1ms"
        )
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3}[found[2]]


def share(text: str) -> float:
    """Return the share that a text says."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    if not found or float(found[1]) > 100:
        raise argparse.ArgumentTypeError(
            f"got {text!r}: expected a share of the frames such as 1% or 0.5%"
        )
    return float(found[1]) / 100


def hosts(text: str) -> int:
    """Return the number of hosts, or of the ranks of each, that a text says."""
    if not text.isdigit() or not 1 <= int(text) <= 200:
        raise argparse.ArgumentTypeError(f"got {text!r}: expected 1 to 200")
    return int(text)


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Return what the command line asks for."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="testbed.py", description=__doc__, formatter_class=formatter
    )
    parser.add_argument(
        "--name",
        default="testbed",
        help="of the testbed, where there are several (%(default)s)",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_up(commands.add_parser("up", help="make hosts and links"))
    started = commands.add_parser("run", help="start a command on every host")
    started.add_argument(
        "--ranks-a-host", type=hosts, default=1, metavar="R", help="(%(default)s)"
    )
    started.add_argument("line", nargs=argparse.REMAINDER)
    commands.add_parser("reset", help="count bytes and faults from here on")
    for counted in "bytes", "faults":
        commands.add_parser(counted, help="print them").add_argument(
            "--json", action="store_true", help="for a program"
        )
    commands.add_parser("down", help="remove everything")
    options = parser.parse_args(arguments)
    if options.command == "run" and options.line[:1] == ["--"]:
        del options.line[0]
    if options.command == "run" and not options.line:
        parser.error("run: expected a command, such as: run python -m mpi4py x.py")
    if options.command == "up":
        if options.delay and options.wait:
            parser.error(
                "up: got a DELAY and a --delay: expected one of them, as they are the same"
            )
        options.delay = options.delay or options.wait
        if options.jitter > options.delay:
            parser.error("up: expected a --jitter of at most the delay")
    return options


def add_up(up: argparse.ArgumentParser) -> None:
    """Say what hosts and links can be asked for."""
    up.add_argument("size", type=hosts, metavar="P", help="number of hosts: 8")
    up.add_argument(
        "rate", type=rate, metavar="RATE", help="of each link, each way: 100mbit, 1gbit"
    )
    up.add_argument(
        "wait",
        type=seconds,
        nargs="?",
        default=0.0,
        metavar="DELAY",
        help="the same as --delay",
    )
    faults = up.add_argument_group("what a link does to the frames that its host sends")
    for name, what in (
        ("loss", "share of the frames that get lost: 1%%"),
        ("duplicate", "share of the frames that come twice"),
        ("reorder", "share of the frames that are held back, behind those that follow"),
    ):
        faults.add_argument(
            f"--{name}", type=share, default=0.0, metavar="SHARE", help=what
        )
    faults.add_argument(
        "--delay",
        type=seconds,
        default=0.0,
        metavar="TIME",
        help="of every frame: 50us, 2ms",
    )
    faults.add_argument(
        "--jitter",
        type=seconds,
        default=0.0,
        metavar="TIME",
        help="more or less than --delay by up to",
    )
    faults.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of which frames it befalls (%(default)s); by the relay only",
    )
    faults.add_argument(
        "--relay",
        action="store_true",
        help="by the relay, which counts, also where there is sch_netem",
    )


def main(arguments: list[str]) -> int:
    """Do what the command line asks for, and return the exit status."""
    options = parsed(arguments)
    if os.geteuid() != 0:
        fail(
            "expected to be root: network namespaces and shaped links are made by root only"
        )
    for tool in "ip", "tc", "unshare":
        if not shutil.which(tool):
            fail(
                f"there is no {tool} on the PATH: install iproute2 (ip, tc) and util-linux (unshare)"
            )
    testbed = Testbed(options.name)
    if options.command == "up":
        faults = Faults(**{name: getattr(options, name) for name in asdict(Faults())})
        testbed.up(options.size, options.rate, faults, relay=options.relay)
    elif options.command == "run":
        return testbed.run(options.line, options.ranks_a_host)
    elif options.command in ("bytes", "faults"):
        counts = testbed.since_reset(options.command)
        report(
            counts if any(counts) else fail("no faults were asked for"),
            as_json=options.json,
        )
    else:
        testbed.reset() if options.command == "reset" else testbed.down()
    return 0


def report(counts: Counts, *, as_json: bool) -> None:
    """Print what was counted of each host."""
    if as_json:
        print(json.dumps(counts))
        return
    for number, count in enumerate(counts, 1):
        print(
            f"host {number}: "
            + "  ".join(f"{name} {value:>15,}" for name, value in count.items())
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
