"""Checkpoints of an exchange: the states of its buckets as arrays by name, which np.savez can store.

A state is by segment, "segment/part.name", so it fits other buckets; wrappers of a
model do not change the names. Each segment lists its keys, and has a table, as text:
the settings, and `PLACE`, so that states of several ranks or steps are not mixed.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from collectives.training.names import canonical, canonical_names
from mpicomp.arrays import Array
from mpicomp.bucket import Bucket
from mpicomp.settings import OTHER_SETTINGS, check_table, from_table, to_table
from mpicomp.tensors import spread

_HOLDS = "holds"  # the row of a table that lists the other keys of a segment
TABLE = "settings"  # the key of the table
PLACE = "rank", "ranks", "steps"  # the rows of a table that are no settings


def whole_state(
    buckets: Sequence[Bucket], settings: Mapping[str, Any]
) -> dict[str, Array]:
    """Return copies of the states of buckets. settings: the rows that all tables have, those of `PLACE` first."""
    saved = _saved_names(buckets)
    return {
        key: array
        for each in buckets
        for key, array in _state(each, saved, settings).items()
    }


def load_whole_state(
    buckets: Sequence[Bucket],
    state: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    same_settings: bool,
) -> int:
    """Load copies of a `whole_state`, all or nothing, and return its step.

    same_settings: also refuse a state with other settings. Raises ValueError that names
    both for a state of another rank, number of ranks or settings, and ValueError for
    one that does not fit, is incomplete, or is of several steps.
    """
    saved = _saved_names(buckets)
    names = {*saved.values()}
    segments = dict.fromkeys(key.rpartition("/")[0] for key in state)
    own_name = {
        segment: segment if segment in names else canonical(segment)
        for segment in segments
    }
    if sorted(own_name.values()) != sorted(names):
        unknown = [segment for segment, name in own_name.items() if name not in names]
        raise ValueError(
            f"the state is of {len(segments)} tensors, with {unknown[:5]} and without "
            f"{sorted(names - {*own_name.values()})[:5]}: expected the {len(names)} of the exchange; register named "
            "tensors first"
        )
    by_segment: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, array in state.items():
        segment, _, part = key.rpartition("/")
        by_segment[own_name[segment]][part] = array
    tables = {name: _table_of(name, own, settings) for name, own in by_segment.items()}
    steps = {table["steps"] for table in tables.values()}
    if len(steps) > 1:
        each = {
            step: next(name for name, table in tables.items() if table["steps"] == step)
            for step in steps
        }
        raise ValueError(
            f"the state is of different steps, {each}: expected what one state_dict() returned"
        )
    with restored_on_error(buckets):
        for bucket in buckets:
            own = {name: by_segment[saved[name]] for name in bucket.names}
            _load(bucket, own, settings if same_settings else None)
    return int(*steps)


def _saved_names(buckets: Sequence[Bucket]) -> dict[str, str]:
    return canonical_names([name for bucket in buckets for name in bucket.names])


def _table_of(
    name: str, state: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, str]:
    """Return the table of a segment's state; raises ValueError if it is incomplete, or of another rank."""
    missing = {TABLE} - state.keys()
    if not missing:
        missing = set(from_table(state[TABLE]).get(_HOLDS, "").split()) - state.keys()
    if missing:
        raise ValueError(
            f"the state of {name!r} has no {sorted(missing)}: expected all that state_dict() returned"
        )
    remedy = "each rank loads what it saved; load_state_dicts takes the states of another number of ranks"
    check_table(
        f"the state of {name!r}",
        state[TABLE],
        {key: settings[key] for key in ("rank", "ranks")},
        remedy,
    )
    table = from_table(state[TABLE])
    if not table.get("steps", "").isdecimal():
        raise ValueError(
            f"the state of {name!r} is of step {table.get('steps')}: expected an integer"
        )
    return table


@contextmanager
def restored_on_error(buckets: Sequence[Bucket]) -> Iterator[None]:
    """Restore the states of buckets if the block raises."""
    before = [(each.feedback.state_dict(), each.selection.states()) for each in buckets]
    try:
        yield
    except Exception:
        for bucket, (feedback, compressors) in zip(buckets, before, strict=True):
            bucket.feedback.load_state_dict(feedback)
            bucket.selection.load_states(compressors)
        raise


