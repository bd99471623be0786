"""Compressors: a dense gradient in, the entries that travel out. One file a method, one small protocol."""

from mpicomp.compressors.protocol import Compressor
from mpicomp.compressors.quantised import Quantised, quantise
from mpicomp.compressors.sidco import SIDCo
from mpicomp.compressors.topk import TopK

__all__ = ["Compressor", "Quantised", "SIDCo", "TopK", "quantise"]
