"""Checkpoints of an exchange: the states of its buckets as arrays by name, which np.savez can store.

A state is by segment, "segment/part.name", so it fits other buckets; wrappers of a
model do not change the names. Each segment lists its keys, and has a table, as text:
the settings, and `PLACE`, so that states of several ranks or steps are not mixed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from collectives.exchange.names import canonical_names
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


def whole_state(buckets: Sequence[Bucket], settings: ByName) -> dict[str, Array]:
    """Return copies of the states of buckets. settings: the rows that all tables have, those of `PLACE` first."""
    saved = _saved_names(buckets)
    whole: dict[str, Array] = {}
    for bucket in buckets:
        states: list[dict[str, Array]] = [{} for _ in bucket.names]
        for part, segments, spans, owner in _owners(bucket):
            for state, own in zip(states[segments], save(owner, spans), strict=True):
                state |= {f"{part}.{name}": array for name, array in own.items()}
        for name, state, table in zip(
            bucket.names, states, _settings_of_parts(bucket), strict=True
        ):
            rows = {**settings, **table, _HOLDS: " ".join(sorted(state))}
            state[TABLE] = to_table(rows)
            whole |= {f"{saved[name]}/{key}": array for key, array in state.items()}
    return whole


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
    by_segment: dict[str, dict[str, Any]] = {}
    for key, array in state.items():
        name, _, part = key.rpartition("/")
        by_segment.setdefault(name, {})[part] = array
    if by_segment.keys() != names:
        raise ValueError(
            f"the state is of {len(by_segment)} tensors, with {sorted(by_segment.keys() - names)[:5]} and without "
            f"{sorted(names - by_segment.keys())[:5]}: expected the {len(names)} of the exchange; register named "
            "tensors first"
        )
    steps = {}
    for bucket in buckets:
        for name, parts in zip(bucket.names, _settings_of_parts(bucket), strict=True):
            own = by_segment[saved[name]]
            called = f"the state of {name!r}"
            steps[name] = _step_of(called, own, settings)
            if same_settings:
                # first those of the parts, so that another compressor is named
                rows = {**parts, **settings}
                for place in PLACE:
                    rows.pop(place)
                check_table(called, own[TABLE], rows, OTHER_SETTINGS)
    if len({*steps.values()}) > 1:
        raise ValueError(
            f"the state is of different steps, {steps}: expected what one state_dict() returned"
        )
    with restored_on_error(buckets):
        for bucket in buckets:
            _load(bucket, [by_segment[saved[name]] for name in bucket.names])
    return int(*{*steps.values()})


def _saved_names(buckets: Sequence[Bucket]) -> dict[str, str]:
    return canonical_names([name for bucket in buckets for name in bucket.names])


def _step_of(called: str, state: ByName, settings: ByName) -> str:
    """Return the step of a segment's state; raises ValueError if it is incomplete, or of another rank."""
    table = from_table(state[TABLE]) if TABLE in state else {_HOLDS: TABLE}
    missing = set(table.get(_HOLDS, "").split()) - state.keys()
    if missing:
        raise ValueError(
            f"{called} has no {sorted(missing)}: expected all that state_dict() returned"
        )
    for key in state:
        if key.partition(".")[0] not in (TABLE, COMPRESSOR, FEEDBACK):
            raise ValueError(
                f"{called} has {key!r}: expected parts of {COMPRESSOR} and {FEEDBACK}"
            )
    remedy = "each rank loads what it saved; redistribute_state continues on another number of ranks"
    rank_and_size = {key: settings[key] for key in ("rank", "ranks")}
    check_table(called, state[TABLE], rank_and_size, remedy)
    step = table.get("steps", "")
    if not step.isdecimal():
        raise ValueError(f"{called} is of step {step}: expected an integer")
    return step


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


def _load(bucket: Bucket, states: Sequence[ByName]) -> None:
    """Load copies of the states of segments, which may have been in other buckets; ValueError if one does not fit."""
    for part, segments, spans, owner in _owners(bucket):
        pairs = zip(bucket.names[segments], states[segments], strict=True)
        own = {
            f"the state of {name!r}": {
                key.removeprefix(f"{part}."): array
                for key, array in state.items()
                if key.startswith(f"{part}.")
            }
            for name, state in pairs
        }
        load(owner, own, spans)
    dtype = bucket.tensors[0].dtype if bucket.tensors else None
    if dtype is not None and not bucket.feedback.fits(bucket.length, dtype):
        raise ValueError(
            f"the state of {', '.join(map(repr, bucket.names[:3]))} is not that of a gradient of {dtype}: expected "
            f"{bucket.length} values"
        )


def _owners(bucket: Bucket) -> Iterator[tuple[str, slice, list[slice], Configured]]:
    """Yield what has a state: the part of its keys, its segments, where these are in its vector, and the object."""
    feedback = bucket.feedback, 0, len(bucket.names), bucket.edges
    runs = [(COMPRESSOR, run) for run in bucket.selection.runs]
    for part, (owner, first, end, edges) in [(FEEDBACK, feedback), *runs]:
        spans = [slice(*pair) for pair in pairwise(edges)]
        yield part, slice(first, end), spans if bucket.tensors else ONE, owner


def _settings_of_parts(bucket: Bucket) -> list[dict[str, str]]:
    """Return the settings of feedback and compressor of each segment, as text by part."""
    feedback = repr(bucket.feedback)
    return [
        {FEEDBACK: feedback, COMPRESSOR: compressor}
        for compressor in bucket.selection.settings
    ]
