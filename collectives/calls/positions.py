"""Where each rank is when ranks agree: its state, and digests of its parameters; which ranks differ."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from collectives.faults.errors import CollectiveError
from collectives.faults.state import differing, named_ranks


class Position(NamedTuple):
    """What a rank is about to complete.

    state: as text. digests: of its parameters by name; none of a rank whose parameters
    are not compared. remedy: for parameters that differ.
    """

    state: str = ""
    digests: Mapping[str, str] = {}
    remedy: str = ""


def check_positions(operation: str, everyone: Sequence[Any], remedy: str) -> None:
    """Raise CollectiveError if states of ranks differ, or digests of those that have any. everyone: pairs of both."""
    if apart := differing(enumerate(state for state, _ in everyone)):
        raise CollectiveError(
            f"{operation}: ranks are out of step: {apart}: load states of one step on all ranks, call the same methods "
            "on all, and make and step exchanges in the same order on all"
        )
    compared = {rank: own for rank, (_, own) in enumerate(everyone) if own}
    check_digests(f"{operation}: ", compared, remedy)


def check_digests(
    where: str, digests: Mapping[int, Mapping[str, str]], remedy: str
) -> None:
    """Raise CollectiveError if digests of ranks differ; names the first tensor, and the ranks of the minority."""
    names = dict.fromkeys(chain.from_iterable(digests.values()))
    answers = {
        name: {rank: own.get(name, "missing") for rank, own in digests.items()}
        for name in names
    }
    different = [
        name for name, by_rank in answers.items() if len({*by_rank.values()}) > 1
    ]
    if not different:
        return
    odd = set[int]()
    for name in different:
        by_rank = answers[name]
        usual = Counter(by_rank.values()).most_common(1)[0][0]
        odd |= {rank for rank, answer in by_rank.items() if answer != usual}
    first = different[0]
    raise CollectiveError(
        f"{where}the parameters of {named_ranks(odd)} differ from those of the other ranks, in {len(different)} of "
        f"{len(names)} tensors; the first is {first!r}: {differing(answers[first].items())}. {remedy}"
    )
