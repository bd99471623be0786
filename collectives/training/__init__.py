"""GradientExchange: a Step of Buckets, which Layout makes of tensors and Reduction sums; see docs/contributing/architecture.md."""

from collectives.training.exchange import GradientExchange

__all__ = ["GradientExchange"]
