"""What one rank does to its own gradient: compress it, keep the rest, put the result back. Imports no MPI.

The collectives that the compressed gradients travel by are in the package `collectives`.
"""

from mpicomp.compressors import (
    AdaComp,
    AggregationAware,
    BlockRandomK,
    Compressor,
    CyclicLeader,
    Dense,
    GaussianK,
    MSTopK,
    Quantised,
    RandomK,
    RedSync,
    Report,
    SampledTopK,
    SIDCo,
    Threshold,
    TopK,
    WarmUp,
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
from mpicomp.exchange import GradientExchange, Statistics
from mpicomp.feedback import EF21, ErrorFeedback, Feedback, MomentumCorrection, NoFeedback, StepAhead, TwoWay
from mpicomp.vector import SparseVector

__version__ = "0.1.0"

__all__ = [
    "EF21",
    "AdaComp",
    "AggregationAware",
    "BlockRandomK",
    "CheckError",
    "CodecError",
    "CollectiveError",
    "CollectiveTimeoutError",
    "Compressor",
    "CyclicLeader",
    "DamagedMessageError",
    "Dense",
    "ErrorFeedback",
    "Feedback",
    "GaussianK",
    "GradientExchange",
    "MSTopK",
    "MomentumCorrection",
    "NoFeedback",
    "Quantised",
    "RandomK",
    "RankFailedError",
    "RedSync",
    "Report",
    "SIDCo",
    "SampledTopK",
    "SparseVector",
    "Statistics",
    "StepAhead",
    "Threshold",
    "TopK",
    "TwoWay",
    "WarmUp",
    "quantise",
]
