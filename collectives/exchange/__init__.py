"""GradientExchange: correct, compress, reduce, put back.

Pipeline   a vector: its tensors, compressor and feedback; what is constant (`mpicomp.pipeline`)
Bucket     the vectors of one message
Transfer   a vector in one step; Flight: a bucket in one step
Step       a step: started, settled, committed or rolled back
"""

from collectives.exchange.exchange import GradientExchange

__all__ = ["GradientExchange"]
