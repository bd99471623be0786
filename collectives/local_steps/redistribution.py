"""States that P ranks saved, redistributed over P' ranks: a checkpoint continues in a job of another size.

Rank r of P' continues the ranks r, r + P', r + 2P', ... of P. Arrays that differ by
rank (residuals, velocities) are added in this order; a rank r >= P has zeros. All other
arrays are copied. A rank holds one loaded state at a time.

Invariant: the sum over the ranks of each such array is unchanged, exactly where the
additions are exact. All feedback methods are linear in these arrays, except for masked
velocities, so the sums develop as on P ranks.
"""

from collections.abc import Callable, Mapping

import numpy as np

from collectives.exchange.checkpoint import (
    HEADER,
    LOOP,
    SAME,
    SUM,
    Header,
    check_saved,
    header_of,
    pack,
    roles,
)
from mpicomp.arrays import Array, ByName
from mpicomp.arrays.device import to_numpy
from mpicomp.arrays.values import converted
from mpicomp.feedback.base import accumulation_dtype
from mpicomp.settings import to_choice, to_integer

Load = Callable[[int], ByName | None]
CONSERVED = "sum", "mean"
# Names of facts in the state of a loop.
PROGRESS = "has_progress"
IN_FLIGHT = "in_flight"


def redistribute_state(
    load: Load, saved: int, rank: int, ranks: int, *, conserve: str = "sum"
) -> dict[str, Array]:
    """Return the state from which one rank of a job continues what a job of another number of ranks saved.

    No rank communicates: a job does it when it starts, or a program of one process for all
    ranks. The residual of old rank j is added to that of new rank j mod `ranks`. Residuals in
    place are not part of a state.

    Args:
        load: a function of a rank of the job that saved; returns its `state_dict`, of a
            `GradientExchange` or an `OuterLoop`, or None if it is lost, and its residual with
            it. It is called for the ranks that this one continues, rank, rank + ranks,
            rank + 2 ranks, ...; or, if none of them has a state, for others, and the residual
            is zero.
        saved: the number of ranks that saved.
        rank: of this job.
        ranks: the number of ranks of this job.
        conserve: "sum" conserves the sum of the residuals over the ranks, right with a learning
            rate proportional to the number of ranks if average=True divides by it; "mean"
            their mean, right with a constant learning rate.

    Returns:
        A state for `load_state_dict`.

    Raises:
        ValueError: there is no state; one is of another rank than requested or of another
            step; or it is of a loop within a round, behind one that failed or was skipped, or
            with an exchange in flight, whose progress belongs to single ranks (save after
            `OuterLoop.synchronise`).
        OverflowError: a sum leaves the range of its dtype.

    >>> exchange = GradientExchange(comm, TopK(k=2))
    >>> mean = exchange(gradient)
    >>> states = [exchange.state_dict()]  # or the file of each rank that saved
    >>> state = redistribute_state(states.__getitem__, 1, comm.rank, comm.size)
    >>> exchange.load_state_dict(state)
    """
    saved = to_integer("saved", saved)
    ranks = to_integer("ranks", ranks)
    rank = to_integer("rank", rank, 0, ranks - 1)
    to_choice("conserve", conserve, CONSERVED)
    sources = [rank % saved, *range(saved)]
    loaded = ((source, _loaded(load, source, saved)) for source in sources)
    source, state = next((pair for pair in loaded if pair[1]), (None, None))
    if state is None:
        raise ValueError(f"load returned no state of {saved} ranks: expected one")
    header = header_of(state)
    _check_at_anchor(header)
    parts = roles(header)
    dtypes = {key: state[key].dtype for key, role in parts.items() if role == SUM}
    start = np.array if source == rank else np.zeros_like
    for key, dtype in dtypes.items():
        state[key] = start(state[key], accumulation_dtype(dtype))
    for source in range(rank + ranks, saved, ranks):
        other = _loaded(load, source, saved)
        if other is not None:
            _check_same_step(state, other, rank, source)
            for key in dtypes:
                state[key] = state[key] + other[key]
    for key, dtype in dtypes.items():
        total = state[key]
        if conserve == "mean" and ranks != saved:
            total = total * ranks / saved
        state[key] = converted(total, dtype)
        if not np.isfinite(state[key]).all():
            raise OverflowError(
                f"{key} of rank {rank}: the sum over the ranks it continues leaves the range of {dtype}"
            )
    state[HEADER] = pack({**header, "rank": rank, "ranks": ranks})
    return state


def _check_at_anchor(header: Header) -> None:
    """Raise ValueError for the state of a loop unless all ranks held its anchor."""
    loop = header.get(LOOP)
    if loop is not None and (loop[PROGRESS] or loop[IN_FLIGHT]):
        raise ValueError(
            f"the state is of step {loop['count']}, within a round or with an exchange in flight: expected one that "
            "was saved when all ranks held the anchor, as after synchronise()"
        )


def _loaded(load: Load, rank: int, ranks: int) -> dict[str, Array] | None:
    """Return the state of a rank, None if it is lost; ValueError if it is of another rank, or number of ranks."""
    saved = load(rank)
    if not saved:
        return None
    state = {name: np.asarray(to_numpy(saved[name])) for name in saved}
    remedy = "load(rank) returns the state that this rank saved, and saved is the number of ranks that saved one"
    called = f"load({rank}): the state"
    place = {"rank": rank, "ranks": ranks}
    check_saved(called, header_of(state, called), place, remedy)
    return state


def _check_same_step(
    state: Mapping[str, Array], other: Mapping[str, Array], rank: int, source: int
) -> None:
    """Raise ValueError if two states differ in what is the same on all ranks in one step."""
    remedy = "expected states that all ranks saved after the same step"
    header = header_of(state)
    theirs = header_of(other)
    facts = {name: header.get(name) for name in ("steps", LOOP)}
    check_saved(f"the state of rank {source}", theirs, facts, remedy)
    parts = roles(header)
    if parts != roles(theirs):
        raise ValueError(
            f"the states of ranks {rank} and {source} have different arrays: {remedy}"
        )
    for key, role in parts.items():
        is_same = True
        if role == SUM:
            is_same = state[key].shape == other[key].shape
        if role == SAME:
            is_same = np.array_equal(state[key], other[key])
        if not is_same:
            raise ValueError(
                f"{key} differs between the states of ranks {rank} and {source}: {remedy}"
            )
