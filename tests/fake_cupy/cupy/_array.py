"""The array: NumPy's, behind glass."""

import ctypes
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np

from cupy._counts import count
from cupy._flush import MOVING, converted, flush, flushed
from cupy._memory import arena
from cupy._signatures import check, checked
from cupy.cuda import Device, MemoryPointer, get_current_stream


class ndarray:
    """An array on the fake device; `_hidden` is the NumPy array that only this package touches."""

    # plain attributes, as CuPy's are: to read one takes no call
    __slots__ = (
        "__weakref__",
        "_c_contiguous",
        "_hidden",
        "data",
        "dtype",
        "itemsize",
        "nbytes",
        "ndim",
        "shape",
        "size",
    )
    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, *args: Any, **how: Any) -> None:
        check("ndarray", args, how)
        self._make(*args, **how)

    def _make(self, shape: Any, dtype: Any = float, memptr: Any = None) -> None:
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        memory = memptr._bytes(nbytes) if memptr else arena.allocate(nbytes).bytes()
        self._show(memory.view(dtype).reshape(shape))

    @classmethod
    def _of(cls, hidden: np.ndarray) -> "ndarray":
        """Wrap a NumPy array that lies in the arena."""
        self = object.__new__(cls)
        self._show(hidden)
        return self

    def _show(self, hidden: np.ndarray) -> None:
        """Take an array, and tell what it is."""
        self._hidden = hidden
        for name in ("dtype", "itemsize", "nbytes", "ndim", "shape", "size"):
            setattr(self, name, getattr(hidden, name))
        self._c_contiguous = hidden.flags.c_contiguous
        address = hidden.ctypes.data
        self.data = MemoryPointer(hidden, address, arena.shown_at(address))

    def _ready(self) -> np.ndarray:
        """Return the hidden array for what the device does with it: that comes after what is queued before."""
        get_current_stream()._flush()
        return self._hidden

    # What it is

    strides = property(lambda self: self._hidden.strides)
    device = property(lambda self: Device(0))
    T = property(lambda self: ndarray._of(self._hidden.T))
    base = property(lambda self: None)

    @property
    def flags(self) -> Any:
        """What CuPy tells: it has no `writeable`."""
        flags = self._hidden.flags
        return SimpleNamespace(
            c_contiguous=flags.c_contiguous,
            f_contiguous=flags.f_contiguous,
            owndata=True,
        )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What others go by, MPI for one, which knows nothing of streams: all that was started must be done."""
        assert not get_current_stream().busy, (
            "the stream was not synchronised before the array was handed out"
        )
        strides = None if self._hidden.flags.c_contiguous else self.strides
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.data.ptr, False),
            "strides": strides,
            "version": 3,
            "stream": 1,
        }

    def __array__(self, *args: Any, **how: Any) -> Any:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()`"
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    # To the host and back

    def get(
        self,
        stream: Any = None,
        order: str = "C",
        out: Any = None,
        blocking: bool = True,
    ) -> Any:
        if self.size:
            waited("get")
        if out is None:
            return self._hidden.copy(order="C")
        out[...] = self._hidden
        return out

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        assert isinstance(arr, np.ndarray)
        assert arr.shape == self.shape
        assert arr.dtype == self.dtype
        count("uploads", "set")
        self._ready()[...] = arr
        _ran()

    def item(self) -> Any:
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    def __bool__(self) -> bool:
        return bool(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __len__(self) -> int:
        return len(self._hidden)

    def __repr__(self) -> str:
        return repr(self.get())

    def __format__(self, spec: str) -> str:
        return format(self.get(), spec) if self.ndim else format(self.item(), spec)

    def __str__(self) -> str:
        return str(self.get())

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    # Parts

    def __getitem__(self, key: Any) -> "ndarray":
        if isinstance(key, ndarray) and key.dtype == bool:
            waited("a mask as an index")
        hidden = self._hidden if isinstance(key, slice) else self._ready()
        part = hidden[_index(key)]
        # a view: nothing to do
        return ndarray._of(part) if isinstance(key, slice) else wrapped(part, "getitem")

    def __setitem__(self, key: Any, value: Any) -> None:
        part = self._hidden[_index(key)] if isinstance(key, slice) else None
        self._ready()[_index(key)] = as_dtype(plain(value), self.dtype)
        if part is None or part.size:
            ran("setitem")

    def view(self, dtype: Any = None) -> "ndarray":
        return ndarray._of(
            self._hidden.view() if dtype is None else self._hidden.view(dtype)
        )

    def reshape(self, *shape: Any, order: str = "C", copy: Any = None) -> "ndarray":
        return wrapped(self._hidden.reshape(*shape), "reshape")

    def ravel(self, order: str = "C") -> "ndarray":
        return wrapped(self._hidden.ravel(), "ravel")

    def astype(
        self,
        dtype: Any,
        order: str = "K",
        casting: Any = None,
        subok: Any = None,
        copy: bool = True,
    ) -> Any:
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        with np.errstate(all="ignore"):
            return wrapped(converted(self._ready(), np.dtype(dtype)), "astype")

    def copy(self, order: str = "C") -> "ndarray":
        return wrapped(self._ready().copy(), "copy")

    def fill(self, value: Any) -> None:
        ran("fill")
        self._hidden.fill(plain(value))

    # NumPy's protocols: what NumPy's functions and operators do with such an array

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **how: Any) -> Any:
        if method == "__call__":
            check(ufunc.__name__, inputs, how)
            outs = how.pop("out", None)
            if outs is not None:
                how["out"] = tuple(plain(each) for each in outs)
            moves = ufunc.__name__ in MOVING
            given = [plain(each) for each in inputs]
            with np.errstate(all="ignore"):
                result = ufunc(*(given if moves else flushed(given)), **how)
            if outs is None:
                return wrapped(result if moves else flushed(result), ufunc.__name__)
            for each in how["out"] if not moves else ():
                flush(each)
            ran(ufunc.__name__)
            return outs[0]
        if method == "at":
            ran(f"{ufunc.__name__}.at")
            array, *rest = [plain(each) for each in inputs]
            ufunc.at(array, *flushed(rest))
            flush(array)
            return None
        return NotImplemented

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        import cupy

        if not all(issubclass(kind, ndarray) for kind in types):
            return NotImplemented
        place = func.__module__.removeprefix("numpy").lstrip(".")
        assert place in ("", "lib", "lib.stride_tricks"), place
        return getattr(cupy, func.__name__)(*args, **kwargs)


def ran(name: str) -> None:
    """Say that the device has something to do: eager here, but not known to be complete."""
    count("launches", name)
    _ran()


def _ran() -> None:
    stream = get_current_stream()
    stream._flush()
    stream.busy = True


def waited(name: str) -> None:
    """Wait for the device, as CuPy does where the size of a result depends on data."""
    get_current_stream()._wait(name)


def plain(value: Any) -> Any:
    """Return what NumPy takes in place of an argument; TypeError for an array of NumPy's."""
    if isinstance(value, ndarray):
        return value._ready()
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    if isinstance(value, tuple | list):
        return type(value)(plain(each) for each in value)
    return value


