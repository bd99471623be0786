"""Partitions of the index space into shares, ranges given by their bounds: pure functions, the same on every rank.

Owner r has bounds[r] <= index < bounds[r + 1].
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from operator import index
from typing import Any

import numpy as np

from mpicomp.arrays import Array
from mpicomp.arrays.device import to_device_of
from mpicomp.vector import SparseVector, places_of

# Samples for each rank and share: the bounds are then off by a few per cent of a share.
SAMPLES_A_SHARE = 16
# Samples of a rank, which all ranks receive: those of P ranks put a bound off by
# sqrt(P) / 900 of a share.
MOST_SAMPLES = 256
# Entries for each sample, at least: samples stay a few per cent of what is sent.
SAMPLED_ENTRIES = 16
# Largest share over the mean share, at most, with which equal ranges are kept.
SKEW = 1.25


Bounds = tuple[int, ...]


def cut(vector: SparseVector, bounds: Bounds) -> list[SparseVector]:
    """Return the part of each owner, as views; indices stay as they are."""
    places = places_of(vector, bounds)
    return [
        SparseVector.trusted(
            vector.indices[start:end], vector.values[start:end], vector.length
        )
        for start, end in pairwise(places)
    ]


def equal_bounds(length: int, size: int) -> Bounds:
    """Return the bounds of `size` ranges whose lengths differ by one at most."""
    # Python's integers do not overflow; 64 bits may not suffice.
    return tuple(length * owner // size for owner in range(size + 1))


def likely(mean: float, size: int) -> int:
    """Return a likely upper bound of the entries in each of `size` shares with a mean, if distributed at random.

    By Bernstein's inequality the probability that any share holds more is below
    exp(-2); measured, it is under 2 %.
    """
    bound = 2 * math.log(size) + 4
    return math.ceil(mean + math.sqrt(bound * mean) + bound / 3) if mean else 0


def given_bounds(bounds: Any, length: int, size: int) -> Bounds:
    """Return the caller's bounds as integers of Python; ValueError or TypeError unless they cover the index space."""
    try:
        edges = tuple(index(bound) for bound in bounds)
    except TypeError as error:
        raise TypeError(
            f"partition is {bounds!r}: expected {size + 1} integers ({error})"
        ) from None
    if len(edges) != size + 1 or (edges[0], edges[-1]) != (0, length):
        ends = f" from {edges[0]} to {edges[-1]}" if edges else ""
        raise ValueError(
            f"partition has {len(edges)} bounds{ends}: expected {size + 1} from 0 to the length {length}"
        )
    for start, end in pairwise(edges):
        if start > end:
            raise ValueError(
                f"partition has bounds that decrease, {start} before {end}: expected them in order"
            )
    return edges


def sample(indices: Array, rank: int, size: int) -> Array:
    """Return evenly spaced samples of a rank's indices, for quantiles between `size` shares.

    One in each of equal runs of entries, at an offset that depends on the rank: equal
    supports have different samples.
    """
    edges = _run_edges(
        indices.size,
        min(SAMPLES_A_SHARE * size, MOST_SAMPLES, indices.size // SAMPLED_ENTRIES),
    )
    chosen: Array = indices[
        to_device_of(
            edges[:-1] + np.diff(edges) * (2 * rank + 1) // (2 * size), indices
        )
    ]
    return chosen


def balanced_bounds(
    samples: Sequence[Array], counts: Sequence[int], length: int, size: int
) -> Bounds:
    """Return the bounds of shares with about equal numbers of entries, from every rank's `sample` and entries.

    These are `equal_bounds`, if no share has over `SKEW` times the mean, else quantiles
    of the samples.
    """
    equal = equal_bounds(length, size)
    places = np.concatenate(samples)
    if not places.size:
        return equal
    runs = [
        np.diff(_run_edges(count, chosen.size))
        for chosen, count in zip(samples, counts, strict=True)
    ]
    order = np.argsort(places, kind="stable")
    places = places[order]
    # Estimated number of entries up to each sample.
    entries = np.cumsum(np.concatenate(runs)[order])
    total = int(entries[-1])
    below = np.concatenate([[0], entries])[
        np.searchsorted(places, np.array(equal, places.dtype))
    ]
    if np.diff(below).max() * size <= SKEW * total:
        return equal
    inner = np.searchsorted(
        entries, [total * owner // size for owner in range(1, size)]
    )
    return (0, *places[inner].tolist(), length)


def _run_edges(count: int, runs: int) -> Array:
    """Return the edges of `runs` equal runs of `count` entries. 64 bits: count is below 2^63 / runs."""
    edges: Array = np.arange(runs + 1, dtype=np.int64) * count // max(1, runs)
    return edges
