"""Compressors: select the entries of a dense gradient to send. One file a method; `base` declares the contract."""

from mpicomp.compressors.adacomp import AdaComp
from mpicomp.compressors.aggregation_aware import AggregationAware
from mpicomp.compressors.base import (
    Compressor,
    Report,
    SegmentedCompressor,
    Wrapper,
    check_compressor,
)
from mpicomp.compressors.chunked import ChunkedTopK
from mpicomp.compressors.dense import Dense
from mpicomp.compressors.quantised import Quantised, quantise
from mpicomp.compressors.sidco import SIDCo
from mpicomp.compressors.topk import TopK
from mpicomp.compressors.warm_up import WarmUp
from mpicomp.state import Check, expect_integer, expect_number

__all__ = [
    "AdaComp",
    "AggregationAware",
    "Check",
    "ChunkedTopK",
    "Compressor",
    "Dense",
    "Quantised",
    "Report",
    "SIDCo",
    "SegmentedCompressor",
    "TopK",
    "WarmUp",
    "Wrapper",
    "check_compressor",
    "expect_integer",
    "expect_number",
    "quantise",
]
