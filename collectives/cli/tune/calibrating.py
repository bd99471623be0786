"""Fit a profile to whole operations: what its parts took alone is not what they take inside one.

A round waits for a partner that has its own work, and for a core where ranks outnumber cores; a kernel finds colder
caches, and pages that were never touched. So small and large operations are timed as they are, and seven figures fitted
to them: seconds of a call, of a further message, of a round and of an allreduce of MPI's beside their bytes; factors of
the kernels, of the links and of MPI's allreduce. A prediction is linear in these, but for a choice of codec, so its
derivatives tell how much of each is in an operation. What is minimised is the sum of the relative errors, and no figure
falls below its least.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import tuning
from collectives.cli.tune.checking import RULE, contestants, of_flat_sums, predicted, random_vector, shuffled
from collectives.cli.tune.measuring import TOO_LONG, once_more, settled
from collectives.profiles import Curve, Profile
from collectives.progress import wait_for
from collectives.transport import endpoint_of
from collectives.tuning import Tuner

CASES = [(1000, 16), (30_000, 3000), (100_000, 200), (300_000, 60_000), (1_000_000, 10_000)]  # lengths and entries
STEP = 1e-3  # of a derivative, of the figure
ROUNDS = 30  # of fitting, each with the weights that the errors of the last one give
SMOOTH = 0.03  # relative errors below count by their square
LEAST = np.array([1e-6, 1e-7, 0.0, 0.0, 0.2, 0.2, 0.2])  # of the figures: less of a part than a fifth is noise

Figures = NDArray[np.float64]


def calibrated(comm: Any, profile: Profile, repeats: int) -> Profile:
    """Return the profile fitted to what operations take on all ranks; all of them call, and get the same one."""
    fixed, endpoint = comm.Dup(), endpoint_of(comm, wait_for)
    endpoint_of(fixed, wait_for).tuner = Tuner()
    endpoint.tuner = Tuner(profile)
    sizes = [endpoint.nodes.count(node) for node in sorted(set(endpoint.nodes))]
    slopes, seconds = [], []
    for length, entries in CASES:
        vector = random_vector(length, min(length, entries), comm.rank)
        calls = {
            name: call for name, call in contestants(comm, fixed, vector, len(sizes)).items() if of_flat_sums(*name)
        }
        expected = {name: partial_seconds(name, vector, sizes) for name in calls}
        brief = {name: call for name, call in calls.items() if expected[name](profile) <= TOO_LONG}
        timed = {name: settled(comm, call) for name, call in brief.items()}
        for turn in range(repeats):
            for each in shuffled(list(timed.values()), turn):
                once_more(comm, each)
        slopes += [derivatives(expected[name], profile) for name in timed]
        seconds += [each.median for each in timed.values()]
    fitted = changed(profile, fit(np.array(slopes), np.array(seconds), LEAST))
    fixed.Free()
    agreed: Profile = comm.bcast(fitted)
    return agreed


def partial_seconds(name: tuple[str, str], vector: Any, sizes: Sequence[int]) -> Callable[[Profile], float]:
    """Return the prediction of an operation as a function of the profile."""
    if name[1] == RULE:
        case = tuning.case_of(vector.length, vector.nnz, vector.value_nbytes, sizes)
        return lambda profile: tuning.of_auto(Tuner(), case, sizes, profile)
    return lambda profile: predicted(*name, vector, sizes, profile) or 0.0


def present(profile: Profile) -> Figures:
    """Return the figures of a profile as it was measured: of rounds and reductions nothing is to be added, yet."""
    return np.array([profile.call, profile.message, 0.0, 0.0, 1.0, 1.0, 1.0])


def changed(profile: Profile, figures: Figures) -> Profile:
    """Return the profile with these figures in place of its own."""
    call, message, a_round, reduction, computing, links, reducing = (float(figure) for figure in figures)
    inside, between = (curve and stretched(curve, links, a_round) for curve in (profile.inside, profile.between))
    kernels = {name: stretched(curve, computing) for name, curve in profile.kernels.items()}
    reduce = stretched(profile.reduce, reducing, reduction)
    return replace(profile, call=call, message=message, inside=inside, between=between, reduce=reduce, kernels=kernels)


def stretched(curve: Curve, factor: float, more: float = 0.0) -> Curve:
    """Return a curve times a factor, plus seconds."""
    return Curve(tuple((size, factor * seconds + more) for size, seconds in curve.points))


def derivatives(seconds: Callable[[Profile], float], profile: Profile) -> Figures:
    """Return by how much a prediction grows with each figure of the profile."""
    now, at = seconds(profile), present(profile)
    steps = np.diag(np.where(at > 0, at, profile.call) * STEP)
    return np.array([(seconds(changed(profile, at + step)) - now) / step.max() for step in steps])


def fit(slopes: Figures, seconds: Figures, least: Figures) -> Figures:
    """Return the figures, none below its least, for which the sum of the relative errors is small.

    slopes: of shape (operations, figures). Squares are weighted by the errors that they leave, round by round.
    """
    relative, aim = slopes / seconds[:, None], 1 - slopes @ least / seconds
    weights = np.ones(seconds.size)
    for _ in range(ROUNDS):
        more = not_negative(relative * weights[:, None], aim * weights)
        weights = 1 / np.sqrt(np.maximum(SMOOTH, np.abs(relative @ more - aim)))
    return least + more


def not_negative(matrix: Figures, aim: Figures) -> Figures:
    """Return the least-squares solution without a negative component: of all subsets of the columns, the best one."""
    best, least = np.zeros(matrix.shape[1]), float(aim @ aim)
    for columns in subsets(matrix.shape[1]):
        found = np.linalg.lstsq(matrix[:, columns], aim, rcond=None)[0]
        error = float(np.sum(np.square(matrix[:, columns] @ found - aim)))
        if (found >= 0).all() and error < least:
            best, least = np.zeros(matrix.shape[1]), error
            best[columns] = found
    return best


def subsets(count: int) -> Iterator[list[int]]:
    """Yield the sets of at least one of so many columns."""
    for several in range(1, count + 1):
        yield from map(list, itertools.combinations(range(count), several))
