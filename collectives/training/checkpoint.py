"""Checkpoints of an exchange: the states of its buckets as arrays by name, which np.savez can store.

A state is by segment, "segment/part.name", so it fits other buckets; wrappers of a
model do not change the names. Each segment lists its keys, and has a table, as text:
the settings, and `PLACE`, so that states of several ranks or steps are not mixed.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from collectives.training.names import canonical, canonical_names
from mpicomp.arrays import Array, ByName
from mpicomp.bucket import Bucket
from mpicomp.compressors.base import restore
from mpicomp.settings import OTHER_SETTINGS
from mpicomp.state import (
    ONE,
    Configured,
    check_names,
    check_table,
    from_table,
    load,
    save,
    to_table,
)

_HOLDS = "holds"  # the row of a table that lists the other keys of a segment
TABLE = "settings"  # the key of the table
PLACE = "rank", "ranks", "steps"  # the rows of a table that are no settings
FEEDBACK = "feedback"
COMPRESSOR = "compressor"
_PARTS = COMPRESSOR, FEEDBACK


def whole_state(buckets: Sequence[Bucket], settings: ByName) -> dict[str, Array]:
    """Return copies of the states of buckets. settings: the rows that all tables have, those of `PLACE` first."""
    saved = _saved_names(buckets)
    return {
        key: array
        for bucket in buckets
        for key, array in _state(bucket, saved, settings).items()
    }


def load_whole_state(
    buckets: Sequence[Bucket],
    state: ByName,
    settings: ByName,
    *,
    same_settings: bool,
) -> int:
    """Load copies of a `whole_state`, all or nothing, and return its step.

    same_settings: also refuse a state with other settings. Raises ValueError that names
    both for a state of another rank, number of ranks or settings, and ValueError for
    one that does not fit, is incomplete, or is of several steps; TypeError for no state.
    """
    check_names(state)
    saved = _saved_names(buckets)
    names = {*saved.values()}
    segments = {key.rpartition("/")[0] for key in state}
    by_segment: dict[str, dict[str, Any]] = {}
    for key, array in state.items():
        segment, _, part = key.rpartition("/")
        name = segment if segment in names else canonical(segment)
        by_segment.setdefault(name, {})[part] = array
    if by_segment.keys() != names or len(segments) != len(names):
        raise ValueError(
            f"the state is of {len(segments)} tensors, with {sorted(by_segment.keys() - names)[:5]} and without "
            f"{sorted(names - by_segment.keys())[:5]}: expected the {len(names)} of the exchange; register named "
            "tensors first"
        )
    steps = {
        name: _table_of(name, own, settings)["steps"]
        for name, own in by_segment.items()
    }
    if len({*steps.values()}) > 1:
        raise ValueError(
            f"the state is of different steps, {steps}: expected what one state_dict() returned"
        )
    with restored_on_error(buckets):
        for bucket in buckets:
            own = {name: by_segment[saved[name]] for name in bucket.names}
            _load(bucket, own, settings if same_settings else None)
    return int(*{*steps.values()})


def _saved_names(buckets: Sequence[Bucket]) -> dict[str, str]:
    return canonical_names([name for bucket in buckets for name in bucket.names])


def _table_of(name: str, state: ByName, settings: ByName) -> dict[str, str]:
    """Return the table of a segment's state; raises ValueError if it is incomplete, or of another rank."""
    table = from_table(state[TABLE]) if TABLE in state else {_HOLDS: TABLE}
    missing = set(table.get(_HOLDS, "").split()) - state.keys()
    if missing:
        raise ValueError(
            f"the state of {name!r} has no {sorted(missing)}: expected all that state_dict() returned"
        )
    remedy = "each rank loads what it saved; redistribute_state continues on another number of ranks"
    check_table(
        f"the state of {name!r}",
        state[TABLE],
        {key: settings[key] for key in ("rank", "ranks")},
        remedy,
    )
    if not table.get("steps", "").isdecimal():
        raise ValueError(
            f"the state of {name!r} is of step {table.get('steps')}: expected an integer"
        )
    return table


