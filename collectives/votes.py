"""Votes: how many ranks brought each entry of a sum.

A value travels as the row (value, 1), so that a sum of rows counts as it adds, in whatever algorithm. It costs the
bytes of one more value an entry. Counts are exact up to 2^11 ranks in float16, 2^24 in float32, 2^53 in float64.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from collectives.channel import Channel, Offer
from collectives.messages import Steps
from collectives.operation import Algorithm, Prepare
from mpicomp.arrays import namespace
from mpicomp.vector import SparseVector


def counting(algorithms: Mapping[str, Algorithm[Any]]) -> dict[str, Algorithm[Any]]:
    """Return algorithms that return the sum and its votes where the terms ask for them, from ones that sum rows."""
    return {name: partial(_counted, algorithm) for name, algorithm in algorithms.items()}


def with_votes(prepare: Prepare) -> Prepare:
    """Return a `prepare` that also looks at the term `votes`, and adds a column of ones where it is true."""

    def prepared(brings: Any, terms: dict[str, Any], size: int) -> SparseVector:
        vector, votes = prepare(brings, terms, size), terms["votes"]
        if not isinstance(votes, bool):
            raise TypeError(f"votes is {votes!r}: expected True or False")
        terms["votes"] = ("of numbers" if vector.width is None else "of rows") if votes else False
        return _with_ones(vector, size) if votes else vector

    return prepared


def _with_ones(vector: SparseVector, size: int) -> SparseVector:
    exact = 2 ** (np.finfo(vector.dtype).nmant + 1)
    if size > exact:
        raise ValueError(f"got votes of {size} ranks in {vector.dtype}: expected at most {exact}; use a wider dtype")
    rows = vector.values.reshape(vector.nnz, 1 if vector.width is None else vector.width)
    counted = np.concatenate([rows, namespace(rows).ones((vector.nnz, 1), vector.dtype)], axis=1)
    return SparseVector(vector.indices, counted, vector.length)


def _counted(algorithm: Algorithm[Any], offer: Offer, channel: Channel) -> Steps[Any]:
    total = yield from algorithm(offer, channel)
    if total is None or not channel.terms.votes:
        return total
    values, votes = total.values[:, :-1], total.values[:, -1].astype(np.int64)
    if channel.terms.votes == "of numbers":
        values = values[:, 0]
    return SparseVector(total.indices, values.copy(), total.length), votes
