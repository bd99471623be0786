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

from collectives.exchange.checkpoint import COMPRESSOR, FEEDBACK, TABLE
from mpicomp.arrays import Array, ByName, converted, to_numpy
from mpicomp.feedback.base import accumulation_dtype
from mpicomp.settings import to_choice, to_integer
from mpicomp.state import check_table, from_table, to_table

Load = Callable[[int], ByName | None]
CONSERVED = "sum", "mean"
EXCHANGE = "exchange/"  # the prefix of the exchange's keys in the state of a loop
_BY_RANK = COMPRESSOR, TABLE  # parts that may differ by rank: a seed


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
            step; or it is of a loop within a round or with an exchange in flight, whose
            progress belongs to single ranks (save when `step` has returned True, with delay=0).
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
    _check_between_rounds(state)
    dtypes = {key: state[key].dtype for key in state if _differs(key, state)}
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
    for key in _tables(state):
        table = from_table(state[key])
        state[key] = to_table({**table, "rank": rank, "ranks": ranks})
    return state


def _part(key: str, state: ByName) -> str:
    """Return the part of an exchange's state; in the state of a loop parameters may have any name."""
    prefix = EXCHANGE if "count" in state else ""
    return key.rpartition("/")[2].partition(".")[0] if key.startswith(prefix) else ""


def _tables(state: ByName) -> list[str]:
    """Return the keys of the tables of segments."""
    return [key for key in state if _part(key, state) == TABLE]


def _differs(key: str, state: Mapping[str, Array]) -> bool:
    """Return whether an array of an exchange differs by rank: all of a feedback do, its numbers do not."""
    return _part(key, state) == FEEDBACK and state[key].ndim > 0


def _check_between_rounds(state: Mapping[str, Array]) -> None:
    """Raise ValueError for the state of a loop unless all ranks held its anchor."""
    if "count" not in state:
        return
    count = int(state["count"])
    every = int(from_table(state[TABLE])["every"])
    if count % every or is_in_flight(state):
        raise ValueError(
            f"the state is of step {count}, within a round of {every} steps or with an exchange in flight: "
            "expected one saved at the end of a round with delay=0, where all ranks hold the anchor"
        )


def is_in_flight(state: ByName) -> bool:
    """Return whether the state of a loop was saved with an exchange in flight."""
    return any(key.startswith("delta/") for key in state)


def _loaded(load: Load, rank: int, ranks: int) -> dict[str, Array] | None:
    """Return the state of a rank, None if it is lost; ValueError if it is of another rank, or number of ranks."""
    saved = load(rank)
    if saved is None:
        return None
    state = {name: np.asarray(to_numpy(saved[name])) for name in saved}
    remedy = "load(rank) returns the state that this rank saved, and saved is the number of ranks that saved one"
    for key in _tables(state):
        check_table(
            f"load({rank}): the state",
            state[key],
            {"rank": rank, "ranks": ranks},
            remedy,
        )
    return state


def _check_same_step(
    state: Mapping[str, Array], other: Mapping[str, Array], rank: int, source: int
) -> None:
    """Raise ValueError if two states differ in an array that is the same on all ranks in one step."""
    remedy = "expected states that all ranks saved after the same step"
    if state.keys() ^ other.keys():
        raise ValueError(
            f"the states of ranks {rank} and {source} have different arrays: {remedy}"
        )
    for key in _tables(state):
        steps = {"steps": from_table(state[key]).get("steps")}
        check_table(f"the state of rank {source}", other[key], steps, remedy)
    for key, array in state.items():
        if _differs(key, state):
            is_same = array.shape == other[key].shape
        else:
            is_by_rank = _part(key, state) in _BY_RANK
            is_same = is_by_rank or np.array_equal(array, other[key])
        if not is_same:
            raise ValueError(
                f"{key} differs between the states of ranks {rank} and {source}: {remedy}"
            )
