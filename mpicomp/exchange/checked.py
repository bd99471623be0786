"""The debug mode of the exchange, MPICOMP_CHECK=1: errors that name the step and the tensor, and an account of a step.

With c what was compressed (the gradient and what was kept), e what is kept afterwards, and m the mean of P ranks, every
step has to have sum over ranks of (c - e) = P m, or m where the exchange does not average; where a method keeps
nothing, what was sent less what was rejected stands for c - e. All of it has to be finite.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpicomp.checking import Mass, dense_mass, mass, tolerance
from mpicomp.errors import CheckError
from mpicomp.exchange.bucket import Bucket, named
from mpicomp.vector import SparseVector

Array = NDArray[Any]


class Account(NamedTuple):
    """What left a rank for good in a step, of one vector, and what came of it everywhere.

    tolerance, floor: by how much they may differ; the floor is what division by the ranks may lose of the smallest
    numbers. fault: what this rank found by itself.
    """

    vector: str
    left: Mass
    came: Mass
    tolerance: float
    floor: float
    fault: str | None


class CheckedBucket(Bucket):
    """A bucket that says which tensors an error is of, and keeps an account of each step."""

    accounts: Sequence[Account] = ()

    def start(self, flats: Sequence[Array | Exception], comm: Any) -> None:
        """See `Bucket.start`; a gradient that is not finite is an error that names the tensor."""
        with self._named():
            super().start([_sound(*each) for each in zip(self.vectors, flats, strict=True)], comm)

    def settle(self, comm: Any, *, average: bool) -> None:
        """See `Bucket.settle`."""
        with self._named():
            super().settle(comm, average=average)
        self._times, self._size = comm.size if average else 1, comm.size

    def commit(self, outs: Sequence[Array | None] = ()) -> list[Array]:
        """See `Bucket.commit`; `accounts` then tells of it."""
        held = [
            (pipeline._corrected.copy(), pipeline._sent, pipeline._rejected, pipeline._arrived)
            for pipeline in self.pipelines
        ]
        results = super().commit(outs)
        self.accounts = [
            self._account(name, result, pipeline.feedback.residual, *before)
            for name, result, pipeline, before in zip(self.vectors, results, self.pipelines, held, strict=True)
        ]
        return results

    def _account(
        self,
        name: str,
        result: Array,
        kept: Array | None,
        corrected: Array,
        sent: SparseVector,
        rejected: SparseVector | None,
        mean: SparseVector,
    ) -> Account:
        fault = None
        for what, array in (("the result", result), ("the residual", kept)):
            if array is not None and not np.isfinite(array).all():
                fault = fault or f"{what} is not finite after the step"
        if kept is not None:
            left = dense_mass(corrected.astype(np.float64) - kept)
        else:
            left = mass(sent) if rejected is None else mass(sent).plus(mass(rejected), -1.0)
        came = Mass().plus(mass(mean), self._times)
        floor = float(np.finfo(mean.dtype).smallest_subnormal) * self._times * max(1, mean.nnz)
        return Account(name, left, came, tolerance(mean.dtype, self._size), floor, fault)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Put the tensors in front of what an error says."""
        try:
            yield
        except Exception as error:
            named(error, self.vectors)
            raise


def balance(accounts: Sequence[Sequence[Account]], step: int) -> None:
    """Raise CheckError where what left the ranks is not what came; accounts: of each rank, in rank order."""
    said = f"MPICOMP_CHECK: step {step}, "
    for of_one in zip(*accounts, strict=True):
        left = Mass()
        for rank, account in enumerate(of_one):
            if account.fault:
                raise CheckError(f"{said}rank {rank}, in {account.vector}: {account.fault}")
            left = left.plus(account.left)
        name, _, came, allowed, floor, _ = of_one[0]
        if not left.equals(came, allowed, floor):
            raise CheckError(
                f"{said}in {name}: mass is not conserved: {left.plain!r} left the ranks (weighted by position "
                f"{left.weighted!r}), and {came.plain!r} ({came.weighted!r}) came"
            )


def in_step(error: Exception, step: int, rank: int) -> None:
    """Put the rank and the step in front of what an error says."""
    if error.args and isinstance(error.args[0], str) and not error.args[0].startswith("MPICOMP_CHECK: "):
        error.args = (f"MPICOMP_CHECK: step {step}, rank {rank}, {error.args[0]}", *error.args[1:])


def _sound(name: str, flat: Array | Exception) -> Array | Exception:
    if not isinstance(flat, Exception) and not np.isfinite(flat).all():
        place = int(np.flatnonzero(~np.isfinite(flat))[0])
        return ValueError(f"{name}[{place}] is {flat[place]}: expected finite values")
    return flat
