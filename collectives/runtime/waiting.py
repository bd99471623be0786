"""Waiting inside MPI, or by polling with backoff (docs/contributing/costs.md); and the timeout."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpicomp.settings import to_choice, to_number

if TYPE_CHECKING:
    from mpi4py import MPI

# The setting "backoff" or "block", or "auto", the default: backoff if ranks share
# cores, and MPI does not yield.
VARIABLE = "MPICOMP_WAIT"
SETTINGS = ("auto", "backoff", "block")
TIMEOUT = "MPICOMP_TIMEOUT"  # seconds; an empty text counts as unset


def agree_on_waiting(
    comm: "MPI.Intracomm", nodes: Sequence[int]
) -> tuple[bool, int, float]:
    """Return whether this rank polls with backoff, how many ranks share its cores, and the crowding of all nodes.

    The crowding, the same on all ranks, is the number of ranks to a core on the node
    with the most, at least 1. nodes: for each rank, the first rank that shares its
    memory. The variables are the same on all ranks; ValueError for a bad one. Collective,
    blocks.
    """
    setting = os.environ.get(VARIABLE) or "auto"
    to_choice(f"the environment variable {VARIABLE}", setting, SETTINGS)
    seconds(os.environ.get(TIMEOUT) or None, f"the environment variable {TIMEOUT}")
    mine = cores()
    masks: dict[int, list[int]] = {}
    for mask, node in zip(comm.allgather(mine), nodes, strict=True):
        masks.setdefault(node, []).append(mask)
    here = masks[nodes[comm.rank]]
    backs_off = setting == "backoff"
    if setting == "auto":
        backs_off = crowding(here) > 1 and not yields_the_core()
    sharers = [mask for mask in here if mask & mine]
    return backs_off, len(sharers), max(map(crowding, masks.values()))


def initial_timeout() -> float | None:
    """Return the timeout in the environment, in seconds; None if it is missing or bad."""
    try:
        return seconds(os.environ.get(TIMEOUT) or None, TIMEOUT)
    except ValueError:
        return None


def seconds(value: Any, name: str) -> float | None:
    """Return a timeout in seconds, given as a number or a text, or None; ValueError for other values."""
    try:
        number = float(value) if isinstance(value, str) else value
        return None if number is None else to_number(name, number, above=0)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} is {value!r}: expected seconds above 0, or None"
        ) from None


def yields_the_core() -> bool:
    """Return whether this MPI yields the core between two polls if ranks share cores."""
    from mpi4py import MPI

    return MPI.Get_library_version().startswith("Open MPI")


def crowding(masks: list[int]) -> float:
    """Return the number of ranks of a node to each of its cores, at least 1. masks: the affinity mask of each rank."""
    together = 0
    for mask in masks:
        together |= mask
    return max(1.0, len(masks) / together.bit_count())


def cores() -> int:
    """Return the affinity mask of this process, as an integer."""
    return sum(1 << core for core in os.sched_getaffinity(0))
