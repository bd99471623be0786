"""The sum of an exchange over the ranks, and the mean that is made of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import numpy as np

from collectives.agreement.votes import contributors
from collectives.allreduce import sparse_allreduce
from collectives.compressed import compressed_allreduce
from collectives.dense import dense_iallreduce
from collectives.quantised import quantised_allreduce
from collectives.runtime.collective import declared_by, nonblocking_sum, with_votes
from mpicomp.arrays import Array, converted, kernels_for, on_device
from mpicomp.bucket import Compressed, Mean
from mpicomp.feedback.base import check_range
from mpicomp.vector import SparseVector, add_up, count_up, whole

# average: by the number of ranks that sent an entry; the mean's sign
CONTRIBUTORS, SIGN = "contributors", "sign"


class Received(NamedTuple):
    """The result of a sum on this rank.

    rejected: what this rank has to keep: None, entries, or an array. votes: the number
    of ranks that sent each entry, None if they were not counted. entries: the number of
    them that were received.
    """

    total: Mean
    rejected: Any
    votes: Array | None
    entries: int

    @property
    def rejected_entries(self) -> int:
        """Number of the entries to keep."""
        if isinstance(self.rejected, SparseVector):
            return self.rejected.nnz
        return 0 if self.rejected is None else int(self.rejected.size)


@dataclass(frozen=True)
class Reduction:
    """The sum of an exchange.

    call: the collective's nonblocking form. average: of `GradientExchange`.
    takes_arrays: it sums arrays, not vectors. writes: it returns (sum, rejected), and
    writes both to arrays given as `out`. owns: a rank sums its `own_share` of a vector,
    and does not send it.
    """

    call: Callable[..., Any]
    average: bool | str
    takes_arrays: bool = False
    writes: bool = False
    owns: bool = False

    def arguments(self, compressed: Compressed) -> tuple[Any, dict[str, Any]]:
        """Return the collective's input and options for what this rank sends."""
        if compressed.sent is not None:
            return compressed.sent, {}
        corrected = compressed.corrected
        if not self.writes:
            return corrected, {}
        rejected = np.empty_like(corrected) if compressed.is_gradient else corrected
        return corrected, {"out": (np.empty_like(corrected), rejected)}

    def received(self, outcome: Any, length: int) -> Received:
        """Return the parts of what the collective returned for vectors of a length.

        outcome: the sum of arrays, with what was rejected if it `writes`; of vectors a
        SparseVector, a dense array, (sum, rejected), (sum, votes), or a list, which is
        added up in rank order. float16 is converted to float32 first, so that it is
        rounded once. Raises TypeError for anything else, ValueError for another length.
        """
        result, more = outcome if isinstance(outcome, tuple) else (outcome, None)
        if self.takes_arrays:
            return Received(result, more, None, result.size)
        if isinstance(result, np.ndarray) or on_device(result):
            result = whole(result.reshape(-1))
        parts = result if isinstance(result, list) else [result]
        if not (parts and all([isinstance(part, SparseVector) for part in parts])):
            raise TypeError(
                f"the collective returned {type(result).__name__}: expected a SparseVector, with what was rejected or "
                "the votes, a list of them, or a Request for one; give a collective such as gtopk_allreduce"
            )
        if any([part.length != length for part in parts]):
            raise ValueError(
                f"the collective returned {parts}: expected a sum of length {length}"
            )
        rejected, votes = (
            (more, None) if isinstance(more, SparseVector) else (None, more)
        )
        if self.average == CONTRIBUTORS and isinstance(result, list):
            votes = count_up(parts).values
        wide = np.promote_types(parts[0].dtype, np.float32)
        if len(parts) > 1 or parts[0].dtype != wide:
            parts = [
                SparseVector(
                    part.indices, part.values.astype(wide, copy=False), part.length
                )
                for part in parts
            ]
        return Received(
            add_up(parts), rejected, votes, sum([part.nnz for part in parts])
        )

    def mean(
        self,
        received: Received,
        dtype: Any,
        ranks: int,
        dense: Sequence[tuple[int, int]],
    ) -> Mean:
        """Return the mean in a dtype; of an array in its place.

        dense: ranges of which every rank sends all values. Raises OverflowError if a
        value is not finite.
        """
        total = received.total
        if not isinstance(total, SparseVector):
            if self.average in (True, CONTRIBUTORS):
                kernels_for(total).quotient(total, ranks, total)
            check_range(total, "sum over the ranks")
            return total
        values, by_entry = total.values, self.average == CONTRIBUTORS
        if ranks > 1 and self.average in (True, CONTRIBUTORS):
            by = (
                contributors(total, received.votes, ranks, dense) if by_entry else ranks
            )
            values = np.empty_like(values)
            kernels_for(values).quotient(total.values, by, values)
        vector = total.with_values(converted(values, dtype))
        try:
            vector.validate()
        except ValueError:
            check_range(vector, "sum over the ranks")
            raise
        return vector


def reduction(collective: Any, bits: int | None, average: bool | str) -> Reduction:
    """Return the sum for the arguments of `GradientExchange`; raises for a collective that it cannot use."""
    if bits is not None:
        if collective is not None:
            raise ValueError(
                "got bits and collective: expected one of them; bits= is partial(quantised_allreduce, ...)"
            )
        collective = partial(quantised_allreduce, bits=bits)
    collective = sparse_allreduce if collective is None else collective
    known = declared_by(collective)
    takes_arrays = known is not None and known.takes_arrays
    return Reduction(
        nonblocking_sum(
            with_votes(collective) if average == CONTRIBUTORS else collective
        ),
        average,
        takes_arrays=takes_arrays,
        writes=takes_arrays and "out" in signature(known).parameters,  # type: ignore[arg-type]
        owns=known is compressed_allreduce,
    )


def dense_reduction(average: bool | str) -> Reduction:
    """Return the sum of tensors too small to be compressed."""
    return Reduction(dense_iallreduce, average, takes_arrays=True)
