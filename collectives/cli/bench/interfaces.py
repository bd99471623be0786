"""Bytes as the kernel counts them at the network interfaces, beside those that the library counts and the bound.

With the headers of TCP and Ethernet, and with whatever else the host sends: for hosts of one rank each that do nothing
else, such as those of benchmarks/testbed.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from collectives.progress import wait_for
from collectives.transport import endpoint_of

COUNTERS = pathlib.Path("/proc/self/net/dev")  # of the network namespace that this process is in
LOOPBACK = "lo"
SENT = 8  # place of the bytes sent among the figures of a line

HEAD = (
    "at the interfaces, the busiest host, with headers:\n"
    f"{'length':>10}  {'density':>7}  {'algorithm':35}  {'codec':8}  {'kB a call':>10}  {'/ bound':>7}"
)


def sent(text: str | None = None) -> int:
    """Return the bytes that this host has sent over its interfaces but loopback."""
    lines = (COUNTERS.read_text() if text is None else text).splitlines()[2:]  # two lines of heads
    figures = {name.strip(): line.split() for name, _, line in (line.partition(":") for line in lines)}
    return sum(int(figure[SENT]) for name, figure in figures.items() if name != LOOPBACK)


def missing(comm: Any) -> str | None:
    """Return why there is nothing to count; None when each rank is on a host of its own that counts."""
    endpoint = endpoint_of(comm, wait_for)
    if len(set(endpoint.nodes)) < endpoint.size or endpoint.size == 1:
        return "--interfaces counts what a host sends: expected several ranks, each on a host of its own (see testbed)"
    if not COUNTERS.exists():
        return f"--interfaces reads {COUNTERS}, which this system does not have"
    return None


def during(comm: Any, call: Callable[[], Any], calls: int) -> float:
    """Return the bytes of a call at the interfaces of the busiest host: the mean of several calls."""
    comm.Barrier()
    before = sent()
    for _ in range(calls):
        call()
    comm.Barrier()  # what a rank sent last has arrived
    return float(max(comm.allgather((sent() - before) / calls)))


def report(rows: Sequence[Any]) -> str:
    """Return a line for each row: its bytes, and over the bound."""
    lines = []
    for row in rows:
        if row.wire_nbytes is not None and row.least_nbytes:
            figures = f"{row.wire_nbytes / 1e3:10.1f}  {row.wire_nbytes / row.least_nbytes:7.2f}"
            lines.append(f"{row.length:10}  {row.density:7g}  {row.algorithm:35}  {row.codec:8}  {figures}")
    return "\n".join([HEAD, *lines]) + "\n"
