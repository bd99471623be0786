"""Array conversion: from any framework to NumPy or CuPy without a copy, and back to the original kind (`kind_of`).

No framework is imported here: the library of an array is loaded already. CuPy is
imported when the first GPU array is passed.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from mpicomp.arrays import Array
from mpicomp.arrays.device import on_device
from mpicomp.arrays.memory import contiguous, flat, is_contiguous
from mpicomp.arrays.values import VALUE_DTYPES

# DLPack's device types: the CPU, and memory pinned for CUDA or ROCm.
_HOST_DEVICES = (1, 3, 11)
_CUDA_DEVICES = (2, 13)  # a CUDA device, and CUDA managed memory


def to_array(array: Any) -> Array:
    """Return a NumPy array for an array in host memory, a CuPy array for one on a CUDA device; without a copy.

    Takes NumPy and CuPy arrays, objects with ``__array_interface__`` or
    ``__cuda_array_interface__`` and objects that support DLPack (PyTorch, JAX, ...). A
    PyTorch tensor that requires grad is detached. bfloat16 is copied to float32.

    Raises TypeError for anything else, for masked arrays, for PyTorch's tensors without
    memory of their own, such as a DTensor, for arrays on a device of another kind, and
    for arrays on a CUDA device without CuPy; ValueError for arrays on another CUDA
    device than CuPy's current one.
    """
    if type(array) is np.ndarray and array.dtype in VALUE_DTYPES:
        return array  # fast path
    if on_device(array) and array.dtype in VALUE_DTYPES:
        return _on_current_device(array)  # type: ignore[no-any-return]
    _check_dense(array)
    if _is_bfloat16(array):  # NumPy has no such dtype
        if hasattr(array, "untyped_storage") and array.is_cpu:
            # NumPy's memory is in huge pages, and PyTorch's takes a fault for each page.
            values = np.empty(tuple(array.shape), np.float32)
            sys.modules["torch"].from_numpy(values).copy_(array.detach())
            return values
        if hasattr(array, "float"):
            array = array.float()
        elif hasattr(array, "astype"):
            array = array.astype("float32")
    if on_device(array):
        return _on_current_device(array)  # type: ignore[no-any-return]
    if isinstance(array, np.ndarray):
        return np.asarray(array)
    if getattr(array, "requires_grad", False):
        array = array.detach()
    # DLPack comes first: with it CuPy's stream waits for the stream that computes the
    # array.
    if hasattr(array, "__dlpack_device__"):
        return _from_dlpack(array)
    if hasattr(array, "__cuda_array_interface__"):
        return _on_current_device(_import_cupy(array).asarray(array))  # type: ignore[no-any-return]
    if hasattr(array, "__array_interface__"):
        return np.asarray(array)
    hint = "NumPy, CuPy, or one that supports DLPack"
    if hasattr(array, "to_dense"):
        hint = "use its to_dense()"
    raise TypeError(f"got {_type_name(array)}: expected an array ({hint})")


def _check_dense(array: Any) -> None:
    """Raise TypeError or ValueError unless an array holds all of its values in memory of its own."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            "got a masked array: expected a plain one, such as array.filled(0); masks are not sent"
        )
    if remedy := sparse_remedy(array):
        raise TypeError(f"got {_type_name(array)}: expected a dense array; {remedy}")
    if hasattr(array, "untyped_storage"):
        _check_memory(array)
    if hasattr(array, "is_deleted"):
        _check_jax(array)


def sparse_remedy(array: Any) -> str | None:
    """Return how to convert SciPy's sparse matrices or PyTorch's sparse tensors to a SparseVector; else None."""
    if type(array) is np.ndarray:
        return None
    if type(array).__module__.startswith("scipy.sparse"):
        return (
            "for a row of CSR use SparseVector.from_entries(m.indices, m.data, m.shape[1]), for its m.T @ delta "
            "c = np.unique(m.indices), SparseVector(c, m[:, c].T @ delta, m.shape[1]); m.toarray() makes a dense array"
        )
    if str(getattr(array, "layout", "")).startswith("torch.sparse"):
        return "use t = t.coalesce(), SparseVector(t.indices()[0], t.values(), len(t)); t.to_dense() makes it dense"
    return None


