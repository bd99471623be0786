"""Begin an operation: check what this rank brings, set the terms, put the algorithm in flight.

Nothing is raised here for a bad vector, k or algorithm: the rank takes part as a failed one, and `all_or_none` raises
at the end of the schedule, on every rank. Only a bad `comm` is raised at once, as there is nobody to tell.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from collectives.agreement import Steps, Terms, all_or_none
from collectives.channel import Channel, Offer
from collectives.progress import Request, start
from collectives.transport import endpoint_of
from mpicomp.vector import SparseVector

T = TypeVar("T")
Algorithm = Callable[[Offer, Channel], Steps[T]]


def begin(
    operation: str,
    algorithms: Mapping[str, Algorithm[T]],
    vector: SparseVector | Exception,
    comm: Any,
    algorithm: str,
    k: int | None = None,
) -> Request[T]:
    """Put `operation` in flight with what this rank brings.

    algorithms: the choice by name; "auto" takes the first. vector: an exception stands for a rank whose own step
    before the collective failed; it is raised here, and CollectiveError on the others. k: None takes the largest nnz.
    """
    endpoint = endpoint_of(comm)
    error = _fault(algorithms, vector, algorithm, k)
    if error is not None or not isinstance(vector, SparseVector):
        vector, k = SparseVector.empty(0), None
    name = algorithm if error is None and algorithm != "auto" else next(iter(algorithms))
    terms = Terms(operation, name, vector.length, str(vector.dtype), None if k is None else int(k))
    channel = Channel(endpoint, terms, error)
    offer = Offer(vector, vector.nnz if k is None else k)
    return start(all_or_none(channel, algorithms[name](offer, channel)))


def _fault(algorithms: Mapping[str, Any], vector: Any, algorithm: Any, k: Any) -> Exception | None:
    """Return what is wrong with the arguments, as the exception to raise; None when they are sound."""
    try:
        if isinstance(vector, Exception):
            raise vector
        if not isinstance(vector, SparseVector):
            raise TypeError(f"vector is {type(vector).__name__}: expected a SparseVector (see SparseVector.from_dense)")
        if algorithm != "auto" and algorithm not in algorithms:
            raise ValueError(f"algorithm is {algorithm!r}: expected 'auto' or one of {list(algorithms)}")
        _check_k(k)
        vector.validate()
    except Exception as error:
        return error
    return None


def _check_k(k: Any) -> None:
    if k is None:
        return
    if isinstance(k, bool) or not isinstance(k, int | np.integer):
        raise TypeError(f"k is {k!r}: expected an integer, or None for the largest number of entries a rank brings")
    if not 0 <= k < 2**63:
        raise ValueError(f"k is {k}: expected 0 to 2^63 - 1")