def as_dtype(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return what is written to an array of a dtype: an array of another one is converted as CuPy does."""
    return converted(value, dtype) if isinstance(value, np.ndarray) else value


def wrapped(value: Any, name: str | None) -> Any:
    """Return NumPy's result as the device's: in its memory, numbers as arrays of no dimension.

    name: of what computed it; None where nothing was computed.
    """
    if name is not None:
        _ran()
    if isinstance(value, tuple | list):
        # of one operation
        parts = [
            wrapped(each, name if i == 0 else None) for i, each in enumerate(value)
        ]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray):
        return value
    if arena.base <= value.ctypes.data < arena.base + (1 << 34) and value.size:
        return ndarray._of(value)
    array = ndarray(value.shape, value.dtype)
    array._hidden[...] = value
    if name is not None and value.size:
        count("launches", name)
    return array


def _index(key: Any) -> Any:
    if isinstance(key, tuple):
        return tuple(_index(each) for each in key)
    if isinstance(key, np.ndarray) and key.ndim:
        raise TypeError("an index of the host in an array of the device")
    return plain(key)


def _method(name: str) -> Any:
    def method(self: ndarray, *args: Any, **how: Any) -> Any:
        if name == "nonzero":
            waited(name)
        array = self._ready() if name in MOVING else flushed(self._ready())
        with np.errstate(all="ignore"):
            found = getattr(array, name)(
                *map(plain, args), **{k: plain(v) for k, v in how.items()}
            )
        return wrapped(found if name in MOVING else flushed(found), name)

    return method


for _name in (
    "sum max min all any mean prod argsort cumsum argmax argmin dot nonzero std var transpose squeeze"
).split():
    setattr(ndarray, _name, _method(_name))


def _operator(name: str, ufunc: Any) -> None:
    def operate(self: Any, other: Any) -> Any:
        return self.__array_ufunc__(ufunc, "__call__", self, other)

    def reverse(self: Any, other: Any) -> Any:
        return self.__array_ufunc__(ufunc, "__call__", other, self)

    def in_place(self: Any, other: Any) -> Any:
        return self.__array_ufunc__(ufunc, "__call__", self, other, out=(self,))

    setattr(ndarray, f"__{name}__", operate)
    if name not in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(ndarray, f"__r{name}__", reverse)
        setattr(ndarray, f"__i{name}__", in_place)


_BINARY = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.true_divide, "floordiv": np.floor_divide,
    "mod": np.remainder, "pow": np.power, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "lshift": np.left_shift, "rshift": np.right_shift, "eq": np.equal, "ne": np.not_equal, "lt": np.less,
    "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
for _name, _ufunc in _BINARY.items():
    _operator(_name, _ufunc)
ndarray.__neg__ = lambda self: self.__array_ufunc__(np.negative, "__call__", self)  # type: ignore[attr-defined]
ndarray.__invert__ = lambda self: self.__array_ufunc__(np.invert, "__call__", self)  # type: ignore[attr-defined]
ndarray.__abs__ = lambda self: self.__array_ufunc__(np.absolute, "__call__", self)  # type: ignore[attr-defined]

for _name, _value in list(vars(ndarray).items()):
    if not _name.startswith("_") and inspect.isfunction(_value):
        setattr(ndarray, _name, checked(f"ndarray.{_name}", _value))

assert ctypes.sizeof(ctypes.c_void_p) == 8