def is_array(array: Any) -> bool:
    """Return whether this is an array of a kind that `to_array` accepts, whatever its dtype, device and state."""
    if isinstance(array, np.ndarray) or on_device(array):
        return True
    # `is_deleted` is an attribute of JAX's arrays, also of those that it traces.
    interfaces = "__array_interface__", "__cuda_array_interface__", "__dlpack_device__"
    return any(hasattr(array, kind) for kind in (*interfaces, "is_deleted"))


def _from_dlpack(array: Any) -> Array:
    # PyTorch's own conversion takes a fifth of the time.
    is_cpu = getattr(array, "is_cpu", False)
    try:
        device = 1 if is_cpu else int(array.__dlpack_device__()[0])
    except BufferError as error:  # JAX raises it for an array on several devices.
        raise TypeError(
            f"{_type_name(array)}: {error}; pass a copy in one memory, as of jax.device_get"
        ) from error
    if device not in _HOST_DEVICES + _CUDA_DEVICES:
        raise TypeError(
            f"{_type_name(array)} is on a device that is not supported (DLPack type {device}): copy it to host memory"
        )
    try:
        if device in _HOST_DEVICES:
            return array.numpy() if is_cpu else np.from_dlpack(array)
        return _on_current_device(_import_cupy(array).from_dlpack(array))  # type: ignore[no-any-return]
    except (BufferError, RuntimeError, TypeError) as error:
        dtype = getattr(array, "dtype", "an unknown dtype")
        raise TypeError(
            f"NumPy cannot read {_type_name(array)} of {dtype}: convert it to float32 ({error})"
        ) from error


def _check_jax(array: Any) -> None:
    """Raise TypeError for an array of JAX that is being traced, ValueError for one whose memory was deleted."""
    # Even `is_deleted` of a traced array raises.
    if any([kind.__name__ == "Tracer" for kind in type(array).__mro__]):
        raise TypeError(
            f"got {_type_name(array)}: expected an array (it has no values while JAX traces a function: call outside "
            "of jit, grad, vmap and scan)"
        )
    if array.is_deleted():
        raise ValueError(
            f"got {_type_name(array)} whose memory JAX has deleted, as of an argument that was donated to a jitted "
            "function: pass the array that the function returned"
        )


def _check_memory(tensor: Any) -> None:
    """Raise TypeError for a PyTorch tensor whose values are not in memory of its own.

    DLPack would pass on a null pointer, for which NumPy makes new memory, and the
    values without their lazy sign.
    """
    try:
        has_memory = not tensor.numel() or tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:  # A wrapper, such as a DTensor, raises it.
        has_memory = False
    if not has_memory:
        raise TypeError(
            f"{_type_name(tensor)} on {tensor.device} has no memory of its own: expected a plain tensor; of a DTensor "
            "pass the local shard, tensor.to_local()"
        )
    if tensor.is_neg():
        raise TypeError(
            "got a tensor that is negated lazily: pass tensor.resolve_neg()"
        )


def _on_current_device(array: Any) -> Any:
    """Return a CuPy array; raise ValueError unless it is on the current device, where kernels run."""
    own = array.data.device_id  # `device.id` makes an object
    current = sys.modules["cupy"].cuda.runtime.getDevice()
    if own == current:
        return array
    raise ValueError(
        f"got an array on device {own}, and the current one is {current}: call cupy.cuda.Device({own}).use() first"
    )


def _import_cupy(array: Any) -> ModuleType:
    try:
        return import_module("cupy")
    except ImportError as error:
        raise TypeError(
            f"{_type_name(array)} is on a device, which needs CuPy: install cupy-cuda12x or cupy-cuda13x to match the "
            "driver, or copy the array to host memory first"
        ) from error


def writable_vector(out: Any) -> Array:
    """Return a view of an output array as one vector (1-d).

    Raises the errors of `to_values`; TypeError for bfloat16; ValueError for arrays that
    are read-only, as JAX's are, or not C-contiguous.
    """
    if _is_bfloat16(out):
        raise TypeError(
            "got bfloat16, which is exchanged as float32: expected float16, float32 or float64"
        )
    if isinstance(out, np.generic):
        raise TypeError(
            f"got the number {out!r}, which cannot be written to: expected an array, such as np.array({out})"
        )
    values = to_values(out)
    _check_writable(values, out)
    if not is_contiguous(values):
        raise ValueError(
            "the array is not C-contiguous, as one that is transposed or channels_last: expected a contiguous array; "
            "if it is out=, leave that out, and copy what is returned"
        )
    return flat(values)


