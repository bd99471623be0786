"""Which tensors form a vector, and which vectors a message: made once, from what all ranks say they have.

The rules, in the order in which they apply:

1. The order of named tensors is that of rank 0: the order in which its gradients came in the first step, or were
   registered. Buckets start in that order on all ranks, whatever the order later is.
2. A named tensor of fewer than `small` numbers is sent dense, in one bucket for each dtype, behind the others.
3. Every other named tensor is a vector of its own, with a compressor and a feedback of its own.
4. A bucket takes vectors of one dtype until it has `bucket_nbytes`; a tensor is never divided.

The arrays of a list are one vector, whose entries compete; one array is one vector of one tensor.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from collectives.agreement import check_same, gather_objects
from collectives.dense import dense_iallreduce
from collectives.exchange.step import CONTRIBUTORS, OPERATION, Bucket
from mpicomp.compressors import Compressor, Dense
from mpicomp.compressors.base import check_compressor
from mpicomp.compressors.common import check_number
from mpicomp.feedback import Feedback, TwoWay
from mpicomp.feedback.base import check_feedback
from mpicomp.pipeline import Pipeline
from mpicomp.tensors import ALONE, DICT, Tensor, describe, signatures

Parts = tuple[Compressor, Feedback]


@dataclass(frozen=True)
class Layout:
    """How tensors become vectors, and vectors messages; see the module. Named vectors have copies of the parts."""

    compressor: Compressor
    feedback: Feedback
    downlink: TwoWay | None
    collective: Callable[[Any, Any], Any]
    choose: Callable[[str, Any], Parts] | None
    small: int
    bucket_nbytes: int
    average: bool | str
    nonfinite: str

    def __post_init__(self) -> None:
        check_number("small", self.small, least=0)
        check_number("bucket_nbytes", self.bucket_nbytes, least=0)
        given: Any = self.downlink
        if not isinstance(given, TwoWay | None):
            raise TypeError(f"downlink is {given!r}: expected an object such as TwoWay(TopK(density=0.01)), or None")
        if self.average not in (True, False, CONTRIBUTORS):
            raise ValueError(f"average is {self.average!r}: expected True, False or {CONTRIBUTORS!r}")
        if self.nonfinite not in ("raise", "skip"):
            raise ValueError(f"nonfinite is {self.nonfinite!r}: expected 'raise' or 'skip'")
        self._checked((self.compressor, self.feedback), ALONE)

    def settings(self, comm: Any) -> dict[str, Any]:
        """Return by what a saved state is compared, beside the parts of each vector; the rank's place comes first."""
        return {"rank": comm.rank, "ranks": comm.size, "average": self.average, "small": self.small}

    def buckets(self, form: str, arrays: Mapping[str, Any], comm: Any) -> list[Bucket]:
        """Return the buckets of this rank's tensors, in the order in which they start.

        The ranks compare tensors and settings first. Raises this rank's error here, and CollectiveError on the others;
        CollectiveError on all where they differ.
        """
        statement: Any
        try:
            tensors = describe(arrays, form)
            parts = self._parts(tensors, arrays) if form == DICT else {}
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
            return [Bucket([self.alone(tensors)], self.collective)]
        here = {tensor.name: tensor for tensor in tensors}
        return self._named([here[name] for name in everyone[0]["tensors"]], parts)

    def alone(self, tensors: Sequence[Tensor]) -> Pipeline:
        """Return the pipeline of tensors that are one vector, served by the very parts that the caller gave."""
        return Pipeline(ALONE, tensors, self.compressor, self.feedback, self.downlink)

    def _settings(self, form: str) -> dict[str, str]:
        """Return what all ranks must have set alike, as text; what they send may differ."""
        names = "average", "small", "bucket_nbytes", "downlink", "nonfinite"
        return {"gradients": form} | {name: repr(vars(self)[name]) for name in names}

    def _parts(self, tensors: Sequence[Tensor], arrays: Mapping[str, Any]) -> dict[str, Parts]:
        """Return the compressor and the feedback of each named tensor."""
        parts: dict[str, Parts] = {}
        for tensor in tensors:
            if tensor.size < self.small:
                parts[tensor.name] = Dense(), deepcopy(self.feedback)
            elif self.choose is None:
                parts[tensor.name] = deepcopy(self.compressor), deepcopy(self.feedback)
            else:
                parts[tensor.name] = self._checked(self.choose(tensor.name, arrays[tensor.name]), tensor.name)
        if len({id(feedback) for _, feedback in parts.values()}) < len(parts):
            raise ValueError("choose returned one feedback for two tensors: expected an object of its own for each")
        return parts

    def _named(self, tensors: Sequence[Tensor], parts: Mapping[str, Parts]) -> list[Bucket]:
        buckets: list[list[Pipeline]] = []
        nbytes = 0  # of the last one
        for tensor in (tensor for tensor in tensors if tensor.size >= self.small):
            size = tensor.size * tensor.dtype.itemsize
            other = not buckets or buckets[-1][0].tensors[0].dtype != tensor.dtype
            if other or nbytes + size > self.bucket_nbytes:
                buckets.append([])
                nbytes = 0
            name = _without_plus(tensor)
            buckets[-1].append(Pipeline(name, [tensor], *parts[tensor.name], deepcopy(self.downlink)))
            nbytes += size
        small = [tensor for tensor in tensors if tensor.size < self.small]
        by_dtype = [[each for each in small if each.dtype == dtype] for dtype in {each.dtype: None for each in small}]
        dense = [Pipeline("+".join(map(_without_plus, some)), some, *parts[some[0].name]) for some in by_dtype]
        every = [Bucket(pipelines, self.collective) for pipelines in buckets]
        return every + [Bucket([pipeline], dense_iallreduce, dense=True) for pipeline in dense]

    def _checked(self, parts: Any, of: str) -> Parts:
        if not (isinstance(parts, tuple) and len(parts) == 2):
            raise TypeError(f"choose returned {parts!r} for {of!r}: expected (compressor, feedback)")
        check_compressor(parts[0])
        check_feedback(parts[1], parts[0])
        if self.average == CONTRIBUTORS and parts[1].has_dense_result:
            raise ValueError(f"{parts[1]!r} keeps the mean over all ranks: expected average=True or False with it")
        return parts


def _without_plus(tensor: Tensor) -> str:
    """Return a name that may stand between plus signs: as it is, or with a backslash before its own."""
    return tensor.name.replace("\\", "\\\\").replace("+", "\\+")
