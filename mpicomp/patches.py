"""What changed between two versions of weights, bit for bit, as one message of about a byte a change.

Codes and their sources: `mpicomp.kernels.host.patches`.

A message has a header with a digest of all behind it, a table as JSON, by zlib, and the
changes. The table has each array before and after, by name: as its dtype, its shape and
a digest of its bits. Of arrays with the same bits before and the same bits after, such
as tied weights, the first one alone is coded.
"""

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpicomp.arrays import Array, Buffer
from mpicomp.arrays.device import kernels_for, on_device, to_numpy
from mpicomp.arrays.frameworks import memory, writable_memory
from mpicomp.arrays.memory import (
    address,
    check_apart,
    contiguous,
    read_fields,
    write_fields,
)
from mpicomp.errors import CodecError, prefix

_DIGEST = struct.Struct("<Q")  # of what follows
# Digest, magic number, version of the format, and bytes of the table.
_HEADER = struct.Struct("<Q2sHI")
_FORMAT = b"MP", 1
_DIGITS = 16  # of the digest of an array

Weights = dict[str, Array]


@dataclass(frozen=True, eq=False)
class Patch:
    """What changed between two versions of weights, as `changes` returns it.

    Args:
        message: all of it, as bytes (1-d uint8, in host memory).

    >>> before = np.array([1.0, -2.0, 3.0], np.float32)
    >>> patch = changes(before, np.nextafter(before, 0, dtype=np.float32))
    >>> Patch.from_bytes(bytes(patch)).apply(before)
    >>> before.tolist()
    [0.9999999403953552, -1.9999998807907104, 2.999999761581421]
    """

    message: Buffer

    @classmethod
    def from_bytes(cls, data: Any) -> "Patch":
        """Return the patch with these bytes.

        Args:
            data: what ``bytes(patch)`` returned, or another buffer that has it.

        Raises:
            CodecError: if they are cut, changed, or of another format.
        """
        message = np.frombuffer(data, np.uint8).copy()
        if message.size < _HEADER.size or message.size % 8:
            raise CodecError(f"got {message.size} bytes: expected a whole patch")
        digest, *form, _ = read_fields(message, _HEADER)
        if (digest, *form) != (_digest(message), *_FORMAT):
            raise CodecError(f"got changed bytes, or format {form}: expected {_FORMAT}")
        return cls(message)

    def __bytes__(self) -> bytes:
        return self.message.tobytes()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.message.size

    def apply(self, arrays: Any) -> None:
        """Apply the changes in place, to all of the weights or to none.

        Args:
            arrays: one array, or arrays by name, with the names, dtypes, shapes and bits
                that `changes` got as `before`. Of NumPy, CuPy, PyTorch, or what supports
                DLPack; tied weights may share memory. Arrays on a device are copied to
                host memory, changed there, and copied back.

        Raises:
            ValueError: if they are of another version, or have other names, dtypes or
                shapes; for read-only arrays, as JAX's are, and those that overlap.
            TypeError: for what is not an array of these dtypes.
        """
        self.writer(arrays)()

    def writer(self, arrays: Any) -> Callable[[], None]:
        """Return a function that applies the changes, once, and cannot fail; arguments and errors as of `apply`."""
        *_, nbytes = read_fields(self.message, _HEADER)
        text, coded = np.split(self.message[_HEADER.size :], [nbytes])
        before, after = json.loads(zlib.decompress(text.data))
        firsts = _firsts(before, after)
        targets = _by_name(arrays, writable_memory)
        hosts = _by_name(targets, _on_host)
        _check(_described(hosts), before)
        places = {(firsts[name], address(targets[name])): name for name in targets}
        check_apart([targets[name] for name in places.values()])
        distinct = [hosts[name] for name in dict.fromkeys(firsts.values())]
        write_changes = kernels_for(coded).change_writer(coded, distinct)

        def write() -> None:
            write_changes()
            for name, target in targets.items():
                changed = hosts[firsts[name]]
                if on_device(target):
                    target.set(changed)  # type: ignore[attr-defined]
                elif changed is not target:
                    target[...] = changed

        return write


def changes(before: Any, after: Any) -> Patch:
    """Return what changed between two versions of weights, exactly, whatever the bits.

    Args:
        before: one array, or arrays by name: float32, float16 or bfloat16, of any
            shape, of NumPy, CuPy, PyTorch, JAX, or what supports DLPack. Arrays on a
            device are copied to host memory.
        after: as `before`, with the same names, dtypes and shapes.

    Raises:
        ValueError: if names, dtypes or shapes differ.
        TypeError: for what is not an array of these dtypes.

    >>> before = {"weight": np.ones(1000, np.float16)}
    >>> after = {"weight": before["weight"].copy()}
    >>> after["weight"][10] = -0.0
    >>> changes(before, after).apply(before)
    >>> before["weight"][9:12].tolist()
    [1.0, -0.0, 1.0]
    """
    old = _by_name(_by_name(before, memory), _on_host)
    new = _by_name(_by_name(after, memory), _on_host)
    table = _described(old), _described(new)
    _check(table[1], table[0], _DIGITS + 1)
    distinct = dict.fromkeys(_firsts(*table).values())
    versions = [[weights[name] for name in distinct] for weights in (old, new)]
    coded = kernels_for(np.empty(0)).encode_changes(*versions)
    text = zlib.compress(json.dumps(table).encode())
    text += bytes(-len(text) % 8)
    start = _HEADER.pack(0, *_FORMAT, len(text)) + text
    message = np.concatenate([np.frombuffer(start, np.uint8), coded.view(np.uint8)])
    write_fields(message, _DIGEST, _digest(message))
    return Patch(message)


def _by_name(arrays: Any, read: Callable[[Any], Array]) -> Weights:
    """Return what `read` returns of each array, in the order of their names; a single array has the name ""."""
    if not isinstance(arrays, Mapping):
        arrays = {"": arrays}
    found = {}
    for name in sorted(arrays):
        try:
            found[str(name)] = read(arrays[name])
        except (TypeError, ValueError) as error:
            prefix(error, f"the array {name!r}: ")
            raise
    return found


def _on_host(array: Array) -> Array:
    if array.dtype == np.float64:
        raise TypeError("got float64: expected float32, float16 or bfloat16")
    return contiguous(to_numpy(array))


def _described(weights: Weights) -> dict[str, str]:
    """Return a digest, the dtype (bfloat16 as uint16) and the shape of each array, as text."""
    return {
        name: f"{kernels_for(each).digest(each):0{_DIGITS}x} {each.dtype} {each.shape}"
        for name, each in weights.items()
    }


def _check(got: dict[str, str], expected: dict[str, str], first: int = 0) -> None:
    """Raise ValueError that names the first array whose text differs from the character `first` on."""
    for name in expected | got:
        own = got.get(name, "")[first:]
        other = expected.get(name, "")[first:]
        if own != other:
            raise ValueError(
                f"the array {name!r} is {own or 'missing'}: expected {other or 'none'}, which the patch is for"
            )


def _firsts(before: dict[str, str], after: dict[str, str]) -> dict[str, str]:
    """Return for each array the name of the first one with the same changes."""
    known: dict[tuple[str, str], str] = {}
    return {
        name: known.setdefault((before[name], after[name]), name) for name in before
    }


def _digest(message: Buffer) -> int:
    """Return the digest of a message without its first field, which stores the digest."""
    rest = message[_DIGEST.size :]
    return kernels_for(rest).digest(rest)  # type: ignore[no-any-return]