def memory(array: Any) -> Array:
    """Return an array in its shape and order without a conversion: bfloat16 as uint16; raises as `to_values` does."""
    if not _is_bfloat16(array):
        return to_values(array)
    _check_dense(array)
    if hasattr(array, "untyped_storage"):
        bits = array.detach().view(sys.modules["torch"].int16)
        return to_array(bits).view(np.uint16)
    return to_array(array.view("u2")).view(np.uint16)


def writable_memory(array: Any) -> Array:
    """Return the memory of an array, in its shape and order; bfloat16 as uint16.

    Raises the errors of `to_values`; ValueError for arrays that are read-only, or have
    gaps or overlaps in memory.
    """
    values = memory(array)
    in_order = values
    if not is_contiguous(values):
        order = sorted(range(values.ndim), key=lambda axis: -values.strides[axis])
        in_order = values.transpose(order)
    if not is_contiguous(in_order):
        raise ValueError(
            "the array is not contiguous in any order of its axes: expected one without gaps in memory"
        )
    _check_writable(values, array)
    return values


def _check_writable(values: Array, array: Any) -> None:
    if not (on_device(values) or values.flags.writeable):
        raise ValueError(
            f"{_type_name(array)} is read-only for NumPy: expected a writable array. JAX's never are: leave out= out; "
            "give OuterLoop a copy that is made once, copy = np.array(array), and write each step to it, copy[...] = "
            "new. NumPy before 2.2 gets read-only views through DLPack"
        )


def to_values(array: Any) -> Array:
    """Return `to_array(array)`; raises TypeError unless the values are float16, float32 or float64."""
    values = to_array(array)
    if values.dtype not in VALUE_DTYPES:
        raise TypeError(
            f"values are {values.dtype}: expected float16, float32 or float64{_remedy(values.dtype)}"
        )
    return values


def _remedy(dtype: Any) -> str:
    if dtype.kind == "c":
        return "; pass array.real and array.imag as two arrays: astype would drop the imaginary part"
    if dtype.kind in "iu":
        return "; astype(np.float64) keeps whole numbers up to 2**53, float32 up to 2**24, float16 up to 2**11"
    if not dtype.isnative:
        return f"; astype(np.{dtype.name}) has the byte order of this machine"
    return "; astype(np.float64) converts them, and may round"


def to_vector(array: Any) -> Array:
    """Return `to_values(array)` as one contiguous vector in C order: a view if possible."""
    return contiguous(to_values(array)).reshape(-1)


def like(result: Array, original: Any) -> Any:
    """Return `result` as the same kind of array as `original`: see `kind_of`."""
    return kind_of(original)(result)


def kind_of(original: Any) -> Callable[[Array], Any]:
    """Return the function that converts results to the kind of array of `original`, without a copy where possible.

    It calls ``from_dlpack`` of the library of `original`, to which it holds no
    reference; without that function, it returns NumPy's or CuPy's array. For a bfloat16
    `original` a float32 result is rounded to bfloat16.
    """
    if type(original) is np.ndarray and original.dtype in VALUE_DTYPES:
        return lambda result: result
    root = type(original).__module__.partition(".")[0]
    is_jax = root in ("jax", "jaxlib")
    if is_jax:
        root = "jax.numpy"
    library = sys.modules.get(root)
    ours = isinstance(original, np.ndarray) or on_device(original)
    foreign = not ours and hasattr(library, "from_dlpack")
    short = original.dtype if _is_bfloat16(original) else None
    # JAX would take the first of its devices.
    place = {"device": original.device} if is_jax else {}

    def convert(result: Array) -> Any:
        array = library.from_dlpack(result, **place) if foreign else result  # type: ignore[union-attr]
        if short is None or result.dtype != np.float32:
            return array
        return array.to(short) if hasattr(array, "to") else array.astype(short)

    return convert


def _is_bfloat16(array: Any) -> bool:
    dtype = getattr(array, "dtype", "")
    if isinstance(dtype, np.dtype) and dtype in VALUE_DTYPES:
        return False  # the text takes 3 us
    return str(dtype).endswith("bfloat16")


def _type_name(array: Any) -> str:
    return f"{type(array).__module__}.{type(array).__qualname__}"
