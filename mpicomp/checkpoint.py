"""Checkpoints of an exchange: the states of its buckets as arrays by name, which np.savez can store.

A state is by segment, "segment/part.name", so it fits other buckets. Each segment lists its keys, so that a missing one
is noticed, and has the settings of its parts as text.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

from mpicomp.arrays import Array
from mpicomp.bucket import Bucket
from mpicomp.settings import OTHER_SETTINGS, check_table, to_table

_HOLDS = "holds"  # the key under which a segment lists its other keys
_SETTINGS = "settings"  # the key of the table of the parts, as text
SHARED = "settings"  # that of what all vectors have in common; the keys of segments have a slash


def whole_state(buckets: Sequence[Bucket], settings: Mapping[str, Any]) -> dict[str, Array]:
    """Return copies of the states of buckets, with their common settings as a table.

    settings: include "rank" and "ranks".
    """
    return {key: array for each in buckets for key, array in _state(each).items()} | {SHARED: to_table(settings)}


def load_whole_state(
    buckets: Sequence[Bucket], state: Mapping[str, Any], settings: Mapping[str, Any], *, same_settings: bool
) -> None:
    """Load copies of a `whole_state`, all or nothing.

    same_settings: also refuse a state with other settings; a state of another rank, or number of ranks, is always
    refused. Raises ValueError that names both settings, and ValueError for a state that does not fit or is incomplete.
    """
    state = dict(state)
    table = state.pop(SHARED, None)
    by_segment: dict[str, dict[str, Any]] = {}
    for key, array in state.items():
        segment, _, part = key.rpartition("/")
        by_segment.setdefault(segment, {})[part] = array
    names = {name for bucket in buckets for name in bucket.names}
    if by_segment.keys() != names:
        raise ValueError(
            f"the state is of {sorted(by_segment)}: expected {sorted(names)}; register named tensors first"
        )
    if table is None:
        raise ValueError(f"the state has no {SHARED!r}: expected all that state_dict() returned")
    place = {name: settings[name] for name in ("rank", "ranks")}
    remedy = "each rank loads what it saved; load_state_dicts takes the states of another number of ranks"
    check_table("the state", table, place, remedy)
    with restored_on_error(buckets):
        for bucket in buckets:  # first, so that another compressor is named
            _load(bucket, by_segment, same_settings=same_settings)
        if same_settings:
            check_table("the state", table, settings, OTHER_SETTINGS)


@contextmanager
def restored_on_error(buckets: Sequence[Bucket]) -> Iterator[None]:
    """Restore the states of buckets if the block raises."""
    before = [
        (each.feedback.state_dict(), [each.compressor_of(name).state_dict() for name in each.names]) for each in buckets
    ]
    try:
        yield
    except Exception:
        for bucket, state in zip(buckets, before, strict=True):
            bucket.feedback.load_state_dict(state[0])
            for name, own in zip(bucket.names, state[1], strict=True):
                bucket.compressor_of(name).load_state_dict(own)
        raise


def _state(bucket: Bucket) -> dict[str, Array]:
    """Return copies of the states as "segment/part.name", for each segment with a list of these, and its parts."""
    state: dict[str, Array] = {}
    kept = bucket.feedback.state_dict()
    for place, name in enumerate(bucket.names):
        held = {f"compressor.{key}": array for key, array in bucket.compressor_of(name).state_dict().items()}
        held |= {f"feedback.{key}": _of_segment(bucket, place, array) for key, array in kept.items()}
        held |= {_HOLDS: np.array(sorted(held), np.str_), _SETTINGS: to_table(_parts(bucket, name))}
        state |= {f"{name}/{key}": array for key, array in held.items()}
    return state


def _load(bucket: Bucket, state: Mapping[str, Mapping[str, Any]], *, same_settings: bool) -> None:
    """Load copies of the states of segments, by name, which may have been in other buckets.

    same_settings: refuse the state of parts with other settings. Raises ValueError if it does not fit, or is
    incomplete.
    """
    kept: list[dict[str, Any]] = []
    for name in bucket.names:
        by_part = _checked_parts(bucket, name, state[name], same_settings=same_settings)
        bucket.compressor_of(name).load_state_dict(by_part["compressor"])
        kept.append(by_part["feedback"])
    bucket.feedback.load_state_dict(_joined(bucket, kept))
    dtype = bucket.tensors[0].dtype if bucket.tensors else None
    if dtype is not None and not bucket.feedback.fits(bucket.length, dtype):
        raise ValueError(
            f"the state of {', '.join(map(repr, bucket.names[:3]))} has {bucket.feedback.size} values: expected "
            f"{bucket.length}, of {dtype}"
        )


def _checked_parts(
    bucket: Bucket, name: str, mine: Mapping[str, Any], *, same_settings: bool
) -> dict[str, dict[str, Any]]:
    """Return the state of a segment by part; raises ValueError if it is incomplete, or of other parts."""
    missing = {_HOLDS, _SETTINGS, *map(str, np.ravel(mine.get(_HOLDS, [])))} - mine.keys()
    if missing:
        raise ValueError(f"the state has no {sorted(missing)}: expected all that state_dict() returned")
    parts = _parts(bucket, name)
    if same_settings:
        check_table(f"the state of {name!r}", mine[_SETTINGS], parts, OTHER_SETTINGS)
    mine = {key: array for key, array in mine.items() if key not in (_HOLDS, _SETTINGS)}
    if {key.partition(".")[0] for key in mine} - parts.keys():
        raise ValueError(f"the state has {sorted(mine)}: expected those of {sorted(parts)}")
    by_part: dict[str, dict[str, Any]] = {part: {} for part in parts}
    for key, array in mine.items():
        by_part[key.partition(".")[0]][key.partition(".")[2]] = array
    return by_part


def _joined(bucket: Bucket, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of a feedback from those of its segments; raises ValueError if they do not fit together."""
    if not bucket.tensors:
        return dict(states[0])
    for name, (first, end), state in zip(bucket.names, pairwise(bucket.edges), states, strict=True):
        for size in {np.shape(array)[0] for array in state.values() if np.ndim(array)} - {end - first}:
            dtype = bucket.tensors[0].dtype
            raise ValueError(f"the state of {name!r} has {size} values: expected {end - first}, of {dtype}")
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for state in states for key in state):
        arrays = [np.asarray(state[key]) for state in states if key in state]
        same = len(arrays) == len(states) and len({(each.dtype, each.ndim) for each in arrays}) == 1
        if not same or (not arrays[0].ndim and len({each.item() for each in arrays}) > 1):
            raise ValueError(f"the states of {list(bucket.names)} have different {key}: expected one step for all")
        joined[key] = np.concatenate(arrays) if arrays[0].ndim else arrays[0]
    return joined


def _of_segment(bucket: Bucket, place: int, array: Array) -> Array:
    """Return the part of a saved array that belongs to a segment; numbers as they are."""
    return array[bucket.edges[place] : bucket.edges[place + 1]] if array.ndim and bucket.tensors else array


def _parts(bucket: Bucket, name: str) -> dict[str, Any]:
    return {"feedback": bucket.feedback, "compressor": bucket.compressor_of(name)}
