"""Compare what a profile predicts with what is measured, over a grid, and what "auto" takes with what is fastest."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

import collectives
from collectives import cost, tuning
from collectives.cli.tune.measuring import Timed, once_more, settled
from collectives.profiles import Profile
from collectives.progress import wait_for
from collectives.transport import endpoint_of
from collectives.tuning import Tuner
from mpicomp import SparseVector

NEAR_BEST, NEAR_DENSE = 1.15, 1.10  # times the fastest, and times the dense allreduce: what "auto" is to stay below
AUTO, RULE = "auto", "auto, no profile"


@dataclass(frozen=True)
class Checked:
    """One algorithm in one place of the grid; predicted: None for the choice without a profile."""

    operation: str
    algorithm: str
    length: int
    density: float
    seconds: float
    predicted: float | None

    @property
    def error(self) -> float | None:
        """How far off the prediction is, as a share of what was measured."""
        return None if self.predicted is None else abs(self.predicted - self.seconds) / self.seconds

    def __str__(self) -> str:
        told = f"{'-':>11} {'-':>7}"
        if self.predicted is not None and self.error is not None:
            told = f"{1e3 * self.predicted:11.3f} {self.error:7.0%}"
        name = f"{self.operation} {self.algorithm}"
        return f"{self.length:>10} {self.density:8g}  {name:40} {1e3 * self.seconds:11.3f} {told}"


HEADER = f"{'length':>10} {'density':>8}  {'':40} {'measured ms':>11} {'predicted':>11} {'error':>7}"


def rows(
    comm: Any, profile: Profile, lengths: Sequence[int], densities: Sequence[float], repeats: int, seconds: float = 0.0
) -> Iterator[Checked]:
    """Yield what was measured and predicted; all ranks call, and have the same profile.

    All of a place take turns: at least so many, and on until they have taken so many seconds together.
    """
    endpoint = endpoint_of(comm, wait_for)
    endpoint.tuner = Tuner(profile)
    fixed = comm.Dup()
    endpoint_of(fixed, wait_for).tuner = Tuner()
    sizes = [endpoint.nodes.count(node) for node in sorted(set(endpoint.nodes))]
    for length in lengths:
        for density in densities:
            vector = random_vector(length, max(1, round(length * density)), comm.rank)
            timed = {name: settled(comm, call) for name, call in contestants(comm, fixed, vector, len(sizes)).items()}
            take_turns(comm, list(timed.values()), repeats, seconds)
            for (operation, algorithm), each in timed.items():
                expected = predicted(operation, algorithm, vector, sizes, profile)
                yield Checked(operation, algorithm, length, density, each.median, expected)
    fixed.Free()


def take_turns(comm: Any, calls: Sequence[Timed], repeats: int, seconds: float) -> None:
    """Time calls in turns; rank 0 says when it has been long enough."""
    began, turn = time.perf_counter(), 0
    while comm.bcast(turn < repeats or time.perf_counter() - began < seconds):
        for each in shuffled(calls, turn):
            once_more(comm, each)
        turn += 1


def shuffled(calls: Sequence[Timed], turn: int) -> list[Timed]:
    """Return the calls in the order of a turn, the same on all ranks: else one always comes behind the slowest."""
    return [calls[place] for place in np.random.default_rng([5, turn]).permutation(len(calls))]


def random_vector(length: int, entries: int, seed: int) -> SparseVector:
    """Return a vector of so many normal values at independent random places."""
    rng = np.random.default_rng([4, seed])
    indices = np.sort(rng.choice(length, entries, replace=False, shuffle=False))
    return SparseVector(indices, rng.standard_normal(entries).astype(np.float32), length)


def contestants(comm: Any, fixed: Any, vector: SparseVector, nodes: int) -> dict[tuple[str, str], Callable[[], Any]]:
    """Return what is measured, by operation and algorithm."""
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    for operation, algorithms in cost.OPERATIONS.items():
        function, names = getattr(collectives, operation), list(algorithms)
        if operation == "sparse_allreduce":
            several = 1 < nodes < comm.size
            names = [name for name in names if several or not name.startswith("node")] + [AUTO]
            calls[operation, RULE] = partial(function, vector, fixed)
        for name in names:
            calls[operation, name] = partial(function, vector, comm, algorithm=name)
    calls["dense_allreduce", "mpi"] = partial(collectives.dense_allreduce, vector.to_dense(), comm)
    return calls


def of_flat_sums(operation: str, algorithm: str) -> bool:
    """Return whether an algorithm is one that the model follows step by step, without a choice of another in it."""
    return operation != "sparse_allreduce" or algorithm in (*cost.FLAT, "dense_mpi", RULE)


def predicted(
    operation: str, algorithm: str, vector: SparseVector, nodes: Sequence[int], profile: Profile
) -> float | None:
    """Return the seconds that the model gives; None for the choice without a profile, and for unknown links."""
    case = tuning.case_of(vector.length, vector.nnz, vector.value_nbytes, nodes)
    tuner = Tuner(profile)
    if algorithm == RULE or not tuner.knows(nodes):
        return None
    if algorithm == AUTO:
        return tuner.automatic(case, nodes)[1].seconds
    return tuning.of_named(operation, algorithm, case, nodes, profile)


def verdict(checked: Sequence[Checked]) -> dict[str, float]:
    """Return the median error, and in what share of the grid "auto" is near the best and not behind dense."""
    errors = [row.error for row in checked if row.error is not None]
    places: dict[tuple[int, float], dict[tuple[str, str], float]] = {}
    for row in checked:
        places.setdefault((row.length, row.density), {})[row.operation, row.algorithm] = row.seconds
    shares: dict[str, list[bool]] = {"best": [], "dense": [], "rule_best": [], "rule_dense": []}
    for place in places.values():
        sums = {name: seconds for (operation, name), seconds in place.items() if operation == "sparse_allreduce"}
        dense = place["dense_allreduce", "mpi"]
        best = min(seconds for name, seconds in sums.items() if name not in (AUTO, RULE))
        for prefix, name in ("", AUTO), ("rule_", RULE):
            shares[prefix + "best"].append(sums[name] <= NEAR_BEST * best)
            shares[prefix + "dense"].append(sums[name] <= NEAR_DENSE * dense)
    return {"median_error": statistics.median(errors)} | {name: statistics.mean(kept) for name, kept in shares.items()}


def summary(checked: Sequence[Checked]) -> str:
    """Return the verdict as text: by operation, and of the whole grid."""
    found = verdict(checked)
    by_operation = []
    for operation in cost.OPERATIONS:
        errors = [row.error for row in checked if row.operation == operation and row.error is not None]
        by_operation.append(f"{operation} {statistics.median(errors):.0%}")
    return (
        f"median error of the model {found['median_error']:.0%}: {', '.join(by_operation)}\n"
        f'"auto" is within 15 % of the best algorithm in {found["best"]:.0%} of the grid, and within 10 % of the dense '
        f"allreduce or better in {found['dense']:.0%}\n"
        f"without a profile it would be in {found['rule_best']:.0%} and {found['rule_dense']:.0%}\n"
    )


def as_rows(checked: Sequence[Checked]) -> list[dict[str, Any]]:
    """Return the rows as JSON has them."""
    return [{**asdict(row), "error": row.error} for row in checked]
