"""What every rank has to bring alike to an operation."""

from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple


class Terms(NamedTuple):
    """What every rank has to bring alike to one operation; None where the call leaves it open."""

    operation: str
    algorithm: str
    votes: str | bool | None = None
    length: int | None = None
    dtype: str | None = None
    width: int | None = None
    k: int | None = None
    root: int | None = None
    partition: str | None = None
    seed: int | None = None
    support: int | None = None


@lru_cache(maxsize=256)
def digest(terms: Terms) -> int:
    """Return the terms as 64 bits, signed: what stands for them in a message."""
    return int.from_bytes(blake2b(repr(terms).encode(), digest_size=8).digest(), "little", signed=True)
