"""What every compressor can do."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import on_device, to_numpy
from mpicomp.vector import SparseVector


class Compressor(Protocol):
    """Pick the entries of a dense vector that travel."""

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the selected entries of `corrected`, the gradient with the residual added.

        gradient: the new gradient alone, for the methods that look at both; an exchange hands what the step added to
        the residual to those that say so (`looks_at_gradient`), in the units of the feedback. An exact zero is not
        selected, unless it is positions that are chosen. Raises ValueError naming the first value that is not finite;
        the compressor is then as it was before.
        """
        ...


def innermost(compressor: Any) -> Any:
    """Return the compressor that selects: what `Quantised` and `WarmUp` are wrapped around.

    It may have two more methods. `observe(aggregate, votes)` takes note of the ranks' sum. `fail(error)` is there where
    `compress` talks to the other ranks: a rank that cannot call it takes part with this instead, which raises `error`.
    What such a `compress` raises, all ranks know of.
    """
    return chain(compressor)[-1]


def failed(part: Callable[[Any, Any], Any], error: Exception, comm: Any) -> Any:
    """Take part in what takes (vector, comm) as a failed rank; return the Request, or raise `error` if it blocks."""
    traceback = error.__traceback__
    try:
        return part(error, comm)
    except Exception as raised:
        if raised is not error:
            raise
    try:
        raise error.with_traceback(traceback)
    finally:  # else the error, its traceback and this frame hold each other
        del error, traceback


def chain(compressor: Any) -> list[Any]:
    """Return a compressor and those it is wrapped around, the innermost one last."""
    parts = [compressor]
    while hasattr(parts[-1], "compressor"):
        parts.append(parts[-1].compressor)
    return parts


def state_dict(compressor: Any) -> dict[str, NDArray[Any]]:
    """Return copies of what a compressor, and those inside of it, remember from step to step: arrays by name.

    A class says which of its attributes those are in `remembers`; None is left out. Settings are not among them.
    """
    return {
        f"{depth}.{name}": np.array(to_numpy(getattr(part, name)))
        for depth, part in enumerate(chain(compressor))
        for name in getattr(part, "remembers", ())
        if getattr(part, name) is not None
    }


def load_state_dict(compressor: Any, state: Mapping[str, Any]) -> None:
    """Take up what `state_dict` returned of a compressor with these settings; ValueError for that of another one."""
    parts = chain(compressor)
    known = {
        f"{depth}.{name}": (part, name) for depth, part in enumerate(parts) for name in getattr(part, "remembers", ())
    }
    if not state.keys() <= known.keys():
        raise ValueError(f"the state has {sorted(state)}: expected {sorted(known)} at most, of {compressor!r}")
    for key, (part, name) in known.items():
        held = getattr(part, name)
        optional = held is None or isinstance(held, np.ndarray) or on_device(held)
        if not optional and (key not in state or np.ndim(state[key]) != np.ndim(held)):
            raise ValueError(f"the state has {state.get(key, 'nothing')!r} as {key}: expected one such as {held!r}")
    for key, (part, name) in known.items():
        value = np.array(state[key]) if key in state else None
        plain = value is not None and (value.ndim == 0 or isinstance(getattr(part, name), list))
        setattr(part, name, value.tolist() if value is not None and plain else value)
