"""CuPy for the tests: the real one where there is a device, else the stand-in; and arrays there and back.

With the stand-in a kernel runs in one of two ways. ``emulated`` is the CUDA source itself, executed as host C++: slow.
``host`` is the host's kernel on the hidden memory: enough where a test is about where arrays go, not what kernels do.
"""

import importlib
import sys
from pathlib import Path

import numpy as np

from mpicomp import SparseVector

_STAND_IN = Path(__file__).parent / "fake_cupy"
_KERNELS = "mpicomp.kernels.device"


def real_cupy():
    """Return CuPy if it is there and sees a device, else None."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError:
        return None
    return cupy if not hasattr(cupy, "FAKE") and cupy.cuda.is_available() else None


def cupy_for_tests(kernels="host"):
    """Return CuPy, or the stand-in with its kernels run as `kernels` says."""
    cupy = real_cupy()
    if cupy is not None:
        return cupy
    if not hasattr(sys.modules.get("cupy"), "FAKE"):
        for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
            del sys.modules[name]
        sys.path.insert(0, str(_STAND_IN))
    use_kernels(kernels)
    return importlib.import_module("cupy")


def use_kernels(which):
    """Say how the stand-in runs kernels from here on: "host" or "emulated"."""
    package = importlib.import_module("mpicomp.kernels")
    for name in [name for name in sys.modules if name == _KERNELS or name.startswith(f"{_KERNELS}.")]:
        del sys.modules[name]
    if hasattr(package, "device"):
        del package.device
    if which == "host":
        sys.modules[_KERNELS] = importlib.import_module("host_kernels")


def there(vector, cupy):
    """Return a sparse vector on the device."""
    return SparseVector(cupy.asarray(vector.indices), cupy.asarray(vector.values), vector.length)


def back(vector):
    """Return a sparse vector of the device in main memory."""
    assert type(vector.indices).__module__.startswith("cupy"), "the result is not on the device"
    assert type(vector.values).__module__.startswith("cupy"), "the result is not on the device"
    return SparseVector(vector.indices.get(), vector.values.get(), vector.length)


def assert_same(vector, expected):
    """Fail unless a vector of the device is the expected one of the host, bit for bit."""
    here = back(vector)
    assert (here.length, here.dtype) == (expected.length, expected.dtype)
    np.testing.assert_array_equal(here.indices, expected.indices)
    assert here.values.tobytes() == expected.values.tobytes()
