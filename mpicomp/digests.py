"""Digests of arrays, by which ranks find out whether they have the same bits; no defence against an adversary."""

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

from mpicomp.arrays import Array
from mpicomp.arrays.device import kernels_for, namespace
from mpicomp.arrays.memory import address, contiguous, flat

_WORD = 8  # bytes


def digest(array: Array) -> str:
    """Return dtype, shape and a checksum of the bits of an array as text, the same on host and device, in one read."""
    checksum = kernels_for(array).checksum(_words(array))
    return f"{array.dtype} of shape {array.shape}, checksum {checksum:016x}"


def joint_digest(arrays: Iterable[Array]) -> str:
    """Return a short digest of several arrays and their order."""
    texts = "; ".join(map(digest, arrays))
    return blake2b(texts.encode(), digest_size=8).hexdigest()


def _words(array: Array) -> Array:
    """Return the bits of an array in C order as uint64, a view where possible; zeros fill the last word."""
    xp = namespace(array)
    in_bytes = flat(contiguous(array)).view(np.uint8)
    if in_bytes.size % _WORD or address(in_bytes) % _WORD:
        padded = xp.zeros(-(-in_bytes.size // _WORD) * _WORD, np.uint8)
        padded[: in_bytes.size] = in_bytes
        in_bytes = padded
    words: Array = in_bytes.view(np.uint64)
    return words
