"""The debug mode of the collectives, MPICOMP_CHECK=1: more rounds, and every promise is checked in every call.

On each call, over the schedule of the allgather, 2 ceil(lg P) rounds more:

* before it: which operation each rank calls, and from which line. Ranks that call different ones raise, whatever those
  are; without the debug mode they may wait for each other, until a deadline tells them.
* after it: every input and output is sound (in order, in range, finite); a result that all ranks are promised has the
  same bits on all of them; what came back, and what was rejected, adds up to what went in (`mpicomp.checking.Mass`),
  within the rounding of one addition a rank.

And every message has a checksum (`channel.Channel`). A communicator is asked once, at its first operation: the variable
has to be set on all of its ranks or on none. Where it is not set nothing of this runs.
"""

import json
import sys
from collections.abc import Sequence
from hashlib import blake2b
from itertools import starmap
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from collectives.agreement import all_or_none, named_ranks
from collectives.channel import Channel
from collectives.messages import Steps
from mpicomp.arrays import namespace, to_array, to_numpy
from mpicomp.checking import Mass, dense_mass, mass, tolerance
from mpicomp.errors import CheckError
from mpicomp.vector import SparseVector

T = TypeVar("T")
Brought = SparseVector | list[NDArray[Any]]


def checked(channel: Channel, steps: Steps[T], brought: Brought) -> Steps[T]:
    """Run an operation with all that the debug mode checks; return its result, or raise on all ranks.

    brought: the vector, or the array that MPI sums, in a list that is filled where it could be made.
    """
    watch = Watch(channel, brought, _caller())
    return _checked(channel, steps, watch)


def _checked(channel: Channel, steps: Steps[T], watch: "Watch") -> Steps[T]:
    with channel.turn() as channel.reserved:  # before the first yield, as the operation itself would
        yield from watch.same_call()
        return (yield from all_or_none(channel, steps, watch))


class Watch:
    """What is to be said of one operation: who calls it from where, what went in, and what came out."""

    def __init__(self, channel: Channel, brought: Brought, caller: str) -> None:
        self._channel, self._brought, self._caller = channel, brought, caller
        self._said = f"MPICOMP_CHECK: call {channel.number} on this communicator, "

    def same_call(self) -> Steps[None]:
        """Compare the operations; raises CheckError on all ranks where they differ."""
        operation = self._channel.terms.operation
        texts = yield from self._channel.gather_texts(json.dumps([operation, self._caller]))
        calls: dict[str, list[int]] = {}
        for rank, text in enumerate(texts):
            name, where = json.loads(text)
            calls.setdefault(f"{name} at {where}", []).append(rank)
        if len({name.partition(" at ")[0] for name in calls}) > 1:
            who = "; ".join(f"{call} on {named_ranks(ranks)}" for call, ranks in calls.items())
            raise CheckError(f"{self._said}must be the same operation on all ranks, got {who}")

    def account(self, result: Any) -> dict[str, Any]:
        """Return what this rank's part in the operation was, in numbers."""
        try:
            everywhere, own = _promised(self._channel, result)
            fault = _fault([("what it brings", each) for each in _vectors(self._brought)])
            fault = fault or _fault([("what it gets", each) for each in (*everywhere, *own)])
            return {
                "fault": fault,
                "brought": _total(_vectors(self._brought)),
                "everywhere": _total(everywhere),
                "own": _total(own),
                "bits": None if isinstance(self._brought, list) else _digest(everywhere),  # those are MPI's own sums
            }
        except Exception as error:  # the other ranks have to hear of it
            return {"fault": f"{type(error).__name__}: {error}"}

    def judge(self, accounts: Sequence[dict[str, Any]]) -> None:
        """Raise CheckError where what all ranks say does not add up; `accounts` stand in rank order."""
        said, faults = f"{self._said}{self._channel.terms.operation}: ", []
        faults += [f"rank {rank}: {each['fault']}" for rank, each in enumerate(accounts) if each["fault"]]
        if faults:
            raise CheckError(said + "; ".join(faults))
        bits: dict[Any, list[int]] = {}
        for rank, each in enumerate(accounts):
            bits.setdefault(each["bits"], []).append(rank)
        if len(bits) > 1:
            raise CheckError(f"{said}the ranks hold different bits: one result on " + _others(bits))
        brought, own = (self._sum(accounts, name) for name in ("brought", "own"))
        returned = Mass(*accounts[0]["everywhere"]).plus(own)
        if not returned.equals(brought, tolerance(self._channel.terms.dtype or np.float32, len(accounts))):
            raise CheckError(
                f"{said}mass is not conserved: the ranks brought {brought.plain!r} in all (weighted by position "
                f"{brought.weighted!r}), and {returned.plain!r} ({returned.weighted!r}) came back"
            )

    @staticmethod
    def _sum(accounts: Sequence[dict[str, Any]], name: str) -> Mass:
        whole = Mass()
        for each in accounts:
            whole = whole.plus(Mass(*each[name]))
        return whole


