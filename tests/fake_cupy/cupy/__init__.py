"""A stand-in for CuPy on machines without a GPU: the part of its interface that mpicomp uses, and as strict.

Arrays live in memory that only this package can reach: the address that they give away,
as a pointer or through ``__cuda_array_interface__``, is mapped without any right to
read or write. Whatever touches it directly, MPI for instance, dies by SIGSEGV as it
would with a device's pointer. MPICOMP_FAKE_VISIBLE=1 gives the real address instead:
that is what an MPI that is CUDA-aware sees.

Copies to and from pinned memory that are asynchronous take place when their stream is
synchronised, not before: what forgets to wait reads poison. Freed memory is filled with
poison too.

What is refused here is refused by CuPy: NumPy arrays in the place of arrays, implicit
copies to the host, arguments and keywords that are not in CuPy's signatures
(signatures.json; tests/support/cupy_signatures.py compares it with the wheel).
"""

from cupy import _functions, cuda, random
from cupy._array import ndarray
from cupy._functions import *  # noqa: F403
from cupy._module import RawKernel, RawModule
from cupy._signatures import surface

__version__ = "0.fake"
FAKE = True
__all__ = [
    "RawKernel",
    "RawModule",
    "cuda",
    "ndarray",
    "random",
    "surface",
    *_functions.__all__,
]
