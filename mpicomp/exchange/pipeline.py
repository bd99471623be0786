"""One vector's way on this rank: correct, compress, and once the ranks' sum is there, keep and put back.

Invariant: what the feedback holds changes in `commit` alone, and `roll_back` gives the compressor back what it held
before `send`. So a step that fails anywhere, on any rank, leaves all of them as they were.
"""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.compressors.protocol import Compressor, chain, innermost, load_state_dict, state_dict
from mpicomp.feedback import Feedback
from mpicomp.vector import SparseVector

Array = NDArray[Any]

HOLDS = "holds"  # in a state: the names of what else is in it, so that what is lost is missed


class Pipeline:
    """A compressor and a feedback that serve one vector, and, with two-way compression, the server's."""

    def __init__(self, compressor: Compressor, feedback: Feedback, downlink: Any = None) -> None:
        self.compressor, self.feedback, self.downlink = compressor, feedback, downlink
        self._writes = "out" in signature(feedback.result).parameters
        self._held: list[tuple[dict[str, Any], dict[str, Any]]] = []

    @property
    def talks(self) -> bool:
        """Whether compressing means talking to the other ranks, who then know of an error."""
        return hasattr(innermost(self.compressor), "fail")

    @property
    def observes(self) -> bool:
        """Whether the compressor looks at the ranks' sum, and may ask for votes."""
        return hasattr(innermost(self.compressor), "observe")

    def send(self, flat: Array | Exception) -> SparseVector:
        """Return what travels of a gradient (1-d); an exception in its place is raised, and told where ranks talk."""
        parts = [*chain(self.compressor), *chain(self.downlink)[1:]]
        self._held = [(vars(part), dict(vars(part))) for part in parts if hasattr(part, "__dict__")]
        try:
            if isinstance(flat, Exception):
                raise flat
            self._corrected = self.feedback.correct(flat)
        except Exception as error:
            del flat  # it may be the error: then that, its traceback and this frame would hold each other
            if self.talks:
                innermost(self.compressor).fail(error)
            raise
        self._sent = self.compressor.compress(self._corrected, gradient=self._added(flat))
        return self._sent

    def _added(self, flat: Array) -> Array:
        """Return the new gradient, in the units of what is compressed: learning rate and momentum may be in those."""
        if not getattr(innermost(self.compressor), "looks_at_gradient", False):
            return flat
        kept = getattr(self.feedback, "residual", None)
        return self._corrected if kept is None else self._corrected - kept

    def receive(self, mean: SparseVector, rejected: SparseVector | None, votes: Array | None) -> None:
        """Take the ranks' mean (or sum), what came back of what was sent, and each entry's share of the votes."""
        if self.observes:
            innermost(self.compressor).observe(mean, votes)
        self._arrived = mean
        self._mean = mean if self.downlink is None else self.downlink.compress(mean)
        self._rejected = rejected

    def commit(self, out: Array | None = None) -> Array:
        """Keep what did not travel, and return what the caller gets, 1-d; in `out` where it is given."""
        self.feedback.keep(self._corrected, self._sent, self._rejected)
        if self.downlink is not None:
            self.downlink.keep()
        if out is not None and self._writes:
            result = self.feedback.result(self._mean, out)
        else:  # whoever has the array copies it there
            result = self.feedback.result(self._mean)
        self.forget()
        return result

    def reset(self) -> None:
        """Forget what is owed, and what a compressor took note of position by position."""
        for part in (self.feedback, self.downlink, *chain(self.compressor)):
            if hasattr(part, "reset"):
                part.reset()

    def roll_back(self) -> None:
        """Be as before `send`."""
        for state, before in self._held:
            state.clear()
            state.update(before)
        self.forget()

    def forget(self) -> None:
        """Hold no array of the step."""
        self._corrected = self._sent = self._arrived = None  # type: ignore[assignment]
        self._mean = self._rejected = None
        self._held = []

    def state_dict(self) -> dict[str, Array]:
        """Return copies of all that outlives a step, by the part that holds it; `holds` has the names of them."""
        states = {"compressor": state_dict(self.compressor), "feedback": self.feedback.state_dict()}
        if self.downlink is not None:
            states |= {"downlink": self.downlink.state_dict(), "down": state_dict(self.downlink.compressor)}
        held = {f"{part}.{name}": array for part, state in states.items() for name, array in state.items()}
        return held | {HOLDS: np.array(sorted(held), np.str_)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned; ValueError when it does not fit, or some of it is missing."""
        named, state = state.get(HOLDS), {key: state[key] for key in state if key != HOLDS}
        missing = {HOLDS} if named is None else {str(name) for name in np.ravel(named)} - state.keys()
        if missing:
            raise ValueError(f"the state has no {sorted(missing)}: expected all that state_dict() returned")
        loaders: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "compressor": partial(load_state_dict, self.compressor),
            "feedback": self.feedback.load_state_dict,
        }
        if self.downlink is not None:
            loaders |= {
                "downlink": self.downlink.load_state_dict,
                "down": partial(load_state_dict, self.downlink.compressor),
            }
        if {key.partition(".")[0] for key in state} - loaders.keys():
            raise ValueError(f"the state has {sorted(state)}: expected those of {sorted(loaders)}")
        for part, load in loaders.items():
            load({key.partition(".")[2]: state[key] for key in state if key.partition(".")[0] == part})
