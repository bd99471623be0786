"""The device's memory: an arena that this package reads and writes, and its double that nobody may touch."""

import ctypes
import mmap
import os
from collections import defaultdict

import numpy as np

SIZE = 1 << 34  # reserved, not used: pages come with the first touch
GRAIN = 512  # bytes: what cudaMalloc aligns to
POISON = 0xA5

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_PROT_NONE, _NORESERVE = 0, 0x4000


def _reserve(protection: int) -> int:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    address = _libc.mmap(None, SIZE, protection, flags, -1, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise MemoryError("no room for the fake device's memory")
    return int(address)


class Arena:
    """Blocks of memory, in sizes of powers of two, that are handed out again once they are free."""

    def __init__(self) -> None:
        self.base = _reserve(mmap.PROT_READ | mmap.PROT_WRITE)
        self.shown = (
            self.base
            if os.environ.get("MPICOMP_FAKE_VISIBLE") == "1"
            else _reserve(_PROT_NONE)
        )
        self._next = 0
        self._free: dict[int, list[int]] = defaultdict(list)
        self._sizes: dict[int, int] = {}  # of blocks that are in use, by their offsets

    def allocate(self, nbytes: int) -> "Memory":
        size = max(GRAIN, 1 << max(0, nbytes - 1).bit_length())
        if self._free[size]:
            offset = self._free[size].pop()
        else:
            offset, self._next = self._next, self._next + size
            if self._next > SIZE:
                raise MemoryError("the fake device is full")
        self._poison(offset, min(size, max(nbytes, 1)))
        self._sizes[offset] = nbytes
        return Memory(self, offset, nbytes, size)

    def _poison(self, offset: int, nbytes: int) -> None:
        ctypes.memset(self.base + offset, POISON, nbytes)

    def release(self, offset: int, size: int, nbytes: int) -> None:
        self._poison(offset, nbytes)
        del self._sizes[offset]
        self._free[size].append(offset)

    def has(self, pointer: int) -> bool:
        """Return whether a number is an address that the device gives away."""
        return self.shown <= pointer < self.shown + SIZE

    def bytes_at(self, pointer: int) -> int:
        """Return the bytes of the block that begins at an address; 0 if none does."""
        return self._sizes.get(pointer - self.shown, 0)

    def hidden(self, pointer: int) -> int:
        """Return where the memory behind a device's pointer really is."""
        assert self.shown <= pointer <= self.shown + SIZE, (
            f"{pointer:#x} is no pointer of the fake device"
        )
        return pointer - self.shown + self.base

    def shown_at(self, address: int) -> int:
        return address - self.base + self.shown


class Memory:
    """One block; arrays on it keep it alive."""

    def __init__(self, arena: Arena, offset: int, nbytes: int, room: int) -> None:
        self.arena, self.offset, self.size, self._room = arena, offset, nbytes, room

    def __del__(self) -> None:
        self.arena.release(self.offset, self._room, self.size)

    def bytes(self) -> np.ndarray:
        """Return the block as a NumPy array that keeps it alive."""
        buffer = (ctypes.c_uint8 * max(self.size, 1)).from_address(
            self.arena.base + self.offset
        )
        buffer.keeps = self  # type: ignore[attr-defined]
        return np.frombuffer(buffer, np.uint8)[: self.size]


arena = Arena()