@contextmanager
def restored_on_error(buckets: Sequence[Bucket]) -> Iterator[None]:
    """Restore the states of buckets if the block raises."""
    before = [
        snapshot
        for bucket in buckets
        for snapshot in (
            (bucket.feedback, dict(vars(bucket.feedback))),
            *bucket.selection.snapshot(),
        )
    ]
    try:
        yield
    except Exception:
        restore(before)
        raise


def _state(
    bucket: Bucket, saved: Mapping[str, str], settings: ByName
) -> dict[str, Array]:
    """Return copies of the states as "segment/part.name", and for each segment a table of settings."""
    states: list[dict[str, Array]] = [{} for _ in bucket.names]
    for part, segments, owner in _owners(bucket):
        own = save(owner, _spans(bucket, segments))
        for state, arrays in zip(states[segments], own, strict=True):
            state |= {f"{part}.{name}": array for name, array in arrays.items()}
    named: dict[str, Array] = {}
    tables = _settings_of_parts(bucket)
    for name, state, table in zip(bucket.names, states, tables, strict=True):
        rows = {**settings, **table, _HOLDS: " ".join(sorted(state))}
        state[TABLE] = to_table(rows)
        named |= {f"{saved[name]}/{key}": array for key, array in state.items()}
    return named


def _load(
    bucket: Bucket,
    state: Mapping[str, ByName],
    settings: ByName | None,
) -> None:
    """Load copies of the states of segments, by name, which may have been in other buckets.

    settings: to be found in the tables, besides those of the parts; None for any.
    Raises ValueError if one does not fit.
    """
    called = {name: f"the state of {name!r}" for name in bucket.names}
    tables = _settings_of_parts(bucket)
    for name, rows in zip(bucket.names, tables, strict=True):
        # first those of the parts, so that another compressor is named
        if settings is not None:
            rows |= {key: value for key, value in settings.items() if key not in PLACE}
            check_table(called[name], state[name][TABLE], rows, OTHER_SETTINGS)
        for key in state[name]:
            if key != TABLE and key.partition(".")[0] not in _PARTS:
                raise ValueError(
                    f"{called[name]} has {key!r}: expected parts of {_PARTS}"
                )
    for part, segments, owner in _owners(bucket):
        own = {
            called[name]: {
                key.removeprefix(f"{part}."): array
                for key, array in state[name].items()
                if key.startswith(f"{part}.")
            }
            for name in bucket.names[segments]
        }
        load(owner, own, _spans(bucket, segments))
    dtype = bucket.tensors[0].dtype if bucket.tensors else None
    if dtype is not None and not bucket.feedback.fits(bucket.length, dtype):
        raise ValueError(
            f"the state of {', '.join(map(repr, bucket.names[:3]))} is not that of a gradient of {dtype}: expected "
            f"{bucket.length} values"
        )


def _owners(bucket: Bucket) -> Iterator[tuple[str, slice, Configured]]:
    """Yield what has a state: the part of its keys, the segments, and the object."""
    yield FEEDBACK, slice(0, len(bucket.names)), bucket.feedback
    for run in bucket.selection.runs:
        yield COMPRESSOR, slice(run.first, run.end), run.compressor


def _spans(bucket: Bucket, segments: slice) -> list[slice]:
    """Return where segments are, counted from the first of them: the tensors, or all of a list of them."""
    if not bucket.tensors:
        return ONE
    edges = bucket.edges[segments.start : segments.stop + 1]
    return [slice(first - edges[0], end - edges[0]) for first, end in pairwise(edges)]


def _settings_of_parts(bucket: Bucket) -> list[dict[str, str]]:
    """Return the settings of feedback and compressor of each segment, as text by part."""
    feedback = repr(bucket.feedback)
    return [
        {FEEDBACK: feedback, COMPRESSOR: compressor}
        for compressor in bucket.selection.settings
    ]
