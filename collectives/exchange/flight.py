"""A bucket in a step: compressed and started, its sum received, and committed.

Everything that can fail on one rank is in `start` and `settle`. `commit` follows and cannot fail, except in the
conversion of means to another library's arrays: it writes to allocated memory, and swaps. Before it no state that
outlives the step changes, except compressors, whose earlier attributes are in `snapshot`.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.dense import dense_iallreduce
from collectives.faults import ledger
from collectives.runtime.engine import Request
from collectives.votes import contributors
from mpicomp.arrays import kernels_for, on_device
from mpicomp.bucket import Bucket
from mpicomp.compressors import Compressor
from mpicomp.compressors.segments import Outside
from mpicomp.errors import NotFiniteError
from mpicomp.feedback.base import check_range
from mpicomp.tensors import Outputs
from mpicomp.vector import SparseVector, add_up, count_up, index_dtype, split, whole

Array = NDArray[Any]
Arrays = Mapping[str, Any]  # of any kind, by name
Mean = SparseVector | Array

OPERATION = "GradientExchange"  # what the ranks' agreements are called in errors
CONTRIBUTORS, SIGN = "contributors", "sign"  # average: by the number of ranks that sent an entry; the mean's sign


class Collectives(NamedTuple):
    """The sum of an exchange.

    takes_arrays: the sum is of dense arrays. rounds: it returns (sum, rejected), and writes to arrays given as `out`.
    owned: returns the range of a vector that its rank owns and does not send, of (length, rank, size).
    """

    sum: Callable[..., Any]
    takes_arrays: bool = False
    rounds: bool = False
    owned: Callable[[int, int, int], tuple[int, int]] | None = None


SMALL = Collectives(dense_iallreduce, takes_arrays=True)  # of tensors too small to be compressed


class Flight:
    """A bucket in a step: owns the arrays of its vector until the step ends."""

    def __init__(self, bucket: Bucket, *, collectives: Collectives, checked: bool, skips: bool) -> None:
        self.bucket, self.length, self.snapshot = bucket, bucket.length, bucket.snapshot()
        self._by = SMALL if bucket.dense else collectives
        self.sent = self.received = self.rejected = self.nbytes = 0
        self.compress_seconds = self.communicate_seconds = self.restore_seconds = 0.0
        self.total: Mean | None = None  # the sum over the ranks
        self.outcome: Any = None  # a Request; what a collective that blocks returned; or why the step is skipped
        self.account: Any = ledger.Account(bucket) if checked else None  # of the debug mode
        self._refused = NotFiniteError if skips else ValueError if checked else None  # for what is not finite
        self.homes: list[Array] = []  # the gradients' own arrays, where they hold the residual
        self._changes: list[tuple[Array, SparseVector]] = []  # to be added to these
        self._outputs = Outputs(bucket.tensors, bucket.bounds, {})

    def start(self, arrays: Arrays, outs: Arrays, comm: Any, error: Exception | None = None) -> None:
        """Compress this rank's gradients, and start the collective; `wait` raises an error of this rank, on all ranks.

        error: of a rank that failed before; it is contributed in place of a vector.
        """
        began = perf_counter()
        contribution, options = self._compressed(arrays, outs, comm, error)
        compressed = perf_counter()
        try:
            self.outcome = self._by.sum(contribution, comm, **options)
        except Exception as raised:
            if raised is contribution:  # the frames of the collective would hold it, and it the gradient
                raised.__traceback__ = None
            raise
        finally:
            del contribution
        self.compress_seconds, self.communicate_seconds = compressed - began, perf_counter() - compressed

    def _compressed(self, arrays: Arrays, outs: Arrays, comm: Any, error: Exception | None) -> tuple[Any, Any]:
        """Return the collective's input and options, or this rank's error, without its traceback and its frames."""
        bucket = self.bucket
        try:
            if error is None:
                gradient = self._take(arrays, outs)
        except Exception as raised:  # whatever it is: the other ranks must learn of it
            error = raised.with_traceback(None)
        try:
            if error is not None:
                return error, {}
            if self.account is not None:
                self.account.expect(gradient)
            if self._by.takes_arrays:
                return self._corrected_array(gradient)
            compressor: Compressor = bucket.compressor
            own = 0
            if self._by.owned is not None:
                first, end = self._by.owned(self.length, comm.rank, comm.size)
                compressor, own = Outside(bucket.compressor, first, end), end - first
            self._corrected, self._sent = bucket.feedback.compress(gradient, compressor)
            if self.account is not None:
                self.account.check_input(self._corrected)
            self.sent = self._sent.nnz - own
            self.nbytes = self._sent.nbytes * self.sent // max(self._sent.nnz, 1)
            return self._sent, {}
        except Exception as raised:
            return self._explained(raised, arrays).with_traceback(None), {}
        finally:
            del error

    def _take(self, arrays: Arrays, outs: Arrays) -> Any:
        """Return this rank's gradients as a vector or its parts, and store views of the output buffers."""
        bucket = self.bucket
        self._outputs = Outputs(bucket.tensors, bucket.bounds, outs)
        if bucket.feedback.in_place:
            self.homes = [tensor.residual_in(arrays.get(tensor.name)) for tensor in bucket.tensors]
        gradient = bucket.take(arrays)
        if self._refused is not None:
            bucket.check_finite(arrays, self._refused)
        return gradient if bucket.basis is None else bucket.forward(gradient)

    def _corrected_array(self, gradient: Any) -> tuple[Array, dict[str, Any]]:
        """Return the corrected gradient, of which all values are sent, and where the collective writes its results.

        What it rejects replaces the values, and so becomes the residual, unless others need them.
        """
        self._corrected = self.bucket.feedback.correct(gradient)
        self.bucket.check_vector(self._corrected)
        self.sent, self.nbytes = self.length, self._corrected.nbytes
        self._is_spare = self._corrected is not gradient
        if not self._by.rounds:
            return self._corrected, {}
        spare = self._corrected if self._is_spare else np.empty_like(self._corrected)
        return self._corrected, {"out": (np.empty_like(self._corrected), spare)}

    def _explained(self, error: Exception, arrays: Arrays) -> Exception:
        """Return the error; of coefficients, one that names the gradient with a value that is not finite."""
        if isinstance(error, ValueError) and self.bucket.basis is not None:
            try:
                self.bucket.check_finite(arrays, ValueError)
            except ValueError as found:
                return found
        return error

    def test(self) -> bool:
        """Advance the collective, without waiting; return whether it has ended."""
        return self.outcome.test() if isinstance(self.outcome, Request) else True

    def wait(self) -> None:
        """Wait for the result of the collective; if it failed, it raises on all ranks."""
        began = perf_counter()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        self._came = self.outcome.wait() if isinstance(self.outcome, Request) else self.outcome
        self.communicate_seconds += perf_counter() - began

    def has_failed(self) -> bool:
        """Wait for the collective, and return whether it failed, the same on all ranks."""
        if isinstance(self.outcome, Request) and not self.outcome.failed:  # to raise it again would add this frame
            with suppress(Exception):
                self.outcome.wait()
        return self.outcome.failed if isinstance(self.outcome, Request) else isinstance(self.outcome, Exception)

    def settle(self, ranks: int, *, average: bool | str, form: str) -> None:
        """Prepare to commit the mean (or sum). form: of the results, "dense", "sparse" or "vectors"."""
        began = perf_counter()
        self._form, self._is_sign = form, average == SIGN
        if form != "dense":
            self._check_form(form)
        settle = self._settle_array if self._by.takes_arrays else self._settle_vector
        for changes in settle(ranks, average=average):
            self._changes += zip(self.homes, split(changes, self.bucket.bounds), strict=True)
        if form == "dense":
            self._result = self._in_values(self.mean)
            self._outputs.prepare(self._result)
        elif form == "sparse":
            vector = self.mean if isinstance(self.mean, SparseVector) else whole(self.mean)
            signs = vector.with_values(np.sign(vector.values)) if self._is_sign else vector
            self._means = split(signs, self.bucket.bounds)
        self.restore_seconds = perf_counter() - began

    def _check_form(self, form: str) -> None:
        """Raise ValueError if there is no sparse mean, or no buffer that it could be written to."""
        if form == "sparse" and (self.bucket.basis is not None or (self._by.takes_arrays and self._by.rounds)):
            what = f"in the basis {self.bucket.basis!r} a mean" if self.bucket.basis else "the mean of dense arrays"
            raise ValueError(f"got sparse=True, and {what} has all values: expected sparse=False")
        if self._outputs.given:
            raise ValueError("got out= and sparse=True: a sparse mean is returned, and not written to an array")

    def _settle_vector(self, ranks: int, *, average: bool | str) -> Any:
        """Store the mean of sparse vectors, and return what feedback in place adds to the gradients."""
        compressor, counts = self.bucket.compressor, average == CONTRIBUTORS
        total, self.received, rejected, votes = unpack_sum(self._came, counting=compressor.observes or counts)
        divisor = contributors(total, votes, ranks, compressor.whole) if counts else ranks if average is True else 1
        values = (total.values / divisor).astype(self._corrected.dtype, copy=False)
        self.total, self.mean = total, total.with_values(values)
        try:
            self.mean.validate()
        except ValueError:
            check_range(self.mean, "sum over the ranks")
            raise
        self.rejected, self._returned = 0 if rejected is None else rejected.nnz, rejected
        if compressor.observes:
            compressor.observe(self.mean, None if votes is None else votes / ranks)
        return self.bucket.feedback.settle(self._corrected, self._sent, rejected, self.mean)

    def _settle_array(self, ranks: int, *, average: bool | str) -> Any:
        """Store the mean of arrays, and return what feedback in place adds to the gradients."""
        corrected = self._corrected
        total, rejected = self._came if self._by.rounds else (self._came, None)
        spare = None if self.account is not None else total  # the account needs the sum
        self.mean = mean = np.divide(total, ranks, out=spare) if average in (True, CONTRIBUTORS) else total
        check_range(mean, "sum over the ranks")
        self.total = total if self.account is not None else None
        self.received, self.rejected = self.length, 0 if rejected is None else self.length
        if self.account is not None:
            self._sent = whole(self.account.expected)
            self._returned = None if rejected is None else whole(rejected.copy())
        if not self._is_spare:
            back = None if rejected is None else whole(rejected)
            return self.bucket.feedback.settle(corrected, whole(corrected), back, whole(mean))
        if rejected is None:
            kernels_for(corrected).clear(corrected)
        nothing = SparseVector.empty(self.length, corrected.dtype, beside=corrected)
        return self.bucket.feedback.settle(corrected, nothing, None, nothing)  # what was rejected is in its place

    def _in_values(self, mean: Mean) -> Mean:
        """Return a mean, out of the basis if there is one, and its sign if that is asked for."""
        if self.bucket.basis is not None:
            dense = mean.to_dense() if isinstance(mean, SparseVector) else mean.copy()
            mean = self.bucket.inverse(dense)
            check_range(mean, "mean out of the basis")
        if not self._is_sign:
            return mean
        if isinstance(mean, SparseVector):
            return mean.with_values(np.sign(mean.values))
        kernels_for(mean).signs(mean)
        return mean

    @property
    def written(self) -> list[Array]:
        """The caller's arrays that `commit` writes to."""
        return [*self.homes, *self._outputs.written]

    def commit(self) -> dict[str, Any]:
        """Keep the entries that were not sent, and return the results by name; none for "vectors"."""
        began, bucket = perf_counter(), self.bucket
        bucket.feedback.commit()
        for home, changes in self._changes:
            kernels_for(home).scatter_add(home, changes.indices, changes.values)
        if self.account is not None:
            self.account.close(self.homes, self._sent, self._returned, self.mean, self.total)
        results: dict[str, Any] = {}
        if self._form == "dense":
            results = self._outputs.write(self._result)
        elif self._form == "sparse":
            results = dict(zip(bucket.names_of_tensors, self._means, strict=True))
        self.restore_seconds += perf_counter() - began
        return results

    def skip(self, *, sparse: bool) -> dict[str, Any]:
        """Return the results of a skipped step by name: zeros, or with `sparse` empty vectors."""
        if sparse:
            return {each.name: each.nothing for each in self.bucket.tensors}
        return self._outputs.clear()


