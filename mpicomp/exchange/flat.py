"""An array, or a list of arrays, as one vector, and the way back."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpicomp.exchange.layout import Array, Tensor, described, divided


def flattened(gradient: Any) -> tuple[Array | Exception, Callable[[Array], Any]]:
    """Return an array, or a list of them, as one contiguous vector, or why that cannot be; and the way back."""
    try:
        if not isinstance(gradient, list | tuple):
            tensor, values = described("gradient", gradient)
            return tensor.xp.ascontiguousarray(values).reshape(-1), tensor.restore
        if not gradient:
            raise ValueError("got an empty list: expected at least one array")
        members = [described(f"item {place} of the list", array) for place, array in enumerate(gradient)]
        if len({tensor.dtype for tensor, _ in members}) > 1:
            kinds = sorted({str(tensor.dtype) for tensor, _ in members})
            raise TypeError(f"got arrays of {kinds}: expected one dtype in a list")
        if len({id(tensor.xp) for tensor, _ in members}) > 1:
            raise TypeError("got arrays of which some are on a device: expected all there, or all in main memory")
        flat = np.concatenate([values.reshape(-1) for _, values in members])
        return flat, partial(_parted, [tensor for tensor, _ in members])
    except Exception as error:  # whatever it is: the other ranks have to hear of it
        return error, lambda flat: None


def _parted(tensors: Sequence[Tensor], flat: Array) -> list[Any]:
    parts = divided(flat, [tensor.size for tensor in tensors])
    return [tensor.restore(part) for tensor, part in zip(tensors, parts, strict=True)]


def sound(flat: Array | Exception) -> Array:
    """Return the vector, or raise why there is none."""
    if isinstance(flat, Exception):
        raise flat
    return flat
