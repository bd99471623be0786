"""The state machine of faults, P of them at a time, whose notices are delivered in any order; no MPI."""

import itertools
import json

import numpy as np
import pytest

from collectives import (
    CollectiveError,
    CollectiveTimeoutError,
    DamagedMessageError,
    RankFailedError,
)
from collectives.faults.errors import NotFiniteError, StepSkippedError
from collectives.faults.state import Faults, disagreement, named_ranks, report

SIZES = (1, 2, 3, 4, 5, 7, 8)
LIMIT = 5.0  # seconds: the timeout
NO_LONGER = "The library no longer uses this communicator: "


class Ranks:
    """P machines, and the notices between them. Absent ranks neither send nor receive."""

    def __init__(self, size, absent=(), operation="sparse_allreduce"):
        self.machines, self.absent, self.operation = (
            [Faults(r, size) for r in range(size)],
            set(absent),
            operation,
        )
        self.live = [rank for rank in range(size) if rank not in self.absent]
        self.waiting = {rank: [(rank + 1) % size] for rank in range(size)}
        self.under_way = []  # (source, dest, notice)

    def give_up(self, rank, **why):
        """Have a rank give up; its notice is under way to all others."""
        notice = self.machines[rank].give_up(
            self.operation, 2, self.waiting[rank], **why
        )
        if notice is not None:
            self.under_way += [
                (rank, dest, notice) for dest in self.live if dest != rank
            ]

    def deliver(self, place):
        """Deliver a notice; a rank that has sent none yet answers."""
        source, dest, notice = self.under_way.pop(place)
        self.machines[dest].receive(source, notice)
        self.give_up(dest)

    def errors(self):
        """Return what the live ranks raise; all are finished, and none waits for a rank that cannot answer."""
        assert not self.under_way
        for rank in self.live:
            assert self.machines[rank].finished
            assert self.machines[rank].awaited <= self.absent
        return {rank: self.machines[rank].error() for rank in self.live}


def schedules(start, limit=60):
    """Yield the machines after each order of delivery, depth first; beyond `limit` of them, after as many random ones.

    start: returns the machines after their first events.
    """
    choices = []
    for _ in range(limit):
        ranks, counts = delivered(start(), choices)
        yield ranks
        while choices and choices[-1] + 1 == counts[len(choices) - 1]:
            choices.pop()
        if not choices:
            return
        choices[-1] += 1
    rng = np.random.default_rng(1)
    for _ in range(limit):
        yield delivered(start(), [], rng)[0]


def delivered(ranks, choices, rng=None):
    """Deliver all notices; return the machines, and the number of alternatives at each choice.

    choices: the places to choose among the notices under way; the first ones, or random
    ones, are added to it.
    """
    counts = []
    while ranks.under_way:
        counts.append(len(ranks.under_way))
        assert len(counts) <= len(ranks.live) ** 2, "a rank sends one notice"
        if len(counts) > len(choices):
            choices.append(0 if rng is None else int(rng.integers(counts[-1])))
        ranks.deliver(choices[len(counts) - 1])
    return ranks, counts


@pytest.mark.parametrize("size", SIZES)
def test_absent_ranks_are_named_by_all_others_in_every_order_of_notices(size):
    for absent in subsets(size, of_all=False):
        live = sorted(set(range(size)) - absent)
        for expired in (live, live[:1], live[-1:]):  # the deadline of all, of one

            def start(absent=absent, expired=expired):
                ranks = Ranks(size, absent)
                for rank in expired:
                    ranks.give_up(rank, waited=LIMIT)
                return ranks

            for ranks in schedules(start, limit=20):
                for rank, error in ranks.errors().items():
                    assert type(error) is CollectiveTimeoutError
                    assert (
                        f"; {named_ranks(absent)} did not respond within 5 s. {NO_LONGER}"
                        in str(error)
                    )
                    own = "sparse_allreduce timed out after 5 s in round 2, waiting for rank "
                    told = "sparse_allreduce stopped in round 2, waiting for rank "
                    assert str(error).startswith(own if rank in expired else told)
                    assert (
                        rank in expired
                        or f"{named_ranks(expired)} timed out after 5" in str(error)
                        or len(live) > 2
                    )


