"""One vector of an exchange: its tensors, its compressor and feedback, the downlink of the mean, and their state."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from mpicomp.arrays import Array, kernels_for, like, to_values
from mpicomp.compressors import Compressor
from mpicomp.feedback import Feedback, TwoWay
from mpicomp.settings import OTHER_SETTINGS, check_table, to_table
from mpicomp.tensors import ALONE, Tensor

Snapshot = tuple[Compressor, Any]  # a compressor, and what its `snapshot` returned

_HOLDS = "holds"  # the key under which a state lists its other keys, so that a missing one is noticed
_SETTINGS = "settings"  # the key of the table of the parts, as text
SHARED = "exchange/settings"  # that of what all vectors have in common; no state of a vector has such a key


@dataclass(frozen=True)
class Pipeline:
    """Tensors that form one vector, with their compressor and feedback. name: of the vector in errors and states.

    downlink: compresses the mean; None for none.
    """

    name: str
    tensors: Sequence[Tensor]
    compressor: Compressor
    feedback: Feedback
    downlink: TwoWay | None = None

    @cached_property
    def bounds(self) -> list[int]:
        """Offset of each tensor in the vector, and the vector's length."""
        return [0, *accumulate(tensor.size for tensor in self.tensors)]

    @cached_property
    def compressors(self) -> list[Compressor]:
        """The compressor of the gradient, and that of the mean if there is one."""
        return [self.compressor] + ([] if self.downlink is None else [self.downlink.compressor])

    def flatten(self, arrays: Mapping[str, Any]) -> Array:
        """Return the gradients as one vector; a tensor without an array counts as zero. Several share one buffer."""
        parts = [tensor.flatten(arrays.get(tensor.name)) for tensor in self.tensors]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, out=self._joined)

    def check_finite(self, gradient: Array, kind: type[ValueError]) -> None:
        """Raise an error of this type if the gradient has a NaN or an infinity; one pass over it."""
        with self.named():
            try:
                kernels_for(gradient).raise_not_finite(gradient)
            except ValueError as error:
                raise kind(*error.args) from None

    @contextmanager
    def named(self) -> Iterator[None]:
        """Prefix an error's text with the name of the vector."""
        try:
            yield
        except Exception as error:
            if self.name != ALONE and error.args and isinstance(error.args[0], str):
                error.args = (f"in {self.name}: {error.args[0]}", *error.args[1:])
            raise

    @cached_property
    def _joined(self) -> Array:
        return self.tensors[0].xp.empty(self.bounds[-1], self.tensors[0].dtype)  # type: ignore[no-any-return]

    def ahead(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the points at which to evaluate the next gradient, by name; see `Feedback.ahead`."""
        given = [parameters[tensor.name] for tensor in self.tensors]
        values = [to_values(each) for each in given]
        whole = self.feedback.ahead(np.concatenate([each.reshape(-1) for each in values]))
        rows = zip(self.tensors, np.split(whole, self.bounds[1:-1]), values, given, strict=True)
        return {tensor.name: like(part.reshape(value.shape), original) for tensor, part, value, original in rows}

    def reset(self) -> None:
        """Clear the residuals, and the compressors' information about positions."""
        for part in self._parts.values():
            part.reset()

    def rescale(self, factor: float) -> None:
        """Multiply the residuals in gradient units by `factor`."""
        self.feedback.rescale(factor)
        if self.downlink is not None and self.feedback.sends_gradients:
            self.downlink.rescale(factor)

    def state_dict(self) -> dict[str, Array]:
        """Return copies of the states of all parts as "part.name", a list of these names, and a table of the parts."""
        parts = self._parts.items()
        held = {f"{part}.{name}": array for part, each in parts for name, array in each.state_dict().items()}
        return held | {_HOLDS: np.array(sorted(held), np.str_), _SETTINGS: to_table(self._parts)}

    def load_state_dict(self, state: Mapping[str, Any], *, same_settings: bool = True) -> None:
        """Load copies of a `state_dict`; raises ValueError if it does not fit, or is incomplete.

        same_settings: refuse the state of parts with other settings.
        """
        missing = {_HOLDS, _SETTINGS, *map(str, np.ravel(state.get(_HOLDS, [])))} - state.keys()
        if missing:
            raise ValueError(f"the state has no {sorted(missing)}: expected all that state_dict() returned")
        if same_settings:
            check_table(f"the state of {self.name!r}", state[_SETTINGS], self._parts, OTHER_SETTINGS)
        state = {key: state[key] for key in state if key not in (_HOLDS, _SETTINGS)}
        if {key.partition(".")[0] for key in state} - self._parts.keys():
            raise ValueError(f"the state has {sorted(state)}: expected those of {sorted(self._parts)}")
        for name, part in self._parts.items():
            part.load_state_dict({key.partition(".")[2]: state[key] for key in state if key.partition(".")[0] == name})
        for feedback in (self.feedback, self.downlink) if self.tensors else ():
            length, dtype = self.bounds[-1], self.tensors[0].dtype
            if feedback is not None and not feedback.fits(length, dtype):
                raise ValueError(
                    f"the state of {self.name!r} has {feedback.size} values: expected {length}, of {dtype}"
                )

    @property
    def _parts(self) -> dict[str, Compressor | Feedback]:
        parts: dict[str, Compressor | Feedback] = {"compressor": self.compressor, "feedback": self.feedback}
        if self.downlink is not None:
            parts |= {"downlink": self.downlink, "down": self.downlink.compressor}
        return parts


@contextmanager
def set_back(snapshots: Sequence[Snapshot]) -> Iterator[None]:
    """Set compressors to their snapshots within a block; the last snapshot of a compressor counts."""
    now = [(compressor, compressor.snapshot()) for compressor, _ in snapshots]
    for compressor, snapshot in snapshots:
        compressor.restore(snapshot)
    try:
        yield
    finally:
        for compressor, snapshot in now:
            compressor.restore(snapshot)


@contextmanager
def restored_on_error(pipelines: Sequence[Pipeline]) -> Iterator[None]:
    """Restore the states of pipelines if the block raises."""
    before = [pipeline.state_dict() for pipeline in pipelines]
    try:
        yield
    except Exception:
        for pipeline, state in zip(pipelines, before, strict=True):
            pipeline.load_state_dict(state)
        raise


def whole_state(pipelines: Sequence[Pipeline], settings: Mapping[str, Any]) -> dict[str, Array]:
    """Return copies of the states of pipelines as "pipeline/part.name", with their common settings as a table.

    settings: include "rank" and "ranks".
    """
    states = {f"{each.name}/{name}": array for each in pipelines for name, array in each.state_dict().items()}
    return states | {SHARED: to_table(settings)}


def load_whole_state(
    pipelines: Sequence[Pipeline], state: Mapping[str, Any], settings: Mapping[str, Any], *, same_settings: bool
) -> None:
    """Load copies of a `whole_state`, all or nothing.

    same_settings: also refuse a state with other settings; a state of another rank, or number of ranks, is always
    refused. Raises ValueError that names both settings, and ValueError for a state that does not fit or is incomplete.
    """
    state = dict(state)
    table = state.pop(SHARED, None)
    got, names = {key.rpartition("/")[0] for key in state}, {pipeline.name for pipeline in pipelines}
    if got != names:
        raise ValueError(f"the state is of {sorted(got)}: expected {sorted(names)}; register named tensors first")
    if table is None:
        raise ValueError(f"the state has no {SHARED!r}: expected all that state_dict() returned")
    place = {name: settings[name] for name in ("rank", "ranks")}
    remedy = "each rank loads what it saved; load_state_dicts takes the states of another number of ranks"
    check_table("the state", table, place, remedy)
    if same_settings:
        check_table("the state", table, settings, OTHER_SETTINGS)
    with restored_on_error(pipelines):
        for pipeline in pipelines:
            mine = {key.rpartition("/")[2]: state[key] for key in state if key.rpartition("/")[0] == pipeline.name}
            pipeline.load_state_dict(mine, same_settings=same_settings)
