"""The sum of an exchange over the ranks, and the mean that is made of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from collectives.allreduce import sparse_allreduce
from collectives.calls.call import Sum
from collectives.calls.collective import Collective, Declaration
from collectives.dense import dense_allreduce
from collectives.quantised import quantised_allreduce
from collectives.runtime.votes import contributors
from mpicomp.arrays.device import on_device
from mpicomp.arrays.frameworks import to_vector
from mpicomp.arrays.values import converted
from mpicomp.correction import Correction
from mpicomp.few_bits import BITS
from mpicomp.means import DenseMean, Mean, SparseMean
from mpicomp.settings import to_choice
from mpicomp.vector import SparseVector, from_all_values, widened

OPERATION = "GradientExchange"  # name of the ranks' agreements in errors

# Values of `average`: divide by the number of ranks that sent an entry, or return the
# mean's sign.
CONTRIBUTORS = "contributors"
SIGN = "sign"


@dataclass(frozen=True)
class Reduction:
    """The sum of an exchange.

    call: starts it, and returns a Request; or a function of the user's own. average: of
    `GradientExchange`. declared: what the collective takes.
    """

    call: Callable[..., Any]
    average: bool | str
    declared: Declaration

    @cached_property
    def is_own(self) -> bool:
        """Whether the sum is a function of the user's own, which declares nothing."""
        return self.declared.to_sum is None

    def received(self, outcome: Any, length: int, dtype: Any) -> Sum:
        """Return what the collective returned, for vectors of a length, as a `Sum` whose value is a `Mean`.

        A function of the user's own returned a `Sum`, or its value alone. A dense array
        becomes a vector with all entries, unless the collective takes arrays. What was
        rejected is converted to a dtype, that of the residual. Raises TypeError for
        anything else, ValueError for another length.
        """
        to_sum = self.declared.to_sum or _sum_of
        total = to_sum(outcome)
        value, rejected, votes = total
        if self.declared.takes is Correction:
            return total
        if self.declared.takes_arrays:
            return Sum(DenseMean(value), rejected, votes)
        if isinstance(value, np.ndarray) or on_device(value):
            value = from_all_values(to_vector(value))
        parts = [value]
        if rejected is not None:
            parts.append(rejected)
        for part in parts:
            if not isinstance(part, SparseVector):
                raise TypeError(
                    f"the collective returned {type(part).__name__}: expected a SparseVector or an array, "
                    "collectives.Sum(value, rejected, votes) where a rank keeps entries or votes are counted, or a "
                    "Request for one of these; give a collective such as gtopk_allreduce"
                )
            if part.length != length:
                raise ValueError(
                    f"the collective returned {part}: expected a sum of length {length}"
                )
            if self.is_own:
                part.check_order()
        if rejected is not None:
            rejected = rejected.with_values(converted(rejected.values, dtype))
        return Sum(SparseMean(widened(value)), rejected, votes)

    def mean(
        self,
        received: Sum,
        dtype: Any,
        ranks: int,
        dense: Sequence[tuple[int, int]],
    ) -> Mean:
        """Return the mean in a dtype, of an array in its place unless that is float16.

        dense: ranges of which every rank sends all values. Raises OverflowError if a
        value is not finite.
        """
        mean: Mean = received.value
        if ranks > 1 and self.average in (True, CONTRIBUTORS):
            divisor: Any = ranks
            if self.average == CONTRIBUTORS and not self.declared.takes_arrays:
                divisor = contributors(mean.entries(), received.votes, ranks, dense)
            mean = mean.over(divisor)
        return mean.narrowed(dtype, clips=self.average == SIGN)


def reduction(collective: Any, bits: int | None, average: bool | str) -> Reduction:
    """Return the sum for the arguments of `GradientExchange`; raises for a collective that it cannot use."""
    if bits is not None:
        if collective is not None:
            raise ValueError(
                "got bits and collective: expected one of them; bits= is partial(quantised_allreduce, ...)"
            )
        bits = to_choice("bits", bits, BITS)
        collective = partial(quantised_allreduce, bits=bits)
    if collective is None:
        collective = sparse_allreduce
    bound = partial(collective) if callable(collective) else None
    if bound is None or isinstance(bound.func, type):
        raise TypeError(
            f"collective is {collective!r}: expected a collective such as sparse_allreduce"
        )
    # A nonblocking form names its collective.
    known = getattr(bound.func, "collective", bound.func)
    if not isinstance(known, Collective):
        return Reduction(collective, average, Declaration())
    declared = known.declaration
    to_sum = declared.to_sum
    options = bound.keywords
    if average == CONTRIBUTORS:
        options = bound.keywords | declared.counting
        if not declared.counting:
            raise ValueError(
                f"{known.name} does not count the ranks that sent an entry, which average='contributors' takes: "
                "expected sparse_allreduce"
            )
    if to_sum is None:
        raise TypeError(
            f"collective is {bound.func.__name__}, which does not give every rank the sum: expected sparse_allreduce, "
            "gtopk_allreduce, sparse_allgather, or with Dense() quantised_allreduce or dense_allreduce"
        )
    call = partial(known.start, *bound.args, **options)
    return Reduction(call, average, declared)


def dense_reduction(average: bool | str) -> Reduction:
    """Return the sum of tensors too small to be compressed."""
    return Reduction(dense_allreduce.start, average, dense_allreduce.declaration)


def _sum_of(outcome: Any) -> Sum:
    return outcome if isinstance(outcome, Sum) else Sum(outcome)
