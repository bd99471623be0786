"""Compressors: a dense gradient in, the entries that travel out. One file a method, one small protocol."""

from mpicomp.compressors.adacomp import AdaComp
from mpicomp.compressors.aggregation_aware import AggregationAware
from mpicomp.compressors.common import Report
from mpicomp.compressors.cyclic_leader import CyclicLeader
from mpicomp.compressors.dense import Dense
from mpicomp.compressors.protocol import Compressor
from mpicomp.compressors.quantised import Quantised, quantise
from mpicomp.compressors.random_k import BlockRandomK, RandomK
from mpicomp.compressors.sampled import SampledTopK, WarmUp
from mpicomp.compressors.sidco import SIDCo
from mpicomp.compressors.threshold import Threshold
from mpicomp.compressors.thresholds import GaussianK, MSTopK, RedSync
from mpicomp.compressors.topk import TopK

__all__ = [
    "AdaComp",
    "AggregationAware",
    "BlockRandomK",
    "Compressor",
    "CyclicLeader",
    "Dense",
    "GaussianK",
    "MSTopK",
    "Quantised",
    "RandomK",
    "RedSync",
    "Report",
    "SIDCo",
    "SampledTopK",
    "Threshold",
    "TopK",
    "WarmUp",
    "quantise",
]
