"""GradientExchange: a Step of Buckets, which Layout makes of tensors and Reduction sums."""

from collectives.exchange.exchange import GradientExchange

__all__ = ["GradientExchange"]
