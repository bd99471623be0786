"""States that P ranks saved, redistributed over P' ranks: a checkpoint continues in a job of another size.

Rank r of P' continues the ranks r, r + P', r + 2P', ... of P. Arrays that differ by
rank (residuals, velocities) are added in this order; a rank r >= P has zeros. The state
of compressors is copied. A rank holds one loaded state at a time.

Invariant: the sum over the ranks of each such array is unchanged, exactly where the
additions are exact. All feedback methods are linear in these arrays, except for masked
velocities, so the sums develop as on P ranks.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from collectives.training.checkpoint import TABLE
from mpicomp.arrays import Array, to_numpy
from mpicomp.feedback.base import accumulation_dtype
from mpicomp.settings import check_table, from_table, to_choice, to_integer, to_table

Load = Callable[[int], Mapping[str, Any] | None]
CONSERVED = "sum", "mean"
_BY_RANK = "compressor", TABLE  # parts that may differ by rank: a seed


def redistributed(
    settings: Mapping[str, Any],
    ranks: int,
    load: Load,
    conserve: str,
) -> dict[str, Array]:
    """Return the state of one rank of the new job, as `whole_state` would: from states that `ranks` ranks saved.

    settings: of the new job, with its "rank" and "ranks". load(rank): returns the
    `whole_state` of a rank, or None if it is lost, and its residual with it; called for
    the ranks that this one continues, or for another one if none of them has a state.
    conserve: "sum" or "mean" over the ranks.

    Raises ValueError for states of other ranks than requested, of different steps, or
    if there is none, and OverflowError if a sum leaves the range of its dtype.
    """
    ranks = to_integer("ranks", ranks)
    to_choice("conserve", conserve, CONSERVED)
    rank = settings["rank"]
    size = settings["ranks"]
    source, state = _first_saved([rank % ranks, *range(ranks)], load, ranks)
    dtypes = {key: array.dtype for key, array in state.items() if _differs(key, array)}
    start = np.array if source == rank else np.zeros_like
    state |= {
        key: start(state[key], accumulation_dtype(dtype))
        for key, dtype in dtypes.items()
    }
    for source in range(rank + size, ranks, size):
        other = _loaded(load, source, ranks)
        if other is not None:
            _check_same_step(state, other, rank, source, differing=dtypes.keys())
            state |= {key: state[key] + other[key] for key in dtypes}
    if conserve == "mean" and size != ranks:
        state |= {key: state[key] * size / ranks for key in dtypes}
    state |= {
        key: _narrowed(key, state[key], dtype, rank) for key, dtype in dtypes.items()
    }
    return state | {
        key: to_table(from_table(state[key]) | {"rank": rank, "ranks": size})
        for key in _tables(state)
    }


def _tables(state: Mapping[str, Any]) -> list[str]:
    return [key for key in state if key.rpartition("/")[2] == TABLE]


def _differs(key: str, array: Array) -> bool:
    """Return whether an array of a state differs by rank: all arrays of a feedback do, its numbers do not."""
    return key.rpartition("/")[2].startswith("feedback.") and array.ndim > 0


def _first_saved(
    sources: Iterable[int], load: Load, ranks: int
) -> tuple[int, dict[str, Array]]:
    """Return the first of some ranks with a state, and that."""
    for source in sources:
        state = _loaded(load, source, ranks)
        if state is not None:
            return source, state
    raise ValueError(f"load returned None for all {ranks} ranks: expected a state")


def _loaded(load: Load, rank: int, ranks: int) -> dict[str, Array] | None:
    """Return the state of a rank, None if it is lost; ValueError if it is of another rank, or number of ranks."""
    given = load(rank)
    if given is None:
        return None
    state = {name: np.asarray(to_numpy(given[name])) for name in given}
    remedy = "load(rank) returns the state that this rank saved, and ranks is the number of ranks that saved one"
    for key in _tables(state):
        check_table(
            f"load({rank}): the state",
            state[key],
            {"rank": rank, "ranks": ranks},
            remedy,
        )
    return state


def _check_same_step(
    state: Mapping[str, Array],
    other: Mapping[str, Array],
    rank: int,
    source: int,
    *,
    differing: Any,
) -> None:
    """Raise ValueError if two states differ in an array that is the same on all ranks in one step."""
    remedy = "expected states that all ranks saved after the same step"
    if state.keys() ^ other.keys():
        raise ValueError(
            f"the states of ranks {rank} and {source} have different arrays: {remedy}"
        )
    for key in _tables(state):
        check_table(
            f"the state of rank {source}",
            other[key],
            {"steps": from_table(state[key]).get("steps")},
            remedy,
        )
    for key in state.keys() - differing:
        part = key.rpartition("/")[2].partition(".")[0]
        if part not in _BY_RANK and not np.array_equal(state[key], other[key]):
            raise ValueError(
                f"{key} differs between the states of ranks {rank} and {source}: {remedy}"
            )
    for key in differing:
        if state[key].shape != other[key].shape:
            shapes = f"{state[key].shape} and {other[key].shape}"
            raise ValueError(
                f"{key} has the shapes {shapes} in the states of ranks {rank} and {source}: {remedy}"
            )


def _narrowed(key: str, total: Array, dtype: np.dtype[Any], rank: int) -> Array:
    with np.errstate(over="ignore"):
        narrow = total.astype(dtype, copy=False)
    if not np.isfinite(narrow).all():
        raise OverflowError(
            f"{key} of rank {rank}: the sum over the ranks it continues leaves the range of {dtype}"
        )
    return narrow
