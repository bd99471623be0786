"""The format of states: one header in JSON, and arrays "tensor/part/name", for np.savez, torch.save, safetensors, HDF5.

    header = {
        "format": 1,
        "rank": 0, "ranks": 4, "steps": 12,          of the exchange that saved
        "settings": {...},                           of the exchange
        "loop": {...},                               of a loop alone: its facts and settings
        "tensors": {tensor: {part: {"settings": {...}, "arrays": {name: role}}}},
    }

The parts of a tensor are its feedback, its compressor, and that of a loop. The role of
an array says what another number of ranks does with it. A state is by tensor, so it fits
other buckets; wrappers of a model do not change the names.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.exchange.names import canonical_names
from mpicomp.arrays import Array, ByName
from mpicomp.arrays.device import to_numpy
from mpicomp.bucket import Bucket
from mpicomp.compressors.base import restore, snapshot
from mpicomp.settings import OTHER_SETTINGS
from mpicomp.state import (
    ONE,
    POSITIONS,
    Configured,
    check_names,
    load,
    save,
    shown,
)

Header = dict[str, Any]
# The arrays of each part of each tensor, by their names.
Saved = dict[str, dict[str, ByName]]

# Key of the header; no other key begins with it.
HEADER = "header/json"
FORMAT = 1
FEEDBACK = "feedback"
COMPRESSOR = "compressor"
LOOP = "loop"

# Roles of arrays.
SUM = "sum"  # differs by rank: the sum over the ranks counts
SAME = "same"  # on all ranks
OWN = "own"  # of a rank


def pack(header: Header) -> NDArray[Any]:
    """Return a header as an array of bytes, which any store of arrays takes."""
    return np.frombuffer(_json(header).encode(), np.uint8).copy()


def _json(value: Any) -> str:
    """Return settings as JSON; what it cannot hold as text."""

    def plain(setting: Any) -> Any:
        is_part = isinstance(setting, Configured)
        return setting.get_config() if is_part else repr(setting)

    return json.dumps(value, default=plain)


def header_of(state: ByName, called: str = "the state") -> Header:
    """Return the header of a state.

    called: the state, in errors. Raises TypeError for no state, and ValueError for one
    that is damaged, of another version, or without an array that it had.
    """
    check_names(state)
    header: Any = None
    try:
        header = json.loads(np.asarray(to_numpy(state[HEADER]), np.uint8).tobytes())
        keys = {*roles(header)} | {HEADER}
        is_known = header["format"] == FORMAT
    except (KeyError, TypeError, ValueError, AttributeError):
        is_known = False
    if not is_known:
        raise ValueError(
            f"{called} has no {HEADER!r} of format {FORMAT}: expected all that state_dict() returned; the state is "
            "damaged, or was saved by another version"
        )
    if missing := sorted(keys - state.keys()):
        raise ValueError(
            f"{called} has no {missing[:5]}: expected all that state_dict() returned"
        )
    if more := sorted(state.keys() - keys):
        raise ValueError(
            f"{called} has {more[:5]} too: expected what state_dict() returned"
        )
    return header  # type: ignore[no-any-return]


def roles(header: Header) -> dict[str, str]:
    """Return the role of each array of a state, by its key."""
    return {
        f"{tensor}/{part}/{name}": role
        for tensor, parts in header["tensors"].items()
        for part, content in parts.items()
        for name, role in content["arrays"].items()
    }


def check_saved(
    called: str, saved: Mapping[str, Any], expected: Mapping[str, Any], remedy: str
) -> None:
    """Raise ValueError that names both values if a saved one differs from what is expected."""
    for name, value in json.loads(_json(expected)).items():
        if saved.get(name) != value:
            raise ValueError(
                f"{called} was saved with {name} {shown(saved.get(name))}: expected {shown(value)}; {remedy}"
            )


def whole_state(buckets: Sequence[Bucket], place: Header) -> dict[str, Array]:
    """Return copies of the states of buckets. place: rank, ranks, steps, and the settings of the exchange."""
    saved = canonical_names([name for bucket in buckets for name in bucket.names])
    tensors: Header = {}
    whole: dict[str, Array] = {HEADER: np.empty(0, np.uint8)}
    for bucket in buckets:
        for part, segments, spans, owner in _owners(bucket):
            states = save(owner, spans)
            for name, settings, state in zip(
                bucket.names[segments],
                _settings(bucket, part)[segments],
                states,
                strict=True,
            ):
                content = {"settings": settings, "arrays": _roles(part, owner, state)}
                tensors.setdefault(saved[name], {})[part] = content
                for key, array in state.items():
                    whole[f"{saved[name]}/{part}/{key}"] = array
    in_order = dict(sorted(tensors.items()))  # whatever the buckets
    whole[HEADER] = pack({"format": FORMAT, **place, "tensors": in_order})
    return whole


def _roles(part: str, owner: Configured, state: ByName) -> dict[str, str]:
    """Return the roles of the arrays of a part; ranks may have compressors of their own."""
    if part == COMPRESSOR:
        return dict.fromkeys(state, OWN)
    declared = owner.declared()
    is_summed = part == FEEDBACK
    return {
        name: SUM if is_summed and declared[name][1] == POSITIONS else SAME
        for name in state
    }


def check_state(
    buckets: Sequence[Bucket],
    state: ByName,
    place: Header,
    *,
    same_settings: bool,
) -> Saved:
    """Return the arrays of a `whole_state`.

    place: as of `whole_state`. same_settings: also refuse a state with other settings.
    Raises ValueError that names both for a state of another rank, number of ranks or
    settings; TypeError for no state.
    """
    header = header_of(state)
    if LOOP in header:
        raise ValueError(
            "the state is of an OuterLoop: expected one of a GradientExchange; load it into the loop"
        )
    saved = canonical_names([name for bucket in buckets for name in bucket.names])
    tensors = header["tensors"]
    names = {*saved.values()}
    if tensors.keys() != names:
        raise ValueError(
            f"the state is of {len(tensors)} tensors, with {sorted(tensors.keys() - names)[:5]} and without "
            f"{sorted(names - tensors.keys())[:5]}: expected the {len(names)} of the exchange; register named "
            "tensors first"
        )
    remedy = "each rank loads what it saved; redistribute_state continues on another number of ranks"
    here = {name: place[name] for name in ("rank", "ranks")}
    check_saved("the state", header, here, remedy)
    if same_settings:
        # The settings of the parts are compared first, so that the error names another
        # compressor.
        for bucket in buckets:
            for part in FEEDBACK, COMPRESSOR:
                for name, own in zip(
                    bucket.names, _settings(bucket, part), strict=True
                ):
                    settings = {part: tensors[saved[name]][part]["settings"]}
                    check_saved(called(name), settings, {part: own}, OTHER_SETTINGS)
        check_saved("the state", header["settings"], place["settings"], OTHER_SETTINGS)
    return {
        name: {
            part: {key: state[f"{stored}/{part}/{key}"] for key in content["arrays"]}
            for part, content in tensors[stored].items()
        }
        for name, stored in saved.items()
    }


def load_whole_state(buckets: Sequence[Bucket], saved: Saved) -> None:
    """Load copies of what `check_state` returned, all or nothing; raises ValueError if it does not fit."""
    with restored_on_error(buckets):
        for bucket in buckets:
            for part, segments, spans, owner in _owners(bucket):
                own = {
                    called(name): saved[name][part] for name in bucket.names[segments]
                }
                load(owner, own, spans)
            _check_fits(bucket)


def called(name: str) -> str:
    """Return what the state of a tensor is called in errors."""
    return f"the state of {name!r}"


def _check_fits(bucket: Bucket) -> None:
    """Raise ValueError if arrays that were loaded are not for the vector of a bucket."""
    if bucket.tensors and not bucket.feedback.fits(bucket.length, bucket.dtype):
        raise ValueError(
            f"the state of {', '.join(map(repr, bucket.names[:3]))} is not that of a vector of {bucket.dtype}: "
            f"expected {bucket.length} values"
        )


@contextmanager
def restored_on_error(buckets: Sequence[Bucket]) -> Iterator[None]:
    """Restore the states of buckets if the block raises."""
    before = []
    for bucket in buckets:
        before += snapshot([bucket.feedback, *bucket.parts.values()])
        before += bucket.selection.snapshot()
    try:
        yield
    except Exception:
        restore(before)
        raise


def _owners(bucket: Bucket) -> Iterator[tuple[str, slice, list[slice], Configured]]:
    """Yield, for each object with a state, its part, its segments, their slices of its vector, and the object."""

    def spans(edges: Sequence[int]) -> list[slice]:
        return [slice(*pair) for pair in pairwise(edges)] if bucket.tensors else ONE

    for run in bucket.selection.runs:
        segments = slice(run.first, run.end)
        yield COMPRESSOR, segments, spans(run.bounds), run.compressor
    for part, owner in {FEEDBACK: bucket.feedback, **bucket.parts}.items():
        yield part, slice(None), spans(bucket.edges), owner


def _settings(bucket: Bucket, part: str) -> list[Header]:
    """Return the settings of a part of each segment."""
    if part == COMPRESSOR:
        return bucket.selection.settings
    settings = bucket.feedback.get_config() if part == FEEDBACK else {}
    return [settings] * len(bucket.names)
