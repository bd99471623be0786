"""Streams, events and pinned memory; see the package."""

import ctypes
import weakref
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from cupy._memory import POISON


class Stream:
    """Work that takes place when somebody waits for it; `busy` as long as some may be under way."""

    def __init__(self, non_blocking: bool = False) -> None:
        self._queue: list[Callable[[], None]] = []
        self.busy = False
        self.ptr = 0

    def submit(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        self.busy = True

    def flush(self) -> None:
        """Do what waits, in order: what the device itself does next comes after it."""
        while self._queue:
            self._queue.pop(0)()

    def synchronize(self) -> None:
        self.flush()
        self.busy = False

    def record(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        event.synchronize()

    def __enter__(self) -> "Stream":
        _streams.append(self)
        return self

    def __exit__(self, *raised: object) -> None:
        _streams.remove(self)


class Event:
    """A place in a stream."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self._stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or get_current_stream()

    @property
    def done(self) -> bool:
        return self._stream is None or not self._stream.busy

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


_streams = [Stream()]
Stream.null = _streams[0]  # type: ignore[attr-defined]


def get_current_stream() -> Stream:
    return _streams[-1]


class Device:
    """The only one there is."""

    def __init__(self, device: int = 0) -> None:
        if device:
            raise ValueError(f"the fake machine has device 0, not {device}")
        self.id = 0
        self.compute_capability = "90"
        self.attributes = {"MultiProcessorCount": 4}

    def use(self) -> None: ...

    def synchronize(self) -> None:
        get_current_stream().synchronize()

    def __enter__(self) -> "Device":
        return self

    def __exit__(self, *raised: object) -> None: ...


def alloc_pinned_memory(nbytes: int) -> Any:
    """Return memory that the device copies to and from by itself: it speaks the buffer protocol, and has `ptr`.

    Let go, it is handed out again at once, as by CuPy's pool: whoever still copies from it finds poison.
    """
    size = max(nbytes, 1)
    room = _pool[size].pop() if _pool[size] else (ctypes.c_uint8 * size)()
    ctypes.memset(room, POISON, size)
    buffer = (ctypes.c_uint8 * size).from_address(ctypes.addressof(room))
    buffer.ptr = ctypes.addressof(room)  # type: ignore[attr-defined]
    weakref.finalize(buffer, _release, size, room)
    return buffer


def _release(size: int, room: Any) -> None:
    ctypes.memset(room, POISON, size)
    _pool[size].append(room)


_pool: defaultdict[int, list[Any]] = defaultdict(list)


class MemoryPointer:
    """Where an array begins."""

    def __init__(self, owner: Any, address: int, shown: int) -> None:
        self._owner, self._address, self.ptr = owner, address, shown
        self.mem, self.device_id = owner, 0

    def copy_to_host_async(self, mem: Any, size: int, stream: Stream | None = None) -> None:
        self._copy(_address(mem), self._address, size, mem, stream)

    def copy_from_host_async(self, mem: Any, size: int, stream: Stream | None = None) -> None:
        self._copy(self._address, _address(mem), size, mem, stream)

    def _copy(self, to: int, source: int, size: int, mem: Any, stream: Stream | None) -> None:
        keep = self._owner, mem
        (stream or get_current_stream()).submit(lambda keep=keep: ctypes.memmove(to, source, size) and None)


def _address(mem: Any) -> int:
    return mem.value if isinstance(mem, ctypes.c_void_p) else int(mem)


def is_available() -> bool:
    return True


runtime = SimpleNamespace(
    getDeviceCount=lambda: 1,
    getDevice=lambda: 0,
    driverGetVersion=lambda: 0,
    runtimeGetVersion=lambda: 0,
    getDeviceProperties=lambda device: {"name": b"fake device", "multiProcessorCount": 4},
    CUDARuntimeError=RuntimeError,
)
