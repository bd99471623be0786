"""Begin an operation: check what this rank brings, set the terms, put the algorithm in flight.

Nothing is raised here for a bad vector, k or algorithm: the rank takes part as a failed one, and `all_or_none` raises
at the end of the schedule, on every rank. Only a bad `comm` is raised at once, as there is nobody to tell.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from collectives.agreement import all_or_none
from collectives.channel import Channel, Offer
from collectives.progress import Request, start, wait_for
from collectives.terms import Terms
from collectives.transport import Steps, endpoint_of
from mpicomp.codec import CODECS
from mpicomp.vector import SparseVector

T = TypeVar("T")
Algorithm = Callable[[Offer, Channel], Steps[T]]
Check = Callable[[SparseVector, int], Any]


def begin(
    operation: str,
    algorithms: Mapping[str, Algorithm[T]],
    vector: SparseVector | Exception | None,
    comm: Any,
    algorithm: str,
    *,
    codec: str = "auto",
    follow: bool = False,
    check: Check | None = None,
    **terms: Any,
) -> Request[T]:
    """Put `operation` in flight with what this rank brings.

    algorithms: the choice by name; "auto" takes the first, or what goes by this name. vector: an exception stands for a
    rank whose own step before the collective failed; it is raised here, and CollectiveError on the others. codec:
    see `Channel`; ranks may have different ones. follow: length and dtype are the root's, and the other ranks bring no
    vector. check: raises ValueError or TypeError for what
    else is wrong, given a sound vector and the number of ranks. terms: further ones; of them k, root and seed are
    checked here. k: None takes the largest nnz.
    """
    endpoint = endpoint_of(comm, wait_for)
    if follow and endpoint.rank != terms["root"] and not isinstance(vector, Exception):
        vector = SparseVector.empty(0)
    error = _bad_terms(terms, comm.size) or _bad_codec(codec) or _fault(algorithms, vector, algorithm, check, comm.size)
    if error is not None or not isinstance(vector, SparseVector):
        vector, algorithm, codec, terms = SparseVector.empty(0), "auto", "auto", {}
    name = algorithm if algorithm in algorithms else next(iter(algorithms))
    if not follow:
        terms |= {"length": vector.length, "dtype": str(vector.dtype), "width": vector.width}
    channel = Channel(endpoint, Terms(operation, name, **terms), error, codec=codec)
    offer = Offer(vector, vector.nnz if channel.terms.k is None else channel.terms.k)
    return start(all_or_none(channel, algorithms[name](offer, channel)))


def _fault(
    algorithms: Mapping[str, Any], vector: Any, algorithm: Any, check: Check | None, size: int
) -> Exception | None:
    """Return what is wrong with the vector or the algorithm, as the exception to raise; None when they are sound."""
    if isinstance(vector, Exception):
        return vector
    if not isinstance(vector, SparseVector):
        return TypeError(f"vector is {type(vector).__name__}: expected a SparseVector (see SparseVector.from_dense)")
    if algorithm != "auto" and algorithm not in algorithms:
        return ValueError(f"algorithm is {algorithm!r}: expected one of {list({'auto': None, **algorithms})}")
    try:
        vector.validate()
        if check is not None:
            check(vector, size)
    except (TypeError, ValueError) as error:
        return error
    return None


def _bad_codec(codec: Any) -> Exception | None:
    known = ["auto", *CODECS]
    return None if codec in known else ValueError(f"codec is {codec!r}: expected one of {known}")


def _bad_terms(terms: dict[str, Any], size: int) -> Exception | None:
    """Return what is wrong with the integers among the terms; sound ones become Python's, NumPy's among them."""
    for name, end in (("k", 2**63), ("root", size), ("seed", 2**63)):
        value = terms.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            return TypeError(f"{name} is {value!r}: expected an integer")
        if not 0 <= value < end:
            return ValueError(f"{name} is {value}: expected 0 <= {name} < {end}")
        terms[name] = int(value)
    return None
