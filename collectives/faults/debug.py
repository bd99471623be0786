"""The debug mode of the collectives, MPICOMP_CHECK=1: checks the promise of every call, in additional rounds.

Each call takes 2 ceil(lg P) more rounds, over the schedule of the allgather:

* before it, the ranks compare the operation and the calling line. Ranks that call different operations raise; without
  the debug mode some combinations deadlock until a deadline passes.
* after it, every input and output is validated (in order, in range, finite); a result promised to all ranks must have
  the same bits on all; results and rejected entries must add up to the inputs (see `mpicomp.checking`), within the
  rounding of one addition a rank.

Every message has a checksum (`runtime.group`). The variable is read once for each communicator, at its first operation,
and must be the same on all of its ranks.
"""

import sys
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from collectives.faults.notification import run_or_notify
from collectives.faults.state import named_ranks
from collectives.runtime.group import Group
from collectives.runtime.messages import Steps
from mpicomp.arrays import to_numpy
from mpicomp.checking import dense_mass, is_same_mass, mass, tolerance, total_mass
from mpicomp.errors import CheckError
from mpicomp.vector import SparseVector

T = TypeVar("T")
Promise = Callable[[Any], tuple[list[Any], list[Any]]]  # of a result: the vectors of all ranks, and of this rank


def checked(group: Group, steps: Steps[T], contributed: Any, promise: Promise | None) -> Steps[T]:
    """Run an operation with the checks of the debug mode; return its result, or raise on all ranks.

    contributed: the vector, or the array that MPI sums. promise: see `collectives.collective.collective`.
    """
    call = [group.signature["operation"], _caller()]  # now: later the caller's frames are gone
    return _compared(group, call, steps if promise is None else _audited(group, steps, contributed, promise))


def _compared(group: Group, call: list[str], steps: Steps[T]) -> Steps[T]:
    """Run an operation once the ranks have compared their calls: the operation and the calling line."""
    with group.reserve_turn():
        _compare_calls((yield from group.gather_objects(call)), _where(group))
        return (yield from run_or_notify(group, steps))


def _audited(group: Group, steps: Steps[T], contributed: Any, promise: Promise) -> Steps[T]:
    """Run an operation, and compare what the ranks contributed with what they received."""
    result = yield from steps
    accounts = yield from group.gather_objects(_account(contributed, promise, result))
    where = f"{_where(group)}{group.signature['operation']}: "
    _audit(accounts, group.signature.get("dtype") or "float32", where)
    return result


def _where(group: Group) -> str:
    return f"MPICOMP_CHECK: call {group.number} on this communicator, "


def _compare_calls(calls: Sequence[Sequence[str]], where: str) -> None:
    """Raise CheckError on all ranks if they call different operations; a call is its name and its line."""
    ranks: dict[str, list[int]] = {}
    for rank, (name, line) in enumerate(calls):
        ranks.setdefault(f"{name} at {line}", []).append(rank)
    if len({name for name, _ in calls}) > 1:
        who = "; ".join(f"{call} on {named_ranks(callers)}" for call, callers in ranks.items())
        raise CheckError(f"{where}must be the same operation on all ranks, got {who}")


def _account(contributed: Any, promise: Promise, result: Any) -> dict[str, Any]:
    """Return the masses of this rank's contribution and results."""
    try:
        everywhere, own = promise(result)
        fault = _fault([("its contribution", contributed), *(("its result", each) for each in (*everywhere, *own))])
        return {
            "fault": fault,
            "contributed": _mass_of(contributed),
            "everywhere": total_mass(map(_mass_of, everywhere)),
            "own": total_mass(map(_mass_of, own)),
            "bits": _digest(everywhere)
            if own or isinstance(contributed, SparseVector)
            else None,  # else MPI's own sums
        }
    except Exception as error:  # the other ranks have to receive it
        return {"fault": f"{type(error).__name__}: {error}"}


def _audit(accounts: Sequence[dict[str, Any]], dtype: str, where: str) -> None:
    """Raise CheckError on all ranks if their accounts, in rank order, do not add up."""
    faults = [f"rank {rank}: {each['fault']}" for rank, each in enumerate(accounts) if each["fault"]]
    if faults:
        raise CheckError(where + "; ".join(faults))
    bits: dict[Any, list[int]] = {}
    for rank, each in enumerate(accounts):
        bits.setdefault(each["bits"], []).append(rank)
    if len(bits) > 1:
        different = ", another on ".join(map(named_ranks, bits.values()))
        raise CheckError(f"{where}the ranks hold different bits: one result on {different}")
    contributed, own = (total_mass(each[name] for each in accounts) for name in ("contributed", "own"))
    returned = total_mass([accounts[0]["everywhere"], own])
    if not is_same_mass(returned, contributed, tolerance(np.dtype(dtype), len(accounts))):
        raise CheckError(
            f"{where}mass is not conserved: the ranks contributed {contributed[0]!r} in all (weighted by position "
            f"{contributed[1]!r}), and the results have {returned[0]!r} ({returned[1]!r})"
        )


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


def _mass_of(part: Any) -> list[float]:
    return mass(part) if isinstance(part, SparseVector) else dense_mass(part)


def _digest(vectors: Sequence[Any]) -> str:
    digest = blake2b(digest_size=8)
    for vector in vectors:
        sparse = isinstance(vector, SparseVector)
        values = vector.values if sparse else vector
        digest.update(repr((vector.length if sparse else vector.size, str(values.dtype), values.shape)).encode())
        for array in (vector.indices, values) if sparse else (values,):
            digest.update(np.ascontiguousarray(to_numpy(array)).data)
    return digest.hexdigest()


def _caller() -> str:
    """Return the line that called the library, as file:line."""
    frame = sys._getframe(1)
    while frame.f_back and str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("collectives", "mpicomp"):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
