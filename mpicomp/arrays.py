"""Arrays in and out: any framework's array as NumPy's or CuPy's, and the result back as the same kind.

An array comes in without a copy: in main memory by being a NumPy array, through the array interface, or through DLPack;
on a device by being a CuPy array, through the CUDA array interface, or through DLPack. It goes back through the
``from_dlpack`` of the library that it came from. No framework is imported here, as an array that arrives proves that
its library is loaded; CuPy is, once an array on a device arrives.

What array algebra can say is written once: NumPy's functions take CuPy's arrays, and ``namespace(array)`` makes new
ones. Hot loops are in `mpicomp.kernels`, and `kernels_for` says which serve an array.
"""

import struct
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

VALUE_DTYPES = tuple(np.dtype(t) for t in (np.float16, np.float32, np.float64))

DTYPE_NAMES = {dtype: str(dtype) for dtype in VALUE_DTYPES}  # NumPy puts the name together at each call

_IN_MAIN_MEMORY = (1, 3, 11)  # DLPack's device types: the CPU, and memory pinned for CUDA or ROCm
_ON_CUDA = (2, 13)  # a CUDA device, and memory that it manages


def to_array(array: Any) -> Array:
    """Return a NumPy array of what lives in main memory, a CuPy array of what lives on a CUDA device; without a copy.

    Takes NumPy and CuPy arrays, objects with ``__array_interface__`` or ``__cuda_array_interface__`` and objects that
    speak DLPack (PyTorch, JAX, ...). A PyTorch tensor that requires grad is detached. bfloat16 becomes float32, a copy.

    Raises TypeError for anything else, for an array on a device of another kind, and for a masked array; for an array
    on a CUDA device where CuPy is missing. ValueError for one on another CUDA device than CuPy's current one.
    """
    if type(array) is np.ndarray and array.dtype in VALUE_DTYPES:
        return array  # the case that is everywhere, without the questions
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("got a masked array: fill it first (array.filled(0)), a mask does not travel")
    if _is_bfloat16(array):
        array = _widened(array)
    if remedy := sparse_remedy(array):
        raise TypeError(f"got {_kind(array)}: expected a dense array; {remedy}")
    if on_device(array):
        return _on_the_current(array)  # type: ignore[no-any-return]
    if isinstance(array, np.ndarray):
        return np.asarray(array)
    if getattr(array, "requires_grad", False):
        array = array.detach()
    if hasattr(array, "__cuda_array_interface__"):
        return _on_the_current(_cupy_for(array).asarray(array))  # type: ignore[no-any-return]
    if hasattr(array, "__dlpack_device__"):
        return _from_dlpack(array)
    if hasattr(array, "__array_interface__"):
        return np.asarray(array)
    hint = "use its to_dense()" if hasattr(array, "to_dense") else "NumPy, CuPy, or one that speaks DLPack"
    raise TypeError(f"got {_kind(array)}: expected an array ({hint})")


def sparse_remedy(array: Any) -> str | None:
    """Return how to turn SciPy's sparse matrix or PyTorch's sparse tensor into a SparseVector; None for all else."""
    if type(array) is np.ndarray:
        return None
    if type(array).__module__.startswith("scipy.sparse"):
        return (
            "of a CSR matrix m with one row, m.sum_duplicates() and take SparseVector(m.indices, m.data, m.shape[1]); "
            "m.tocsr() makes one, m.toarray() a dense array"
        )
    if str(getattr(array, "layout", "")).startswith("torch.sparse"):
        return (
            "of a 1-d sparse tensor t, t = t.coalesce() and take SparseVector(t.indices()[0], t.values(), len(t)); "
            "t.to_dense() makes a dense tensor"
        )
    return None


def is_array(array: Any) -> bool:
    """Say whether this is an array of a kind that `to_array` accepts, whatever its dtype and device."""
    kinds = "__array_interface__", "__cuda_array_interface__", "__dlpack_device__"
    return isinstance(array, np.ndarray) or any(hasattr(array, kind) for kind in kinds)


