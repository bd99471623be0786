"""The faulty links of benchmarks/testbed: what they do to frames, that TCP bears it, and the collectives above it."""

import hashlib
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from faulty_links import ALL, CASES, absent, differences, run
from hosts import NAME, TESTBED, on_hosts, refusal

sys.path.insert(0, str(TESTBED.parent))
from impairing import HOLD, Faults, ImpairedLink
from links import Relay

FRAMES = 20_000
SENT = 2_000_000
RECEIVER = """
import hashlib, socket
with socket.create_server(("0.0.0.0", 5000)) as server:
    print("listening", flush=True)
    digest, connection = hashlib.sha256(), server.accept()[0]
    while part := connection.recv(2**16):
        digest.update(part)
print(digest.hexdigest())
"""
SENDER = """
import socket, sys
with socket.create_connection(("10.77.0.2", 5000)) as connection:
    connection.sendall(sys.stdin.buffer.read())
"""


def fates(faults, number=1):
    link = ImpairedLink(number, faults)
    return [link.fate() for _ in range(FRAMES)], link.counts


@pytest.mark.parametrize(
    ("fault", "counted"),
    [("loss", "dropped"), ("duplicate", "doubled"), ("reorder", "held")],
)
def test_a_fault_befalls_its_share_of_the_frames_and_is_counted(fault, counted):
    waits, counts = fates(Faults(**{fault: 0.05}))
    befell = {
        "loss": [not wait for wait in waits],
        "duplicate": [len(wait) == 2 for wait in waits],
        "reorder": [0 < wait[0] <= HOLD for wait in waits if wait],
    }
    assert 0.04 < np.mean(befell.pop(fault)) < 0.06
    assert not any(map(any, befell.values()))
    assert vars(counts) == {
        **dict.fromkeys(vars(counts), 0),
        "frames": FRAMES,
        counted: sum(len(wait) != 1 or wait[0] > 0 for wait in waits),
    }


def test_a_seed_and_the_number_of_a_host_fix_what_happens():
    faults = Faults(
        loss=0.1, duplicate=0.1, reorder=0.1, delay=1e-3, jitter=1e-3, seed=4
    )
    first, *others = (
        fates(each, number)[0]
        for each, number in ((faults, 1), (faults, 2), (Faults(loss=0.1), 1))
    )
    assert first == fates(faults, 1)[0]
    assert first not in others


def test_a_process_that_was_given_the_number_of_the_relay_is_left_alone(tmp_path):
    relay = Relay(tmp_path)
    relay.stop()  # there is none
    with subprocess.Popen(["sleep", "60"]) as another:
        try:
            relay.pid.write_text(str(another.pid))
            relay.stop()
            assert another.poll() is None
        finally:
            another.kill()
    relay.stop()  # nor any process of that number


def counted():
    status, said = on_hosts("faults", "--json")
    assert status == 0, said
    return json.loads(said)


def transferred(data):
    """Send data from host 1 to host 2 over TCP, and return the digest that arrived."""
    commands = [
        [
            "timeout",
            "60",
            "ip",
            "netns",
            "exec",
            f"{NAME}-{number}",
            sys.executable,
            "-c",
            program,
        ]
        for number, program in ((2, RECEIVER), (1, SENDER))
    ]
    with subprocess.Popen(commands[0], stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout.readline() == "listening\n"
        subprocess.run(commands[1], input=data, check=True, timeout=60)
        return receiver.stdout.read().strip()


@pytest.mark.parametrize("way", ["relay", "netem"])
def test_a_transfer_arrives_intact_over_links_that_lose_double_reorder_and_delay(way):
    if reason := refusal("--relay"):
        pytest.skip(reason)
    assert on_hosts(
        "up", "2", "100mbit", *ALL.split(), *["--relay"] * (way == "relay")
    ) == (0, "")
    try:
        pid = pathlib.Path("/run/mpicomp-testbed", NAME, "relay.pid")
        if way == "netem" and pid.exists():
            pytest.skip("the kernel has no sch_netem")
        command = (
            pathlib.Path("/proc", pid.read_text(), "cmdline")
            if way == "relay"
            else None
        )
        data = np.random.default_rng(0).bytes(SENT)
        assert transferred(data) == hashlib.sha256(data).hexdigest()
        first, second = counted()
        assert first["frames"] > SENT / 1514
        assert second["frames"] > 100  # what acknowledges them
        if way == "relay":
            assert not absent(
                [first], ["dropped", "doubled", "held", "reordered", "delayed"]
            )
            assert first["overflowed"] == second["overflowed"] == 0
    finally:
        assert on_hosts("down") == (0, "")
    # of a process that has ended nothing is left
    assert not (command and command.exists() and command.read_text())


@pytest.mark.slow
def test_every_collective_has_the_same_bits_over_links_with_all_faults():
    if reason := refusal("--relay"):
        pytest.skip(reason)
    clean, faulty = (
        run(faults, 3, "100mbit", length=4000, name=NAME) for faults in ("", ALL)
    )
    assert len(clean[0][0]) > 50
    assert not differences(clean[0], faulty[0])
    assert not absent(faulty[1], CASES["all of it"][1])


def test_other_bits_and_faults_that_did_not_happen_are_told():
    clean = [{"sum": "a", "gtopk": "b"}, {"sum": "a", "gtopk": "b"}]
    assert not differences(clean, clean)
    assert differences(clean, [clean[0], {"sum": "a", "gtopk": "c"}]) == ["gtopk"]
    assert differences(clean, [{"gtopk": "b"}, clean[1]]) == ["sum"]
    assert absent(
        [{"dropped": 0, "doubled": 0}, {"dropped": 0, "doubled": 2}],
        ["dropped", "doubled"],
    ) == ["dropped"]
