"""Streams, events and pinned memory; see the package."""

import ctypes
import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np

from cupy._counts import count
from cupy._memory import POISON as _POISON
from cupy._signatures import checked


class Stream:
    """Work that takes place when somebody waits for it; `busy` as long as some may be under way."""

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self._queue: list[Callable[[], None]] = []
        self.busy = False
        self.ptr = 0

    def _submit(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        self.busy = True

    def _flush(self) -> None:
        """Do what waits, in order: what the device itself does next comes after it."""
        while self._queue:
            self._queue.pop(0)()

    @property
    def done(self) -> bool:
        return not self.busy

    def synchronize(self) -> None:
        self._wait("stream")

    def _wait(self, name: str) -> None:
        count("synchronisations", name)
        self._flush()
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

    def __init__(
        self,
        block: bool = False,
        disable_timing: bool = False,
        interprocess: bool = False,
    ) -> None:
        self._stream: Stream | None = None
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or get_current_stream()
        self._time = perf_counter()  # what was started before is done, but for copies

    @property
    def done(self) -> bool:
        return self._stream is None or not self._stream.busy

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream._wait("event")


_streams = [Stream()]
Stream.null = _streams[0]  # type: ignore[attr-defined]


def get_current_stream(device_id: int = -1) -> Stream:
    return _streams[-1]


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Return milliseconds between two places in a stream."""
    return 1e3 * (end_event._time - start_event._time)


class Device:
    """The only one there is."""

    def __init__(self, device: int | None = None) -> None:
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


def alloc_pinned_memory(size: int) -> Any:
    """Return memory that the device copies to and from by itself: it speaks the buffer protocol, and has `ptr`.

    Let go, it is handed out again at once, as by CuPy's pool: whoever still copies from
    it finds poison.
    """
    size = max(size, 1)
    room = _pool[size].pop() if _pool[size] else (ctypes.c_uint8 * size)()
    ctypes.memset(room, _POISON, size)
    buffer = (ctypes.c_uint8 * size).from_address(ctypes.addressof(room))
    buffer.ptr = ctypes.addressof(room)  # type: ignore[attr-defined]
    weakref.finalize(buffer, _release, size, room)
    return buffer


def _release(size: int, room: Any) -> None:
    ctypes.memset(room, _POISON, size)
    _pool[size].append(room)


_pool: defaultdict[int, list[Any]] = defaultdict(list)


class MemoryPointer:
    """Where an array begins."""

    def __init__(self, owner: Any, address: int, shown: int) -> None:
        self._owner, self._address, self.ptr = owner, address, shown
        self.mem, self.device_id = owner, 0

    def __add__(self, offset: int) -> "MemoryPointer":
        return MemoryPointer(self._owner, self._address + offset, self.ptr + offset)

    def _bytes(self, nbytes: int) -> Any:
        """Return memory from here on, which stays as long as what is returned."""
        memory = (ctypes.c_uint8 * max(nbytes, 1)).from_address(self._address)
        memory.keeps = self._owner  # type: ignore[attr-defined]
        return np.frombuffer(memory, np.uint8)[:nbytes]

    def copy_to_host_async(
        self, mem: Any, size: int, stream: Stream | None = None
    ) -> None:
        self._copy(_address(mem), self._address, size, mem, stream)

    def copy_from_host_async(
        self, mem: Any, size: int, stream: Stream | None = None
    ) -> None:
        self._copy(self._address, _address(mem), size, mem, stream)

    def _copy(
        self, to: int, source: int, size: int, mem: Any, stream: Stream | None
    ) -> None:
        keep = self._owner, mem
        count("launches", "copy to or from pinned memory")
        (stream or get_current_stream())._submit(
            lambda keep=keep: ctypes.memmove(to, source, size) and None
        )


def _address(mem: Any) -> int:
    return mem.value if isinstance(mem, ctypes.c_void_p) else int(mem)


def is_available() -> bool:
    return True


runtime = SimpleNamespace(
    getDeviceCount=lambda: 1,
    getDevice=lambda: 0,
    driverGetVersion=lambda: 0,
    runtimeGetVersion=lambda: 0,
    getDeviceProperties=lambda device: {
        "name": b"fake device",
        "multiProcessorCount": 4,
    },
    CUDARuntimeError=RuntimeError,
)


def _launch_kernel(
    f: int,
    grid_dim_x: int,
    grid_dim_y: int,
    grid_dim_z: int,
    block_dim_x: int,
    block_dim_y: int,
    block_dim_z: int,
    shared_mem_bytes: int,
    stream: int,
    kernel_params: int,
    extra: int,
) -> None:
    dimensions = grid_dim_y, grid_dim_z, block_dim_y, block_dim_z
    assert dimensions == (1, 1, 1, 1)
    assert shared_mem_bytes == extra == 0
    assert stream == get_current_stream().ptr
    _kernels[f - 1](grid_dim_x, block_dim_x, kernel_params)


# what runs a kernel by its handle less 1, from the numbers of blocks and threads, and the addresses of its arguments
_kernels: list[Callable[[int, int, int], None]] = []
driver = SimpleNamespace(launchKernel=_launch_kernel)
for _class in (Stream, Event, Device, MemoryPointer):
    for _name, _value in list(vars(_class).items()):
        if not _name.startswith("_") and inspect.isfunction(_value):
            setattr(_class, _name, checked(f"cuda.{_class.__name__}.{_name}", _value))
