"""The computation of one rank on its own gradient: compression and error feedback. Imports no MPI.

The communication, `GradientExchange` and the collectives, is in the package
`collectives`.
"""

from mpicomp.bases import Basis, Hadamard
from mpicomp.compressors import (
    AdaComp,
    AggregationAware,
    ChunkedTopK,
    Compressor,
    Dense,
    Quantised,
    Report,
    SIDCo,
    TopK,
    WarmUp,
    Wrapper,
    quantise,
)
from mpicomp.errors import (
    CheckError,
    CodecError,
    CollectiveError,
    CollectiveTimeoutError,
    DamagedMessageError,
    RankFailedError,
)
from mpicomp.feedback import (
    ErrorFeedback,
    Feedback,
    MomentumCorrection,
    NoFeedback,
    StepAhead,
)
from mpicomp.vector import SparseVector

__version__ = "0.1.0"

__all__ = [
    "AdaComp",
    "AggregationAware",
    "Basis",
    "CheckError",
    "ChunkedTopK",
    "CodecError",
    "CollectiveError",
    "CollectiveTimeoutError",
    "Compressor",
    "DamagedMessageError",
    "Dense",
    "ErrorFeedback",
    "Feedback",
    "Hadamard",
    "MomentumCorrection",
    "NoFeedback",
    "Quantised",
    "RankFailedError",
    "Report",
    "SIDCo",
    "SparseVector",
    "StepAhead",
    "TopK",
    "WarmUp",
    "Wrapper",
    "quantise",
]