def _promised(channel: Channel, result: Any) -> tuple[list[Any], list[Any]]:
    """Return what a result holds that all ranks have alike, and what is this rank's part of the sum."""
    operation = channel.terms.operation
    if channel.terms.votes and result is not None:
        result = _recounted(*result)
    if operation == "gtopk_allreduce":
        return [result[0]], [result[1]]
    if operation == "sparse_reduce_scatter":
        return [], [result]
    if operation == "sparse_reduce":
        return [], [] if result is None else [result]
    if operation in ("SupportPlan.union", "SupportPlan.leader", "SupportPlan.random"):
        nothing = namespace(result.indices).empty((result.indices.size, 0), np.float32)
        return [SparseVector(result.indices, nothing, result.length)], []
    if operation in ("dense_allreduce", "SupportPlan.allreduce", "aligned_allreduce"):
        return [result.values if isinstance(result, SparseVector) else to_array(result)], []
    return list(result) if isinstance(result, list) else [result], []


def _recounted(total: SparseVector, votes: NDArray[Any]) -> SparseVector:
    """Return a sum and its votes as the rows that were added up."""
    values, counts = to_numpy(total.values), to_numpy(votes).astype(total.dtype)
    rows = values.reshape(total.nnz, -1) if total.nnz else np.empty((0, (total.width or 1)), total.dtype)
    return SparseVector(to_numpy(total.indices), np.column_stack([rows, counts]), total.length)


def _vectors(brought: Brought) -> list[Any]:
    """Return what was brought as a list. The support of a leader and the like have no values, and so no mass."""
    return brought if isinstance(brought, list) else [brought]


def _fault(parts: Sequence[tuple[str, Any]]) -> str | None:
    for what, part in parts:
        try:
            if isinstance(part, SparseVector):
                part.validate()
            elif not np.isfinite(part).all():
                place = int(np.flatnonzero(~np.isfinite(part.reshape(-1)))[0])
                raise ValueError(f"value {place} is {part.reshape(-1)[place]}: expected finite values")
        except ValueError as error:
            return f"{what}: {error}"
    return None


def _total(parts: Sequence[Any]) -> Mass:
    whole = Mass()
    for part in parts:
        whole = whole.plus(mass(part) if isinstance(part, SparseVector) else dense_mass(part))
    return whole


def _digest(vectors: Sequence[SparseVector]) -> str:
    digest = blake2b(digest_size=8)
    for vector in vectors:
        digest.update(repr((vector.length, str(vector.dtype), vector.values.shape)).encode())
        digest.update(to_numpy(vector.indices).data)
        digest.update(np.ascontiguousarray(to_numpy(vector.values)).data)
    return digest.hexdigest()


def _others(bits: dict[Any, list[int]]) -> str:
    return ", another on ".join(starmap(lambda _, ranks: named_ranks(ranks), bits.items()))


def _caller() -> str:
    """Return the line that called the library, as file:line."""
    frame = sys._getframe(1)
    while frame.f_back and str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("collectives", "mpicomp"):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
