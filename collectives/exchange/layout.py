"""The assignment of tensors to buckets: made once, after all ranks compared their tensors.

The rules, in the order in which they apply:

1. Named tensors are in the order of rank 0: that of its gradients in the first step, or of `register`. Buckets start in
   that order on all ranks in every step.
2. A named tensor of fewer than `small` values is sent dense, in one bucket for each dtype, after the others.
3. A bucket contains tensors of one dtype, up to about `bucket_nbytes`; a tensor is never divided. Each is a segment of
   the bucket's vector: its entries compete with each other only.

One array, or the arrays of a list, are one bucket of one segment.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from collectives.agreement import check_same, gather_objects
from collectives.exchange.flight import CONTRIBUTORS, OPERATION, SIGN
from mpicomp.bases import Basis
from mpicomp.bucket import Bucket
from mpicomp.compressors import Compressor, Dense
from mpicomp.compressors.base import check_compressor
from mpicomp.compressors.common import check_number
from mpicomp.feedback import Feedback
from mpicomp.feedback.base import check_feedback
from mpicomp.tensors import ALONE, DICT, Tensor, describe, signatures

Choose = Callable[[str, tuple[int, ...]], Compressor]  # of the name and the shape of a tensor


@dataclass(frozen=True)
class Layout:
    """The settings of an exchange, and its buckets; see the module. Those of named tensors have copies of the parts."""

    compressor: Compressor | Choose
    feedback: Feedback
    small: int
    bucket_nbytes: int
    average: bool | str
    nonfinite: str
    basis: Basis | None
    takes_arrays: bool  # the collective sums dense arrays

    def __post_init__(self) -> None:
        check_number("small", self.small, least=0)
        check_number("bucket_nbytes", self.bucket_nbytes, least=0)
        if self.average not in (True, False, CONTRIBUTORS, SIGN):
            raise ValueError(f"average is {self.average!r}: expected True, False, {CONTRIBUTORS!r} or {SIGN!r}")
        if self.nonfinite not in ("raise", "skip"):
            raise ValueError(f"nonfinite is {self.nonfinite!r}: expected 'raise' or 'skip'")
        compressor: Any = Dense() if is_choice(self.compressor) else self.compressor  # what it chooses is checked then
        check_compressor(compressor)
        check_feedback(self.feedback, compressor)
        self._check_basis()
        if self.takes_arrays and not isinstance(compressor.chain()[-1], Dense):
            raise ValueError(
                f"compressor is {compressor!r}, and the collective sums all values of arrays: expected Dense(), or a "
                "collective of sparse vectors such as sparse_allreduce"
            )

    def _check_basis(self) -> None:
        """Raise TypeError or ValueError for a basis that cannot be, or that the feedback does not work in."""
        given: Any = self.basis
        if not isinstance(given, Basis | None):
            raise TypeError(f"basis is {given!r}: expected an object such as Hadamard(chunk=256), or None")
        if given is not None and (self.feedback.in_place or not self.feedback.sends_gradients):
            raise ValueError(
                f"got basis={given!r} and {self.feedback!r}, whose residual is in the units of values: expected a "
                "feedback such as ErrorFeedback()"
            )

    def settings(self, comm: Any) -> dict[str, Any]:
        """Return the settings that a saved state is compared by, besides the parts of each segment; the rank first."""
        place = {"rank": comm.rank, "ranks": comm.size}
        return place | {"average": self.average, "small": self.small, "basis": self.basis}

    def buckets(self, form: str, arrays: Mapping[str, Any], comm: Any) -> list[Bucket]:
        """Return the buckets of this rank's tensors, in the order in which they start.

        The ranks compare tensors and settings first. Raises this rank's error on it, and CollectiveError on the others;
        CollectiveError on all if they differ.
        """
        statement: Any
        try:
            tensors = describe(arrays, form)
            compressors = {each.name: self._compressor(each) for each in (tensors if form == DICT else [])}
            if form != DICT and is_choice(self.compressor):
                raise TypeError(
                    f"got {form}, and for compressor a function of a tensor's name and shape: expected a dict of arrays"
                )
            statement = {"tensors": signatures(tensors, form), "settings": self._settings(form)}
        except Exception as raised:  # whatever it is: the other ranks must learn of it
            statement = raised
        try:
            everyone = gather_objects(statement, comm, OPERATION)
        finally:
            del statement  # else an error, its traceback and this frame hold each other
        check_same("settings", [each["settings"] for each in everyone])
        check_same("tensors", [each["tensors"] for each in everyone])
        if form != DICT:
            return [self.alone(tensors)]
        here = {tensor.name: tensor for tensor in tensors}
        return self._named([here[name] for name in everyone[0]["tensors"]], compressors)

    def alone(self, tensors: Sequence[Tensor]) -> Bucket:
        """Return the bucket of tensors that form one segment, with the caller's own parts."""
        compressor: Any = Dense() if is_choice(self.compressor) else self.compressor  # no tensor yet: none was chosen
        return Bucket([ALONE], tensors, [compressor], self.feedback, basis=self.basis)

    def _settings(self, form: str) -> dict[str, str]:
        """Return the settings that must be the same on all ranks, as text; compressors and feedback may differ."""
        names = "average", "small", "bucket_nbytes", "nonfinite", "basis"
        return {"gradients": form} | {name: repr(vars(self)[name]) for name in names}

    def _compressor(self, tensor: Tensor) -> Compressor:
        """Return a compressor for one named tensor."""
        if tensor.size < self.small:
            return Dense()
        given: Any = self.compressor
        if is_choice(given):
            given = given(tensor.name, tensor.shape)
            check_compressor(given, f"compressor for {tensor.name!r}")
            check_feedback(self.feedback, given)
        return deepcopy(given)  # type: ignore[no-any-return]

    def _named(self, tensors: Sequence[Tensor], compressors: Mapping[str, Compressor]) -> list[Bucket]:
        parts: list[list[Tensor]] = []
        nbytes = 0  # of the last one
        for tensor in (tensor for tensor in tensors if tensor.size >= self.small):
            size = tensor.size * tensor.dtype.itemsize
            if not parts or parts[-1][0].dtype != tensor.dtype or nbytes + size > self.bucket_nbytes:
                parts.append([])
                nbytes = 0
            parts[-1].append(tensor)
            nbytes += size
        small = [tensor for tensor in tensors if tensor.size < self.small]
        by_dtype = [[each for each in small if each.dtype == dtype] for dtype in {each.dtype: None for each in small}]
        buckets = []
        for number, some in enumerate(parts + by_dtype):
            dense, names = number >= len(parts), [each.name for each in some]
            more: dict[str, Any] = {"dense": True} if dense else {"basis": self.basis}
            own, feedback = [compressors[name] for name in names], deepcopy(self.feedback)
            buckets.append(Bucket(names, some, own, feedback, **more))
        return buckets


def is_choice(compressor: Any) -> bool:
    """Return whether `compressor` is a function that returns a compressor for each named tensor."""
    return callable(compressor) and not isinstance(compressor, Compressor | type)
