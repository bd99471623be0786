"""The debug mode of the collectives, MPICOMP_CHECK=1 (docs/reliability.md): calls are compared, results audited.

The variable is read once for each communicator, at its first operation.
`collectives.calls.checking` has the masses and their tolerance, `runtime.group` the checksums.
"""

import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from collectives.calls.call import Prepared, Sum, ToSum
from collectives.calls.checking import check_conserved, mass, total_mass
from collectives.calls.notification import run_or_notify
from collectives.faults.errors import CheckError
from collectives.faults.state import differing
from collectives.runtime.group import Group
from collectives.runtime.messages import Steps
from mpicomp.arrays import Array
from mpicomp.digests import joint_digest
from mpicomp.vector import SparseVector, from_all_values

T = TypeVar("T")


def checked(
    group: Group, steps: Steps[T], prepared: Prepared, promise: ToSum | None
) -> Steps[T]:
    """Run an operation with the checks of the debug mode; return its result, or raise on all ranks.

    promise: see `collectives.calls.collective.Declaration`.
    """
    # The caller's frames are gone once the nonblocking call has returned.
    call = [group.signature["operation"], _caller()]
    if promise is not None:
        steps = _audited(group, steps, prepared, promise)
    return _compared(group, call, steps)


def _compared(group: Group, call: list[str], steps: Steps[T]) -> Steps[T]:
    group.join_queue()  # for `steps`
    try:
        calls = yield from group.gather_objects(call)
        if len({name for name, _ in calls}) > 1:
            who = differing(enumerate(f"{name} at {line}" for name, line in calls))
            where = f"{_where(group)}must be the same operation on all ranks"
            raise CheckError(f"{where}, got {who}")
        return (yield from run_or_notify(group, steps))
    finally:
        group.leave_queue()
        # An error, its traceback and this frame would form a reference cycle.
        del group, steps


def _audited(
    group: Group, steps: Steps[T], prepared: Prepared, promise: ToSum
) -> Steps[T]:
    is_array = not isinstance(prepared.payload, SparseVector)
    # The operation may write to the contribution, so its mass is computed first.
    before = _weighed("its contribution", _contribution, prepared, is_array=is_array)
    del prepared
    result = yield from steps
    after = _weighed("its result", promise, result, is_array=is_array)
    account = {
        **after,
        "contributed": before.get("same"),
        "fault": before["fault"] or after["fault"],
    }
    accounts = yield from group.gather_objects(account)
    where = f"{_where(group)}{group.signature['operation']}: "
    audit(accounts, group.signature.get("dtype") or "float32", where)
    return result


def _contribution(prepared: Prepared) -> Sum:
    if prepared.contributed is not None:
        return Sum(prepared.contributed())
    return Sum(prepared.payload)


def _where(group: Group) -> str:
    return f"MPICOMP_CHECK: call {group.number} on this communicator, "


def _weighed(
    what: str, promise: ToSum, result: Any, *, is_array: bool
) -> dict[str, Any]:
    """Return masses and a digest of vectors, or the first fault in them, which the other ranks have to receive.

    An error of the promise is a fault as well. is_array: arrays are summed.
    """
    try:
        total = promise(result)
        parts = total.value if isinstance(total.value, list) else [total.value]
        same = [_as_vector(part) for part in parts]
        own = [] if total.rejected is None else [_as_vector(total.rejected)]
        arrays = chain.from_iterable((one.indices, one.values) for one in same)
        # Sums by MPI's own allreduce may differ between ranks.
        bits = None if is_array and not own else joint_digest(arrays)
        masses = {
            "same": total_mass(map(mass, same)),
            "own": total_mass(map(mass, own)),
        }
        for vector in (*same, *own):
            vector.validate()
        return {"fault": None, "bits": bits, **masses}
    except Exception as error:
        return {"fault": f"{what}: {error}"}


def _as_vector(part: SparseVector | Array) -> SparseVector:
    """Return a vector as it is, and a dense array as the vector with an entry for each value."""
    if isinstance(part, SparseVector):
        return part
    return from_all_values(part.reshape(-1))


def audit(accounts: Sequence[dict[str, Any]], dtype: str, where: str) -> None:
    """Raise CheckError on all ranks if their accounts, in rank order, do not add up."""
    faults = [
        f"rank {rank}: {account['fault']}"
        for rank, account in enumerate(accounts)
        if account["fault"]
    ]
    if faults:
        raise CheckError(where + "; ".join(faults))
    if who := differing(enumerate(account["bits"] for account in accounts)):
        raise CheckError(f"{where}the ranks hold different bits: {who}")
    contributed = total_mass(account["contributed"] for account in accounts)
    returned = total_mass(
        [accounts[0]["same"], *(account["own"] for account in accounts)]
    )
    check_conserved(contributed, returned, dtype, len(accounts), where)


def _caller() -> str:
    """Return the line that called the library, as file:line."""
    frame = sys._getframe(1)
    while frame.f_back and str(frame.f_globals.get("__name__", "")).partition(".")[
        0
    ] in ("collectives", "mpicomp"):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
