from collectives.agreement import named_ranks, verdict
from collectives.terms import Terms, digest

SOUND = Terms("gtopk_allreduce", "recursive_doubling", length=10, dtype="float32", k=5)
TERMS = SOUND._asdict()


def report(error=None, **changes):
    return {"terms": TERMS | changes, "error": error}


def test_the_verdict_names_who_brought_what():
    assert verdict("gtopk_allreduce", [report(), report(length=12), report(), report(k=None)]) == (
        "gtopk_allreduce raised on all 4 ranks, nothing was changed. "
        "length must be the same on all ranks, got 10 on ranks 0, 2, 3; 12 on rank 1. "
        "k must be the same on all ranks, got 5 on ranks 0-2; None on rank 3"
    )


def test_what_a_rank_with_an_error_brought_is_not_compared():
    said = verdict("sparse_allgather", [report("ValueError: no", length=0), report(), report()])
    assert said == "sparse_allgather raised on all 3 ranks, nothing was changed. rank 0: ValueError: no"


def test_where_the_operation_differs_the_rest_is_not_compared():
    said = verdict("sparse_bcast", [report(), report(operation="sparse_bcast", k=None, length=3)])
    assert said.endswith(
        "operation must be the same on all ranks, got gtopk_allreduce on rank 0; sparse_bcast on rank 1"
    )


def test_where_votes_differ_the_column_that_they_add_is_not_compared():
    said = verdict("sparse_allreduce", [report(votes=False), report(votes="of numbers", width=2)])
    assert said.endswith("votes must be the same on all ranks, got False on rank 0; of numbers on rank 1")


def test_plans_that_differ():
    assert verdict("x", [report(support=5), report(support=7), report(support=5)]).endswith(
        "the supports differ: one on ranks 0, 2, another on rank 1"
    )


def test_every_term_has_its_part_in_the_digest():
    others = [SOUND._replace(**{field: 7}) for field in Terms._fields]
    assert len({digest(SOUND), *map(digest, others)}) == 1 + len(others)
    assert digest(SOUND._replace()) == digest(SOUND)


def test_runs_of_ranks_are_joined():
    assert named_ranks([3]) == "rank 3"
    assert named_ranks([0, 1]) == "ranks 0, 1"
    assert named_ranks([0, 1, 2, 5, 7, 8, 9]) == "ranks 0-2, 5, 7-9"
