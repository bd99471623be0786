"""CuPy for the tests: the real one where there is a device, else the stand-in; and arrays there and back.

The stand-in runs the CUDA source itself, as host C++ (tests/cuda): what the tests say
of kernels, they say of those.
"""

import hashlib
import importlib
import json
import sys
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from mpicomp import SparseVector

_TESTS = Path(__file__).parents[1]
KERNELS = _TESTS.parent / "mpicomp" / "kernels" / "device"
EVIDENCE = _TESTS.parent / "docs" / "gpu_evidence"


def real_cupy():
    """Return CuPy if it is there and sees a device, else None."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError:
        return None
    return cupy if not hasattr(cupy, "FAKE") and cupy.cuda.is_available() else None


def has_cupy_wheel():
    """Return whether a wheel of CuPy is installed, with or without a device."""
    return any(
        (each.name or "").startswith("cupy-cuda") for each in metadata.distributions()
    )


def cupy_for_tests():
    """Return CuPy, or the stand-in."""
    cupy = real_cupy()
    if cupy is None and not hasattr(sys.modules.get("cupy"), "FAKE"):
        for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
            del sys.modules[name]
        sys.path.insert(0, str(_TESTS / "fake_cupy"))
    return cupy or importlib.import_module("cupy")


@contextmanager
def counted(cupy):
    """Count what a block starts on the stand-in's device, and how often it waits for it: see tests/fake_cupy."""
    counts = importlib.import_module("cupy._counts")
    counts.clear()
    found = SimpleNamespace(launches=0, synchronisations=0, uploads=0, names=[])
    try:
        yield found
    finally:
        vars(found).update(counts.counts, names=list(counts.names))


def kernel_hash():
    """Return what tells one state of the CUDA source from another."""
    digest = hashlib.sha256()
    for path in sorted(KERNELS.glob("*.cu*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def layers():
    """Return what is to be said at the end of a run: on which of the four layers the device path was tested."""
    here = f"CUDA source {kernel_hash()}"
    if real_cupy() is not None:
        return f"device path: {here} ran on a GPU"
    said = f"device path: layers 1 to 3 (NumPy's arrays; {here} executed as host C++; arrays that MPI would die of). "
    runs = [json.loads(path.read_text()) for path in sorted(EVIDENCE.glob("*.json"))]
    if not runs:
        return said + "Layer 4, a GPU, did not run here, and never has"
    last = max(runs, key=lambda run: run["date"])
    same = (
        "this source"
        if last["kernels"] == kernel_hash()
        else f"ANOTHER source, {last['kernels']}"
    )
    return (
        said
        + f"Layer 4 did not run here; last on {last['device']} at commit {last['commit']}, with {same}"
    )


def there(vector, cupy):
    """Return a sparse vector on the device."""
    return SparseVector(
        cupy.asarray(vector.indices), cupy.asarray(vector.values), vector.length
    )


def back(vector):
    """Return a sparse vector of the device in host memory."""
    assert type(vector.indices).__module__.startswith("cupy"), (
        "the result is not on the device"
    )
    assert type(vector.values).__module__.startswith("cupy"), (
        "the result is not on the device"
    )
    return SparseVector(vector.indices.get(), vector.values.get(), vector.length)


def assert_same(vector, expected):
    """Fail unless a vector of the device is the expected one of the host, bit for bit."""
    here = back(vector)
    assert (here.length, here.dtype) == (expected.length, expected.dtype)
    np.testing.assert_array_equal(here.indices, expected.indices)
    assert here.values.tobytes() == expected.values.tobytes()
