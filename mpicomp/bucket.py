"""A bucket: the tensors that are one vector of an exchange, with its compressors, its feedback and their state.

The vector has the tensors one after the other. A named tensor is a segment of its own: its entries compete with each
other only. The arrays of a list, or one array, are one segment. A state is by segment, so it fits other buckets.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from mpicomp.arrays import Array, adjacent, kernels_for, like, to_values
from mpicomp.bases import Basis
from mpicomp.compressors import Compressor
from mpicomp.compressors.segments import Segments
from mpicomp.feedback import Feedback
from mpicomp.settings import OTHER_SETTINGS, check_table, to_table
from mpicomp.tensors import ALONE, Tensor

Gradient = Array | list[Array]  # a vector, or its parts, one for each tensor

_HOLDS = "holds"  # the key under which a state lists its other keys, so that a missing one is noticed
_SETTINGS = "settings"  # the key of the table of the parts, as text
SHARED = "exchange/settings"  # that of what all vectors have in common; no state of a segment has such a key


class Bucket:
    """Tensors that are one vector: constant, but for the state that outlives a step.

    names: of the segments: [ALONE] for one, else those of the tensors. compressors: one for each segment. dense: the
    vector is sent as an array. basis: in which each segment is compressed, and its residual kept; None for the values
    themselves.
    """

    def __init__(
        self,
        names: Sequence[str],
        tensors: Sequence[Tensor],
        compressors: Sequence[Compressor],
        feedback: Feedback,
        *,
        dense: bool = False,
        basis: Basis | None = None,
    ) -> None:
        self.names, self.tensors, self.feedback, self.dense = names, tensors, feedback, dense
        self.basis = basis
        self.bounds = [0, *accumulate(tensor.size for tensor in tensors)]
        self.edges = self.bounds if list(names) != [ALONE] else [0, self.bounds[-1]]
        shown = [None] if list(names) == [ALONE] else names
        self.compressor = Segments(shown, self.edges, compressors)
        self.feedback.bounds = self.edges
        self.names_of_tensors = [tensor.name for tensor in tensors]
        self._buffer: Array | None = None  # for gradients that have to be joined

    @property
    def length(self) -> int:
        """Number of values."""
        return self.bounds[-1]

    def take(self, arrays: Mapping[str, Any]) -> Gradient:
        """Return the gradients, by tensor name, as one vector or its parts; a tensor without an array counts as zero.

        Arrays that lie one after the other in memory are one vector, without a copy; others stay parts if the feedback
        can read these, and are joined in a buffer if not. Raises TypeError or ValueError for a bad gradient.
        """
        parts = [tensor.flatten(arrays.get(tensor.name)) for tensor in self.tensors]
        if (whole := adjacent(parts)) is not None:
            return whole
        if self.feedback.takes_parts and not self.compressor.needs_gradient:
            return parts
        if self._buffer is None:
            self._buffer = self.tensors[0].xp.empty(self.length, self.tensors[0].dtype)
        return np.concatenate(parts, out=self._buffer)

    def forward(self, gradient: Gradient) -> Array:
        """Return the coefficients of a gradient in the basis, segment by segment, in a buffer of the bucket."""
        if self._buffer is None:
            self._buffer = self.tensors[0].xp.empty(self.length, self.tensors[0].dtype)
        if isinstance(gradient, list):
            gradient = np.concatenate(gradient, out=self._buffer)
        for first, end in pairwise(self._cuts):
            self.basis.forward(gradient[first:end], self._buffer[first:end])  # type: ignore[union-attr]
        return self._buffer

    def inverse(self, coefficients: Array) -> Array:
        """Turn the coefficients of a mean into its values, in place, and return these."""
        for first, end in pairwise(self._cuts):
            part = coefficients[first:end]
            self.basis.inverse(part, part)  # type: ignore[union-attr]
        return coefficients

    @property
    def _cuts(self) -> list[int]:
        """The bounds of runs of segments that one call transforms: all of a run but the last have whole chunks."""
        chunk = self.basis.chunk  # type: ignore[union-attr]
        cuts = [0]
        for first, end in pairwise(self.edges):
            if (end - first) % chunk or end == self.length:
                cuts.append(end)
        return cuts

    def check_vector(self, vector: Array) -> None:
        """Raise ValueError that names the segment if a value of a vector is not finite."""
        try:
            kernels_for(vector).raise_not_finite(vector)
        except ValueError:
            self.compressor.raise_not_finite(0, len(self.names), vector)
            raise

    def check_finite(self, arrays: Mapping[str, Any], kind: type[ValueError]) -> None:
        """Raise an error of this type if a gradient has a NaN or an infinity; one pass over them."""
        for tensor in self.tensors:
            if (array := arrays.get(tensor.name)) is not None:
                flat = tensor.flatten(array)
                try:
                    kernels_for(flat).raise_not_finite(flat)
                except ValueError as error:
                    where = "" if tensor.name == ALONE else f"in {tensor.name}: "
                    raise kind(f"{where}{error}") from None

    def ahead(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the points at which to evaluate the next gradient, by name; see `Feedback.ahead`."""
        given = [parameters[tensor.name] for tensor in self.tensors]
        values = [to_values(each) for each in given]
        whole = self.feedback.ahead(np.concatenate([each.reshape(-1) for each in values]))
        rows = zip(self.tensors, np.split(whole, self.bounds[1:-1]), values, given, strict=True)
        return {tensor.name: like(part.reshape(value.shape), original) for tensor, part, value, original in rows}

    def reset(self) -> None:
        """Clear the residuals, and the compressors' information about positions."""
        self.compressor.reset()
        self.feedback.reset()

    def rescale(self, factor: float) -> None:
        """Multiply the residuals in gradient units by `factor`."""
        self.feedback.rescale(factor)

    def snapshot(self) -> list[tuple[Compressor, dict[str, Any]]]:
        """Return the attributes of all compressors; `Compressor.restore` sets them again."""
        return self.compressor.snapshot()

    def state_dict(self) -> dict[str, Array]:
        """Return copies of the states as "segment/part.name", for each segment with a list of these, and its parts."""
        state: dict[str, Array] = {}
        kept = self.feedback.state_dict()
        for place, name in enumerate(self.names):
            held = {f"compressor.{key}": array for key, array in self._compressor(name).state_dict().items()}
            held |= {f"feedback.{key}": self._of_segment(place, array) for key, array in kept.items()}
            held |= {_HOLDS: np.array(sorted(held), np.str_), _SETTINGS: to_table(self._parts(name))}
            state |= {f"{name}/{key}": array for key, array in held.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, same_settings: bool = True) -> None:
        """Load copies of a `state_dict`, which may be of segments in other buckets.

        same_settings: refuse the state of parts with other settings. Raises ValueError if it does not fit, or is
        incomplete.
        """
        kept: list[dict[str, Any]] = []
        for name in self.names:
            mine = {key.rpartition("/")[2]: state[key] for key in state if key.rpartition("/")[0] == name}
            by_part = self._checked_parts(name, mine, same_settings=same_settings)
            self._compressor(name).load_state_dict(by_part["compressor"])
            kept.append(by_part["feedback"])
        self.feedback.load_state_dict(self._joined(kept))
        dtype = self.tensors[0].dtype if self.tensors else None
        if dtype is not None and not self.feedback.fits(self.length, dtype):
            raise ValueError(
                f"the state of {', '.join(map(repr, self.names[:3]))} has {self.feedback.size} values: expected "
                f"{self.length}, of {dtype}"
            )

    def _checked_parts(self, name: str, mine: dict[str, Any], *, same_settings: bool) -> dict[str, dict[str, Any]]:
        """Return the state of a segment by part; raises ValueError if it is incomplete, or of other parts."""
        missing = {_HOLDS, _SETTINGS, *map(str, np.ravel(mine.get(_HOLDS, [])))} - mine.keys()
        if missing:
            raise ValueError(f"the state has no {sorted(missing)}: expected all that state_dict() returned")
        parts = self._parts(name)
        if same_settings:
            check_table(f"the state of {name!r}", mine[_SETTINGS], parts, OTHER_SETTINGS)
        mine = {key: array for key, array in mine.items() if key not in (_HOLDS, _SETTINGS)}
        if {key.partition(".")[0] for key in mine} - parts.keys():
            raise ValueError(f"the state has {sorted(mine)}: expected those of {sorted(parts)}")
        by_part: dict[str, dict[str, Any]] = {part: {} for part in parts}
        for key, array in mine.items():
            by_part[key.partition(".")[0]][key.partition(".")[2]] = array
        return by_part

    def _joined(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the state of a feedback from those of its segments; raises ValueError if they do not fit together."""
        if not self.tensors:
            return dict(states[0])
        for name, (first, end), state in zip(self.names, pairwise(self.edges), states, strict=True):
            for size in {np.shape(array)[0] for array in state.values() if np.ndim(array)} - {end - first}:
                dtype = self.tensors[0].dtype
                raise ValueError(f"the state of {name!r} has {size} values: expected {end - first}, of {dtype}")
        joined: dict[str, Any] = {}
        for key in dict.fromkeys(key for state in states for key in state):
            arrays = [np.asarray(state[key]) for state in states if key in state]
            same = len(arrays) == len(states) and len({(each.dtype, each.ndim) for each in arrays}) == 1
            if not same or (not arrays[0].ndim and len({each.item() for each in arrays}) > 1):
                raise ValueError(f"the states of {list(self.names)} have different {key}: expected one step for all")
            joined[key] = np.concatenate(arrays) if arrays[0].ndim else arrays[0]
        return joined

    def _of_segment(self, place: int, array: Array) -> Array:
        """Return the part of a saved array that belongs to a segment; numbers as they are."""
        return array[self.edges[place] : self.edges[place + 1]] if array.ndim and self.tensors else array

    def _compressor(self, name: str) -> Compressor:
        """Return the compressor of a segment."""
        return self.compressor.compressors[None if name == ALONE and len(self.names) == 1 else name]

    def _parts(self, name: str) -> dict[str, Any]:
        return {"feedback": self.feedback, "compressor": self._compressor(name)}


@contextmanager
def set_back(snapshots: Sequence[tuple[Compressor, dict[str, Any]]]) -> Iterator[None]:
    """Set compressors to their snapshots within a block; the last snapshot of a compressor counts."""
    now = [(compressor, dict(vars(compressor))) for compressor, _ in snapshots]
    restore(snapshots)
    try:
        yield
    finally:
        restore(now)


def restore(snapshots: Sequence[tuple[Compressor, dict[str, Any]]]) -> None:
    """Set the attributes of compressors to those of snapshots, in order."""
    for compressor, before in snapshots:
        vars(compressor).clear()
        vars(compressor).update(before)


@contextmanager
def restored_on_error(buckets: Sequence[Bucket]) -> Iterator[None]:
    """Restore the states of buckets if the block raises."""
    before = [bucket.state_dict() for bucket in buckets]
    try:
        yield
    except Exception:
        for bucket, state in zip(buckets, before, strict=True):
            bucket.load_state_dict(state)
        raise


def whole_state(buckets: Sequence[Bucket], settings: Mapping[str, Any]) -> dict[str, Array]:
    """Return copies of the states of buckets as "segment/part.name", with their common settings as a table.

    settings: include "rank" and "ranks".
    """
    return {key: array for each in buckets for key, array in each.state_dict().items()} | {SHARED: to_table(settings)}


def load_whole_state(
    buckets: Sequence[Bucket], state: Mapping[str, Any], settings: Mapping[str, Any], *, same_settings: bool
) -> None:
    """Load copies of a `whole_state`, all or nothing.

    same_settings: also refuse a state with other settings; a state of another rank, or number of ranks, is always
    refused. Raises ValueError that names both settings, and ValueError for a state that does not fit or is incomplete.
    """
    state = dict(state)
    table = state.pop(SHARED, None)
    got, names = {key.rpartition("/")[0] for key in state}, {name for bucket in buckets for name in bucket.names}
    if got != names:
        raise ValueError(f"the state is of {sorted(got)}: expected {sorted(names)}; register named tensors first")
    if table is None:
        raise ValueError(f"the state has no {SHARED!r}: expected all that state_dict() returned")
    place = {name: settings[name] for name in ("rank", "ranks")}
    remedy = "each rank loads what it saved; load_state_dicts takes the states of another number of ranks"
    check_table("the state", table, place, remedy)
    with restored_on_error(buckets):
        for bucket in buckets:  # first, so that another compressor is named
            bucket.load_state_dict(state, same_settings=same_settings)
        if same_settings:
            check_table("the state", table, settings, OTHER_SETTINGS)