@pytest.mark.parametrize("size", SIZES)
def test_ranks_that_wait_for_each_other_are_all_named_with_what_they_wait_for(size):
    def start():
        ranks = Ranks(size)
        ranks.give_up(0, waited=LIMIT)
        return ranks

    for ranks in schedules(start):
        for error in ranks.errors().values():
            said = [
                f"rank {r} waits in round 2 of sparse_allreduce for rank {(r + 1) % size}"
                for r in range(size)
            ]
            assert f"; all ranks responded: {'; '.join(said)}. {NO_LONGER}" in str(
                error
            )


@pytest.mark.parametrize("size", SIZES)
def test_damage_is_raised_by_all_and_names_who_received_it(size):
    for damaged in subsets(size, of_all=True):

        def start(damaged=damaged):
            ranks = Ranks(size)
            for rank in damaged:
                ranks.give_up(rank, damage=f"no. {rank}")
            # a deadline elsewhere, where it is another rank
            ranks.give_up((max(damaged) + 1) % size, waited=LIMIT)
            return ranks

        for ranks in schedules(start, limit=10):
            found = "; ".join(f"rank {rank}: no. {rank}" for rank in sorted(damaged))
            for error in ranks.errors().values():
                assert type(error) is DamagedMessageError
                assert str(error).startswith(
                    f"sparse_allreduce stopped in round 2. {found}. {NO_LONGER}"
                )


EVENTS = {
    "deadline": (
        lambda faults: faults.give_up("first", 1, [], waited=LIMIT),
        CollectiveTimeoutError,
    ),
    "damage": (
        lambda faults: faults.give_up("first", 1, [], damage="cut"),
        DamagedMessageError,
    ),
    "death": (
        lambda faults: faults.die("first was interrupted in round 1"),
        RankFailedError,
    ),
    "shrink": (lambda faults: faults.shrink(), RankFailedError),
    "free": (lambda faults: faults.free("first"), CollectiveError),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("one", "other"), list(itertools.product(EVENTS, EVENTS)))
def test_the_first_event_decides_and_a_second_one_changes_nothing(size, one, other):
    for read in (False, True):  # whether the error is raised between the two
        first, alone = (Faults(size - 1, size) for _ in range(2))
        for faults in (first, alone):
            EVENTS[one][0](faults)
        if read:
            first.error()
        assert EVENTS[other][0](first) is None, "no further notice"
        raised = first.error()
        assert (type(raised), str(raised)) == (EVENTS[one][1], str(alone.error()))
        assert not first.awaited
        for rank in range(size - 1):
            first.receive(rank, json.dumps({}))
        assert str(first.error()) == str(raised)
        assert first.error() is not raised, "a traceback belongs to one raise"


@pytest.mark.parametrize("size", SIZES[1:])
def test_the_dead_are_named_and_not_awaited(size):
    for dead in subsets(size - 1, of_all=True):  # the last rank lives
        faults = Faults(size - 1, size)
        faults.die("sparse_allgather was interrupted in round 1")
        faults.identify(dead)
        said = f"sparse_allgather was interrupted in round 1: {named_ranks(dead)} died. {NO_LONGER}collectives.shrink"
        assert str(faults.error()).startswith(said)
        late = Faults(size - 1, size)
        late.give_up("sparse_allgather", 1, dead, waited=LIMIT)
        late.identify(dead)
        assert late.awaited == set(range(size - 1)) - dead
        assert f"; {named_ranks(dead)} died" in str(late.error())
    unknown = Faults(0, size)
    unknown.die("x")
    assert "x: a rank died." in str(unknown.error())


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_late_rank_is_told_who_timed_out_waiting_for_it(size):
    late, others = Faults(size - 1, size), range(size - 1)
    for rank in others:  # all but rank 0 wait for it, if there are several
        awaited = [size - 1] if rank or size == 2 else [1]
        late.receive(
            rank, Faults(rank, size).give_up("sparse_bcast", 1, awaited, waited=LIMIT)
        )
    assert not late.finished, (
        "receiving is no event of this rank: it gives up as soon as it looks"
    )
    late.give_up("sparse_bcast", 0, [])
    who = f"{named_ranks(others[size > 2 :])} timed out after 5 s, waiting for rank {size - 1}; all ranks responded"
    assert str(late.error()).startswith(
        f"sparse_bcast was called on rank {size - 1} after the deadline of the others: {who}"
    )


