"""Stand-ins for arrays of JAX and PyTorch, which `make test` does not install.

A stand-in has every attribute of the real array that the library looks up, and each raises as
the real one does: tests/collectives/test_jax.py compares them where JAX and PyTorch are installed.
"""

import ast
import pathlib

import numpy as np

import mpicomp

LOOK_UPS = "hasattr", "getattr"


class Tracer:
    """JAX's base class of the arrays that it traces."""


class DynamicJaxprTracer(Tracer):
    """An array inside of `jax.jit`: it has no values, and its methods raise."""

    dtype = np.dtype(np.float32)

    def is_deleted(self):
        raise TypeError("Abstract tracer value encountered where concrete is expected")

    astype = is_deleted


class Deleted:
    """An array of JAX whose memory was given to the result of a function."""

    dtype = np.dtype(np.float32)

    def is_deleted(self):
        return True

    def __dlpack_device__(self):
        raise RuntimeError("Array has been deleted")

    astype = __dlpack_device__


class Sharded(Deleted):
    """An array of JAX on several devices."""

    def is_deleted(self):
        return False

    def __dlpack_device__(self):
        raise BufferError("__dlpack__ only supported for unsharded arrays.")


class SparseTensor:
    """A sparse tensor of PyTorch."""

    layout = "torch.sparse_coo"
    dtype = "torch.float32"
    requires_grad = False
    is_cpu = is_leaf = True

    def untyped_storage(self):
        raise NotImplementedError("Cannot access storage of SparseTensorImpl")

    float = to = to_dense = __dlpack_device__ = untyped_storage


def looked_up():
    """Return the names of attributes that the library looks up on arrays of other libraries."""
    folder = pathlib.Path(mpicomp.__file__).parent
    nodes = [
        node
        for file in ("arrays/frameworks", "tensors", "vector")
        for node in ast.walk(ast.parse((folder / f"{file}.py").read_text()))
    ]
    names = {
        node.args[1].value
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in LOOK_UPS
        and isinstance(node.args[1], ast.Constant)
    }
    return names | {"__dlpack_device__", "__array_interface__"}


def answers(array):
    """Return which of these attributes an array has."""
    return {name for name in looked_up() if hasattr(array, name)}