def unpack_sum(outcome: Any, *, counting: bool) -> tuple[SparseVector, int, SparseVector | None, Array | None]:
    """Return the sum, the number of entries received, the rejected entries and the votes in a collective's result.

    outcome: a SparseVector; (sum, rejected) or (sum, votes); a list of every rank's vector, which are added up in rank
    order; or a dense array, the sum of arrays. counting: count the votes in a list. float16 is converted to float32
    first, so that it is rounded once, and a mean may be in range if the sum is not. Raises TypeError for anything else.
    """
    result, more = outcome if isinstance(outcome, tuple) else (outcome, None)
    if isinstance(result, np.ndarray) or on_device(result):
        result = SparseVector(
            kernels_for(result).consecutive(0, result.size, index_dtype(result.size)), result, result.size
        )
    parts = result if isinstance(result, list) else [result]
    if not all(isinstance(part, SparseVector) for part in parts):
        raise TypeError(
            f"the collective returned {type(result).__name__}: expected a SparseVector, with what was rejected or the "
            "votes, a list of them, or a Request for one; give a collective such as gtopk_allreduce"
        )
    rejected, votes = (more, None) if isinstance(more, SparseVector) else (None, more)
    if counting and isinstance(result, list):
        votes = count_up(parts).values
    wide = np.promote_types(parts[0].dtype, np.float32)
    if len(parts) > 1 or parts[0].dtype != wide:
        parts = [SparseVector(part.indices, part.values.astype(wide, copy=False), part.length) for part in parts]
    return add_up(parts), sum(part.nnz for part in parts), rejected, votes