def _from_dlpack(array: Any) -> Array:
    kind = int(array.__dlpack_device__()[0])
    if kind not in _IN_MAIN_MEMORY + _ON_CUDA:
        raise TypeError(f"{_kind(array)} is on a device (DLPack type {kind}): copy it to main memory first")
    try:
        return _on_the_current(_cupy_for(array).from_dlpack(array)) if kind in _ON_CUDA else np.from_dlpack(array)
    except (BufferError, RuntimeError) as error:
        dtype = getattr(array, "dtype", "an unknown dtype")
        raise TypeError(f"NumPy cannot take {_kind(array)} of {dtype}: convert it to float32 ({error})") from error


def _on_the_current(array: Any) -> Any:
    """Return a CuPy array; ValueError where it is on another device than the current one, which kernels run on."""
    current = sys.modules["cupy"].cuda.Device().id
    if array.device.id != current:
        raise ValueError(
            f"got an array on device {array.device.id}, and the current one is {current}: call "
            f"cupy.cuda.Device({array.device.id}).use() first"
        )
    return array


def _cupy_for(array: Any) -> ModuleType:
    try:
        import cupy
    except ImportError as error:
        raise TypeError(
            f"{_kind(array)} is on a device, which needs CuPy: install cupy-cuda12x or cupy-cuda13x, as the driver is, "
            "or copy the array to main memory first"
        ) from error
    return cupy  # type: ignore[no-any-return]


def on_device(array: Any) -> bool:
    """Say whether this is a CuPy array."""
    if type(array) is np.ndarray:
        return False
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(array, cupy.ndarray)


def namespace(array: Any) -> Any:
    """Return the module that makes arrays where `array` lives: ``numpy`` or ``cupy``."""
    return sys.modules["cupy"] if on_device(array) else np


def to_numpy(array: Any) -> Array:
    """Return a CuPy array as a copy in main memory, once all that was started on it is done; others as they are."""
    return array.get() if on_device(array) else np.asarray(array)


def beside(array: Any, other: Any) -> Any:
    """Return an array, NumPy's or CuPy's, where `other` lives: itself if it is there, else a copy."""
    if on_device(array) == on_device(other):
        return array
    return to_numpy(array) if on_device(array) else namespace(other).asarray(array)


def set_to_zero(array: Array) -> None:
    """Make all values zero."""
    kernels_for(array).clear(array)


def writable_vector(out: Any) -> Array:
    """Return an array that is to be written to as one vector (1-d), a view.

    Raises what `to_values` does, and TypeError for bfloat16; ValueError where writing to the view would not write to
    the array: it is read-only, as JAX's are, or not C-contiguous.
    """
    if type(out) is np.ndarray and out.dtype in VALUE_DTYPES and out.flags.writeable and out.flags.c_contiguous:
        return out.reshape(-1)  # the case that is everywhere, without the questions
    if _is_bfloat16(out):
        raise TypeError("got bfloat16, which is exchanged as float32: expected float16, float32 or float64")
    values = to_values(out)
    if not (on_device(values) or values.flags.writeable):
        raise ValueError(
            f"NumPy may not write to {_kind(out)}: expected one that can be changed (none of JAX is; NumPy before "
            "2.2 takes none that comes through DLPack for such)"
        )
    if not values.flags.c_contiguous:
        raise ValueError("its values are not contiguous in C order: expected a contiguous array")
    return values.reshape(-1)


def check_apart(arrays: Sequence[Any]) -> None:
    """Raise ValueError where two contiguous arrays that a step writes to share memory."""
    given: list[Any] = [array for array in arrays if array.size]
    starts = [int(array.data.ptr) if on_device(array) else array.ctypes.data for array in given]
    spans = sorted(zip(starts, [array.nbytes for array in given], strict=True))
    if any(start + nbytes > after for (start, nbytes), (after, _) in pairwise(spans)):
        raise ValueError(
            "two arrays that the step writes to share memory: expected an array of its own for each out=, and for each "
            "gradient that holds the residual (in_place)"
        )


def nonzero(values: Array) -> Array:
    """Say of each value whether it is not zero: on a device by its bits, as CuPy takes subnormal numbers for zero."""
    if not on_device(values):
        return values != 0  # type: ignore[no-any-return]
    return values.view(f"u{values.itemsize}") << 1 != 0  # type: ignore[no-any-return]


