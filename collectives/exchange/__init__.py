"""GradientExchange: correct, compress, reduce, put back.

Bucket     tensors that are one vector, with compressor, feedback and state: what is constant (`mpicomp.bucket`)
Layout     which tensors are in which bucket
Flight     a bucket in a step
Step       a step: started, settled, committed or rolled back
"""

from collectives.exchange.exchange import GradientExchange

__all__ = ["GradientExchange"]
