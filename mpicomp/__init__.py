"""The computation of one rank on its own gradient: compression and error feedback. Imports no MPI.

The communication, `GradientExchange` and the collectives, is in the package
`collectives`. The names in `__all__` of the two are public; all others are internal.
"""

from mpicomp import compressors, feedback
from mpicomp.bases import Basis, Hadamard
from mpicomp.compressors import *  # noqa: F403  (the names in its __all__)
from mpicomp.compressors.common import at_positions, finite_vector
from mpicomp.errors import CodecError
from mpicomp.feedback import *  # noqa: F403
from mpicomp.patches import Patch, changes
from mpicomp.vector import SparseVector
from mpicomp.verify import verify_compressor, verify_feedback

__version__ = "0.1.0"

__all__ = [
    "Basis",
    "CodecError",
    "Hadamard",
    "Patch",
    "SparseVector",
    "at_positions",
    "changes",
    "finite_vector",
    "verify_compressor",
    "verify_feedback",
]
__all__ += compressors.__all__
__all__ += feedback.__all__