def first_and_last(array: Array) -> tuple[Any, Any]:
    """Return the first and the last of a vector that has any, as Python's numbers: from a device in one copy."""
    ends = array if not on_device(array) else to_numpy(array[:: max(1, array.size - 1)])
    return ends.item(0), ends.item(-1)


def write_fields(buffer: Any, form: struct.Struct, *fields: Any) -> None:
    """Write the fields of a form to the beginning of a buffer (uint8)."""
    if on_device(buffer):
        buffer[: form.size].set(np.frombuffer(form.pack(*fields), np.uint8))
    else:
        form.pack_into(buffer, 0, *fields)


def read_fields(buffer: Any, form: struct.Struct) -> tuple[Any, ...]:
    """Return the fields of a form that a buffer (uint8) begins with."""
    return form.unpack_from(to_numpy(buffer[: form.size]).data if on_device(buffer) else buffer)


def read_only(array: Array) -> Array:
    """Return a view that cannot be written; on a device, where there is none such, one that must not be."""
    view = array.view()
    if not on_device(array):
        view.flags.writeable = False
    return view


def to_values(array: Any) -> Array:
    """Return what `to_array` does; TypeError as well when the values are not float16, float32 or float64."""
    values = to_array(array)
    if values.dtype not in VALUE_DTYPES:
        raise TypeError(f"values are {values.dtype}: expected float16, float32 or float64; convert them with astype")
    return values


def contiguous(array: Array) -> Array:
    """Return an array whose values lie behind each other in C order: itself where they do."""
    return array if array.flags.c_contiguous else namespace(array).ascontiguousarray(array)


def to_vector(array: Any) -> Array:
    """Return what `to_values` does as one contiguous vector in C order: a view where that is possible."""
    values = to_values(array)
    return contiguous(values).reshape(-1)


def like(result: Array, original: Any) -> Any:
    """Return `result` as the same kind of array as `original`: without a copy, where its library can.

    Goes through the library's ``from_dlpack`` (JAX keeps it in ``jax.numpy``); where there is none, NumPy's or CuPy's
    array comes back. Beside a bfloat16 array a float32 result is rounded to bfloat16.
    """
    return kind_of(original)(result)


def kind_of(original: Any) -> Callable[[Array], Any]:
    """Return the function that makes arrays the same kind as `original`, as `like` does; it does not hold it."""
    if type(original) is np.ndarray and original.dtype in VALUE_DTYPES:
        return _as_it_is
    root = type(original).__module__.partition(".")[0]
    library = sys.modules.get("jax.numpy" if root in ("jax", "jaxlib") else root)
    ours = isinstance(original, np.ndarray) or on_device(original)
    foreign = not ours and hasattr(library, "from_dlpack")
    short = original.dtype if _is_bfloat16(original) else None

    def back(result: Array) -> Any:
        array = library.from_dlpack(result) if foreign else result  # type: ignore[union-attr]
        if short is None or result.dtype != np.float32:
            return array
        return array.to(short) if hasattr(array, "to") else array.astype(short)

    return back


def _as_it_is(result: Array) -> Array:
    return result


def _is_bfloat16(array: Any) -> bool:
    return str(getattr(array, "dtype", "")).endswith("bfloat16")


def _widened(array: Any) -> Any:
    """Return a bfloat16 array as float32, where its library can: NumPy has no name for it."""
    if hasattr(array, "float"):
        return array.float()
    return array.astype("float32") if hasattr(array, "astype") else array


def kernels_for(array: Any) -> ModuleType:
    """Return the kernels module that serves `array`; Numba, or CuPy's, is loaded at the first call, not on import."""
    return _device_kernels() if on_device(array) else _host_kernels()


@cache
def _device_kernels() -> ModuleType:
    from mpicomp.kernels import device

    return device


@cache
def _host_kernels() -> ModuleType:
    from mpicomp.kernels import host

    return host


def _kind(array: Any) -> str:
    return f"{type(array).__module__}.{type(array).__qualname__}"
