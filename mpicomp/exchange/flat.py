"""An array, or a list of arrays, as one vector, and the way back."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpicomp.exchange.layout import Array, Destination, described

Back = Callable[[Array], Any]


def flattened(
    gradient: Any, out: Any = None, spare: Array | None = None
) -> tuple[Array | Exception, Array | None, Back]:
    """Return an array, or a list of them, as one contiguous vector, or why that cannot be; and the way back.

    out: where the way back leads, as `gradient`; None for new arrays. Where no new array is asked for, the second that
    comes back is the vector that is to take the mean before it goes that way: the one in `out`, or, for a list, the
    vector of the gradients. spare: such a one of an earlier call, to be written to again.
    """
    try:
        if not isinstance(gradient, list | tuple):
            tensor, values = described("gradient", gradient)
            destination = Destination([tensor], [out])
            flat = tensor.xp.ascontiguousarray(values).reshape(-1)
            return flat, destination.whole, lambda mean: destination.restore(mean)[0]
        if not gradient:
            raise ValueError("got an empty list: expected at least one array")
        members = [described(f"item {place} of the list", array) for place, array in enumerate(gradient)]
        if len({tensor.dtype for tensor, _ in members}) > 1:
            kinds = sorted({str(tensor.dtype) for tensor, _ in members})
            raise TypeError(f"got arrays of {kinds}: expected one dtype in a list")
        if len({id(tensor.xp) for tensor, _ in members}) > 1:
            raise TypeError("got arrays of which some are on a device: expected all there, or all in main memory")
        destination = Destination([tensor for tensor, _ in members], _one_for_each(gradient, out))
        given = all(each is not None for each in destination.outs)
        flat = _joined([values.reshape(-1) for _, values in members], spare if given else None)
        return flat, flat if given else None, destination.restore
    except Exception as error:  # whatever it is: the other ranks have to hear of it
        return error, None, lambda mean: None


def _joined(parts: Sequence[Array], spare: Array | None) -> Array:
    """Return the parts behind each other, in `spare` where they fit it."""
    size, like = sum(part.size for part in parts), parts[0]
    fits = spare is not None and (spare.size, spare.dtype, type(spare)) == (size, like.dtype, type(like))
    return np.concatenate(parts, out=spare if fits else None)


def _one_for_each(gradient: Sequence[Any], out: Any) -> Sequence[Any]:
    if out is None:
        return [None] * len(gradient)
    if not isinstance(out, list | tuple) or len(out) != len(gradient):
        got = f"{len(out)} arrays" if isinstance(out, list | tuple) else type(out).__name__
        raise ValueError(f"out is {got}: expected a list of {len(gradient)} arrays, as the gradients are")
    return out


def sound(flat: Array | Exception) -> Array:
    """Return the vector, or raise why there is none."""
    if isinstance(flat, Exception):
        raise flat
    return flat