def test_a_usable_communicator_awaits_nobody_and_one_rank_waits_for_mpi():
    faults = Faults(0, 1)
    assert (faults.finished, faults.awaited) == (False, set())
    faults.give_up("dense_allreduce", 1, [], waited=LIMIT)
    assert (
        "timed out after 5 s in round 1, waiting for MPI; all ranks responded: rank 0 waits"
        in str(faults.error())
    )


def call(**changes):
    signature = {
        "operation": "gtopk_allreduce",
        "length": 10,
        "width": None,
        "k": 5,
        "support": None,
    }
    return signature | changes


def reported(signature, error):
    """Return a report as the other ranks receive it."""
    return json.loads(report(signature, error))


@pytest.mark.parametrize("size", SIZES)
def test_bad_arguments_and_arguments_that_differ_are_named_with_their_ranks(size):
    """Of one operation: each rank decides from the same reports, and no communicator is finished."""
    for bad, other in itertools.product(range(size), range(size)):
        reports = [
            reported(call(k=6) if rank == other else call(), None)
            for rank in range(size)
        ]
        reports[bad] = reported(call(length=0), ValueError("no"))
        error = str(disagreement("gtopk_allreduce", reports))
        assert error.startswith(
            f"gtopk_allreduce raised on all {size} ranks, nothing was changed. rank {bad}: ValueError: no"
        )
        sound = sorted({*range(size)} - {bad, other})
        differ = bad != other and sound
        given = {tuple(sound): 5, (other,): 6}
        who = "; ".join(
            f"{given[ranks]} on {named_ranks(ranks)}"
            for ranks in sorted(given)
            if differ
        )
        assert error.endswith(
            f". k must be the same on all ranks, got {who}" if differ else ": no"
        )


@pytest.mark.parametrize(("calls", "said"), [
    ([{}, {"length": 12}, {}, {"k": None}],
     "length must be the same on all ranks, got 10 on ranks 0, 2, 3; 12 on rank 1. "
     "k must be the same on all ranks, got 5 on ranks 0-2; None on rank 3"),
    ([{}, {"operation": "sparse_bcast", "k": None, "length": 3}],
     "operation must be the same on all ranks, got gtopk_allreduce on rank 0; sparse_bcast on rank 1: make and step "
     "exchanges and loops, and call collectives, in the same order on all ranks"),
    ([{"support": 5}, {"support": 7}, {"support": 5}],
     "support must be the same on all ranks, got 5 on ranks 0, 2; 7 on rank 1"),
])  # fmt: skip
def test_what_follows_from_a_difference_is_not_compared(calls, said):
    reports = [reported(call(**changes), None) for changes in calls]
    assert (
        str(disagreement("x", reports))
        == f"x raised on all {len(calls)} ranks, nothing was changed. {said}"
    )


def test_a_step_is_skipped_only_where_nothing_else_is_wrong():
    skip, other = (
        reported(call(), NotFiniteError("nan")),
        reported(call(), ValueError("no")),
    )
    sound, differs = reported(call(), None), reported(call(k=6), None)
    for reports in ([skip], [sound, skip], [skip, skip, sound]):
        assert type(disagreement("x", reports)) is StepSkippedError
    for reports in (
        [skip, other],
        [skip, sound, differs],
        [sound, differs],
        [sound, other],
    ):
        assert type(disagreement("x", reports)) is CollectiveError


def test_an_error_that_cannot_be_printed_is_reported_all_the_same():
    class MuteError(Exception):
        def __str__(self):
            raise KeyError

    assert "rank 0: MuteError: (it cannot be printed)" in str(
        disagreement("x", [reported(call(), MuteError())])
    )


def test_runs_of_ranks_are_joined():
    named = [named_ranks(ranks) for ranks in ([3], [1, 0], [0, 1, 2, 5, 7, 8, 9])]
    assert named == ["rank 3", "ranks 0, 1", "ranks 0-2, 5, 7-9"]


def subsets(size, *, of_all):
    """Return the nonempty sets of ranks, at most 40 of them; `of_all`: all ranks together are one of them."""
    sets = [
        set(each)
        for count in range(1, size + of_all)
        for each in itertools.combinations(range(size), count)
    ]
    return (
        sets
        if len(sets) <= 40
        else [
            sets[at] for at in np.random.default_rng(size).choice(len(sets), 40, False)
        ]
    )
