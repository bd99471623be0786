"""What is constant of one vector: its tensors, its compressor and feedback, and, with a downlink, the mean's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import like, to_values
from mpicomp.compressors import Compressor
from mpicomp.feedback import Feedback, TwoWay
from mpicomp.state import Stateful, gather_states, load_states
from mpicomp.tensors import Tensor

Array = NDArray[Any]


@dataclass(frozen=True)
class Pipeline:
    """Tensors that are one vector, and what serves it. name: what the vector is called in errors and saved states."""

    name: str
    tensors: Sequence[Tensor]
    compressor: Compressor
    feedback: Feedback
    downlink: TwoWay | None = None

    @cached_property
    def bounds(self) -> list[int]:
        """Where each tensor begins in the vector, and the vector's length."""
        return [0, *accumulate(tensor.size for tensor in self.tensors)]

    @cached_property
    def compressors(self) -> list[Compressor]:
        """The compressor of the gradient, and that of the mean where there is one."""
        return [self.compressor] + ([] if self.downlink is None else [self.downlink.compressor])

    def flatten(self, arrays: Mapping[str, Any]) -> Array:
        """Return the gradients as one vector; a tensor without an array counts as zero. Several share one buffer."""
        parts = [tensor.flatten(arrays.get(tensor.name)) for tensor in self.tensors]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, out=self._joined)

    @cached_property
    def _joined(self) -> Array:
        return self.tensors[0].xp.empty(self.bounds[-1], self.tensors[0].dtype)  # type: ignore[no-any-return]

    def ahead(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return where to evaluate the next gradient, for the parameters of this vector, by name; see `Feedback`."""
        given = [parameters[tensor.name] for tensor in self.tensors]
        values = [to_values(each) for each in given]
        whole = self.feedback.ahead(np.concatenate([each.reshape(-1) for each in values]))
        rows = zip(self.tensors, np.split(whole, self.bounds[1:-1]), values, given, strict=True)
        return {tensor.name: like(part.reshape(value.shape), original) for tensor, part, value, original in rows}

    def reset(self) -> None:
        """Forget the residual, and what a compressor remembers of positions."""
        for part in self._parts.values():
            part.reset()

    def rescale(self, factor: float) -> None:
        """Multiply what is kept in gradient units by `factor`."""
        self.feedback.rescale(factor)
        if self.downlink is not None and self.feedback.sends_gradients:
            self.downlink.rescale(factor)

    def state_dict(self) -> dict[str, Array]:
        """Return copies of all that outlives a step, by the part that holds it."""
        return gather_states(self._parts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned; ValueError when it does not fit, or some of it is missing."""
        load_states(self._parts, state)
        for part in (self.feedback, self.downlink) if self.tensors else ():
            length, dtype = self.bounds[-1], self.tensors[0].dtype
            if part is not None and not part.fits(length, dtype):
                raise ValueError(f"the state of {self.name!r} has {part.size} numbers: expected {length}, of {dtype}")

    @property
    def _parts(self) -> dict[str, Stateful]:
        parts: dict[str, Stateful] = {"compressor": self.compressor, "feedback": self.feedback}
        if self.downlink is not None:
            parts |= {"downlink": self.downlink, "down": self.downlink.compressor}
        return parts
