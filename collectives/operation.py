"""Begin an operation: check what this rank contributes, set the terms, put the algorithm in flight.

Whatever looks at the caller's arguments runs in one `try`, before any message: if it raises, the rank does not begin,
but tells the others, and `all_or_none` raises on every rank. Algorithms take what the caller asked for from the offer
and the terms of their channel, which are sound. Only a bad `comm` is raised at once, as there is nobody to tell.
"""

from collections.abc import Callable, Mapping
from operator import index
from typing import Any, TypeVar

from numpy.typing import NDArray

from collectives.agreement import all_or_none
from collectives.channel import Channel, Offer
from collectives.checking import checked
from collectives.messages import Steps
from collectives.progress import Request, start, wait_for
from collectives.terms import Terms
from collectives.transport import endpoint_of
from mpicomp.arrays import DTYPE_NAMES, is_array, sparse_remedy
from mpicomp.codec import CODECS
from mpicomp.vector import SparseVector

T = TypeVar("T")
Algorithm = Callable[[Offer, Channel], Steps[T]]
Prepare = Callable[[Any, dict[str, Any], int], SparseVector]

NOTHING = SparseVector.empty(0)


def sound(vector: Any, terms: dict[str, Any], size: int) -> SparseVector:
    """Return the vector if it is a SparseVector whose entries are in order, in range and finite; raise otherwise."""
    if not isinstance(vector, SparseVector):
        raise TypeError(f"vector is {type(vector).__name__}: expected a SparseVector{_remedy(vector)}")
    vector.validate()
    return vector


def _remedy(vector: Any) -> str:
    """Return how to make a SparseVector of what is none."""
    if remedy := sparse_remedy(vector):
        return f"; {remedy}"
    if is_array(vector):
        return ", not a dense array; compress it first: TopK(density=0.01).compress(array)"
    return " (see SparseVector.from_dense)"


def begin(
    operation: str,
    algorithms: Mapping[str, Algorithm[T]],
    brings: Any,
    comm: Any,
    algorithm: Any,
    *,
    codec: Any = "auto",
    follow: bool = False,
    prepare: Prepare = sound,
    least_k: int = 0,
    sums: list[NDArray[Any]] | None = None,
    **terms: Any,
) -> Request[T]:
    """Put `operation` in flight with what this rank brings.

    algorithms: the choice by name; "auto" takes the first, or what goes by this name. brings: a vector, or what
    `prepare` makes one of; an exception stands for a rank whose own step before the collective failed: it is raised
    here, and CollectiveError on the others. codec: see `Channel`; ranks may have different ones. follow: length and
    dtype are the root's, and what the other ranks bring is not looked at, but for where it lives. prepare: is given
    `brings`, the terms, which it may change, and the number of ranks; returns the vector, or raises. least_k: the
    smallest k that is valid. sums: where the
    vector only stands for an array that MPI sums, the list that `prepare` puts it in. terms: further ones; those that
    are integers are checked here. Without a k the operation takes the largest nnz.
    """
    endpoint = endpoint_of(comm, wait_for)
    vector, error = NOTHING, brings if isinstance(brings, Exception) else None
    try:
        name = _known("algorithm", algorithm, algorithms)
        codec = _known("codec", codec, CODECS)
        terms = _integers(terms, endpoint.size, least_k)
        if error is None and not (follow and endpoint.rank != terms["root"]):
            vector = prepare(brings, terms, endpoint.size)
    except Exception as raised:  # whatever it is: the other ranks have to hear of it
        error = raised.with_traceback(None) if error is None else error  # its frames would hold the vector
    if error is not None:
        vector, name, codec, terms = NOTHING, "auto", "auto", {}
    if name not in algorithms:
        name = next(iter(algorithms))
    if not follow:
        terms |= {"length": vector.length, "dtype": DTYPE_NAMES[vector.dtype], "width": vector.width}
    place = brings.values if follow and isinstance(brings, SparseVector) else vector.values
    channel = Channel(endpoint, Terms(operation, name, **terms), error, codec=codec, beside=place)
    offer = Offer(vector, vector.nnz if channel.terms.k is None else channel.terms.k)
    steps = algorithms[name](offer, channel)
    if endpoint.checked:
        return start(checked(channel, steps, vector if sums is None else sums), channel)
    return start(all_or_none(channel, steps), channel)


def _known(what: str, name: Any, names: Mapping[str, Any]) -> str:
    if not (isinstance(name, str) and (name == "auto" or name in names)):
        raise ValueError(f"{what} is {name!r}: expected one of {list(dict.fromkeys(['auto', *names]))}")
    return name


def _integers(terms: dict[str, Any], size: int, least_k: int) -> dict[str, Any]:
    """Make the integers among the terms Python's; TypeError or ValueError for what is none, or out of range."""
    for name, least, end in (("k", least_k, 2**63), ("root", 0, size), ("seed", 0, 2**63)):
        if name in terms:
            terms[name] = _integer(name, terms[name], least, end)
    return terms


def _integer(name: str, value: Any, least: int, end: int) -> int:
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} is {value!r}: expected an integer")
    if not least <= number < end:
        remedy = "; from a density take max(1, round(density * length))" if least else ""
        raise ValueError(f"{name} is {number}: expected {least} <= {name} < {end}{remedy}")
    return number