def _state(
    bucket: Bucket, saved: Mapping[str, str], settings: Mapping[str, Any]
) -> dict[str, Array]:
    """Return copies of the states as "segment/part.name", and for each segment a table of settings."""
    state: dict[str, Array] = {}
    kept = bucket.feedback.state_dict()
    described = _settings_of_parts(bucket)
    for segment, compressor in enumerate(bucket.selection.states()):
        own = {f"compressor.{key}": array for key, array in compressor.items()}
        for key, array in kept.items():
            own[f"feedback.{key}"] = _of_segment(bucket, segment, array)
        rows = {**settings, **described[segment], _HOLDS: " ".join(sorted(own))}
        own[TABLE] = to_table(rows)
        name = saved[bucket.names[segment]]
        state |= {f"{name}/{key}": array for key, array in own.items()}
    return state


def _load(
    bucket: Bucket,
    state: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any] | None,
) -> None:
    """Load copies of the states of segments, by name, which may have been in other buckets.

    settings: to be found in the tables, besides those of the parts; None for any.
    Raises ValueError if one does not fit.
    """
    compressors = []
    feedbacks = []
    described = _settings_of_parts(bucket)
    for name, rows in zip(bucket.names, described, strict=True):
        # first those of the parts, so that another compressor is named
        if settings is not None:
            rows |= {key: value for key, value in settings.items() if key not in PLACE}
            check_table(
                f"the state of {name!r}", state[name][TABLE], rows, OTHER_SETTINGS
            )
        by_part: dict[str, dict[str, Any]] = {"compressor": {}, "feedback": {}}
        for key, array in state[name].items():
            part, _, own = key.partition(".")
            if part in by_part:
                by_part[part][own] = array
            elif key != TABLE:
                raise ValueError(
                    f"the state of {name!r} has {key!r}: expected parts of {sorted(by_part)}"
                )
        compressors.append(by_part["compressor"])
        feedbacks.append(by_part["feedback"])
    bucket.selection.load_states(compressors)
    bucket.feedback.load_state_dict(_joined(bucket, feedbacks))
    dtype = bucket.tensors[0].dtype if bucket.tensors else None
    if dtype is not None and not bucket.feedback.fits(bucket.length, dtype):
        raise ValueError(
            f"the state of {', '.join(map(repr, bucket.names[:3]))} has {bucket.feedback.size} values: expected "
            f"{bucket.length}, of {dtype}"
        )


def _joined(bucket: Bucket, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of a feedback from those of its segments; raises ValueError if they do not fit together."""
    if not bucket.tensors:
        return dict(states[0])
    kinds = {
        key: np.asarray(array).dtype
        for state in states
        for key, array in state.items()
        if np.ndim(array)
    }
    full: list[Mapping[str, Any]] = []
    spans = _spans(bucket)
    for name, span, state in zip(bucket.names, spans, states, strict=True):
        expected = span.stop - span.start
        sizes = {np.shape(array)[0] for array in state.values() if np.ndim(array)}
        for size in sizes - {expected}:
            dtype = bucket.tensors[0].dtype
            raise ValueError(
                f"the state of {name!r} has {size} values: expected {expected}, of {dtype}"
            )
        begun = {}
        # without arrays before its first step: it may have been held
        if not sizes:
            begun = {key: np.zeros(expected, dtype) for key, dtype in kinds.items()}
        full.append({**state, **begun})
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for state in full for key in state):
        arrays = [np.asarray(state[key]) for state in full if key in state]
        same = (
            len(arrays) == len(full)
            and len({(each.dtype, each.ndim) for each in arrays}) == 1
        )
        if not same or (
            not arrays[0].ndim and len({each.item() for each in arrays}) > 1
        ):
            raise ValueError(
                f"the states of {list(bucket.names)} have different {key}: expected one step for all"
            )
        joined[key] = arrays[0]
        if arrays[0].ndim:
            zeros = np.zeros(bucket.length, arrays[0].dtype)
            joined[key] = np.concatenate(spread(arrays, spans, zeros))
    return joined


def _of_segment(bucket: Bucket, segment: int, array: Array) -> Array:
    """Return the part of an array that belongs to a segment; numbers belong to all."""
    return array[_spans(bucket)[segment]] if array.ndim and bucket.tensors else array


def _spans(bucket: Bucket) -> list[slice]:
    """Return where the segments are: the tensors, or all of a list of them."""
    return bucket.spans if len(bucket.names) > 1 else [slice(0, bucket.length)]


def _settings_of_parts(bucket: Bucket) -> list[dict[str, str]]:
    """Return the settings of feedback and compressor of each segment, as text by part."""
    feedback = repr(bucket.feedback)
    return [
        {"feedback": feedback, "compressor": compressor}
        for compressor in bucket.selection.settings
    ]
