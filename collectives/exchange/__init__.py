"""GradientExchange: correct, compress, reduce, put back.

Bucket     tensors that are one vector, with compressor, feedback and state: what is constant (`mpicomp.bucket`)
Layout     which tensors are in which bucket
Reduction  the sum over the ranks, and the mean that is made of it
Step       all of a step on all ranks, or none of it
"""

from collectives.exchange.exchange import GradientExchange

__all__ = ["GradientExchange"]
