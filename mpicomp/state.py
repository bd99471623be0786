"""The states of several parts in one dict of arrays, which np.savez can store, and back."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

HOLDS = "holds"  # the names of what else is in a state, so that a missing one is noticed


class Stateful(Protocol):
    """What has a state: compressors and feedbacks."""

    def reset(self) -> None:
        """Forget what is kept."""
        ...

    def state_dict(self) -> dict[str, Array]:
        """Return copies of what is kept, by name."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned; ValueError where it does not fit."""
        ...


def gather_states(parts: Mapping[str, Stateful]) -> dict[str, Array]:
    """Return the states of parts as "part.name", with the list of all names as `holds`."""
    held = {f"{part}.{name}": array for part, state in parts.items() for name, array in state.state_dict().items()}
    return held | {HOLDS: np.array(sorted(held), np.str_)}


def load_states(parts: Mapping[str, Stateful], state: Mapping[str, Any]) -> None:
    """Load what `gather_states` returned; ValueError when something is missing, of another part, or does not fit."""
    named, state = state.get(HOLDS), {key: state[key] for key in state if key != HOLDS}
    missing = {HOLDS} if named is None else {str(name) for name in np.ravel(named)} - state.keys()
    if missing:
        raise ValueError(f"the state has no {sorted(missing)}: expected all that state_dict() returned")
    if {key.partition(".")[0] for key in state} - parts.keys():
        raise ValueError(f"the state has {sorted(state)}: expected those of {sorted(parts)}")
    for name, part in parts.items():
        part.load_state_dict({key.partition(".")[2]: state[key] for key in state if key.partition(".")[0] == name})


@contextmanager
def restored_on_error(parts: Sequence[Stateful]) -> Iterator[None]:
    """Load the states that parts have now once more where the block raises."""
    before = [part.state_dict() for part in parts]
    try:
        yield
    except Exception:
        for part, state in zip(parts, before, strict=True):
            part.load_state_dict(state)
        raise
