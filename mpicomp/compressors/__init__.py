"""Compressors: select the entries of a dense gradient to send. One file a method; `base` declares the contract.

`mpicomp` exports the names in `__all__`, and `docs/api` describes them; the others are
for those who write a compressor.
"""

from mpicomp.compressors.adacomp import AdaComp
from mpicomp.compressors.aggregation_aware import AggregationAware
from mpicomp.compressors.base import Compressor, Wrapper
from mpicomp.compressors.base import SegmentedCompressor as SegmentedCompressor
from mpicomp.compressors.base import check_compressor as check_compressor
from mpicomp.compressors.chunked import ChunkedTopK
from mpicomp.compressors.dense import Dense
from mpicomp.compressors.quantised import Quantised, quantise
from mpicomp.compressors.sidco import SIDCo
from mpicomp.compressors.topk import TopK
from mpicomp.compressors.warm_up import WarmUp

__all__ = [
    "AdaComp",
    "AggregationAware",
    "ChunkedTopK",
    "Compressor",
    "Dense",
    "Quantised",
    "SIDCo",
    "TopK",
    "WarmUp",
    "Wrapper",
    "quantise",
]
