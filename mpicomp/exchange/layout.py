"""Named tensors and the buckets they travel in: made once, from what all ranks said they have.

The rules, in the order in which they apply:

1. The order of the tensors is that of rank 0: the order in which its gradients came in the first step, or were
   registered. Buckets start in that order on all ranks, whatever the order later is.
2. A tensor of fewer than `small` numbers travels dense where there is a dense collective, in one bucket for each dtype,
   behind the others. Where there is none, the small tensors of a bucket are one vector: their entries compete.
3. Every other tensor is a vector of its own, with a compressor and a feedback of its own.
4. A bucket takes tensors of one dtype until it has `bucket_nbytes`; a tensor is never divided.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import kind_of, namespace, room_in, to_values
from mpicomp.compressors.dense import Dense
from mpicomp.errors import CollectiveError
from mpicomp.exchange.bucket import Bucket, Collective
from mpicomp.exchange.pipeline import Pipeline

Array = NDArray[Any]


@dataclass(frozen=True)
class Tensor:
    """What is known of a tensor before its gradients come.

    dtype: in which it is exchanged. xp: the module of arrays that live where it does.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    back: Callable[[Array], Any]
    xp: Any

    @property
    def size(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the dtype in which it is exchanged."""
        return self.size * self.dtype.itemsize

    def flat(self, array: Any) -> Array:
        """Return a gradient of this tensor as one vector; ValueError when it has another shape or dtype."""
        if array is None:
            return self.xp.zeros(self.size, self.dtype)  # type: ignore[no-any-return]
        given, values = described(self.name, array)
        if given.xp is not self.xp:
            raise ValueError(f"{self.name} is in the memory of {given.xp.__name__}: expected {self.xp.__name__}'s")
        if (given.shape, given.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"{self.name} is {given.dtype} of shape {given.shape}: expected {self.dtype} of shape {self.shape} as "
                "at first"
            )
        return self.xp.ascontiguousarray(values).reshape(-1)  # type: ignore[no-any-return]

    def room(self, out: Any) -> Array | None:
        """Return the vector to write a mean to that is to be in `out`; None for None.

        Raises ValueError or TypeError when it has another shape, dtype or memory, or cannot be written to.
        """
        if out is None:
            return None
        given, _ = described(f"out for {self.name}", out)
        if (given.shape, given.dtype, given.xp) != (self.shape, self.dtype, self.xp):
            raise ValueError(
                f"out for {self.name} is {given.dtype} of shape {given.shape} in the memory of {given.xp.__name__}: "
                f"expected {self.dtype} of shape {self.shape} in {self.xp.__name__}'s"
            )
        try:
            return room_in(out)
        except (TypeError, ValueError) as error:
            raise type(error)(f"out for {self.name}: {error}") from error

    def restore(self, flat: Array) -> Any:
        """Return a vector in the shape of this tensor, and as its kind of array."""
        return self.back(flat.reshape(self.shape))


def described(name: str, array: Any) -> tuple[Tensor, Array]:
    """Return what is known of an array, and its values; what is raised names the tensor."""
    try:
        values = to_values(array)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from error
    return Tensor(name, values.shape, values.dtype, kind_of(array), namespace(values)), values


class Destination:
    """Where the mean of one vector goes: for each of its tensors to the array that is given, or for None to a new one.

    Raises what `Tensor.room` does.
    """

    def __init__(self, tensors: Sequence[Tensor], outs: Sequence[Any]) -> None:
        self.tensors, self.outs = tensors, outs
        self._rooms = [tensor.room(out) for tensor, out in zip(tensors, outs, strict=True)]

    @property
    def whole(self) -> Array | None:
        """The vector that can take all of the mean, if there is one."""
        return self._rooms[0] if len(self._rooms) == 1 else None

    def restore(self, result: Array) -> list[Any]:
        """Return what the caller gets of each tensor, from the mean in `whole` or elsewhere."""
        parts = divided(result, [tensor.size for tensor in self.tensors])
        for room, part in zip(self._rooms, parts, strict=True):
            if room is not None and room is not result:
                room[:] = part
        return [
            tensor.restore(part) if out is None else out
            for tensor, out, part in zip(self.tensors, self.outs, parts, strict=True)
        ]


@dataclass(frozen=True)
class Rules:
    """How tensors become buckets; see the module. make: returns the pipeline of a tensor, or of the small ones."""

    make: Callable[[Tensor | None], Pipeline]
    collective: Collective
    dense: Collective | None
    small: int
    bucket_nbytes: int
    bucket: type[Bucket] = Bucket


class Station:
    """A bucket, and whose gradients it waits for: for each of its pipelines the tensors that are one vector there."""

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        pipelines: Sequence[Pipeline],
        collective: Collective,
        bucket: type[Bucket] = Bucket,
        **how: bool,
    ) -> None:
        self.groups = groups
        self.names = {tensor.name for group in groups for tensor in group}
        lengths = [sum(tensor.size for tensor in group) for group in groups]
        self.bucket = bucket(pipelines, lengths, collective, **how)
        self.bucket.vectors = ["+".join(_without_plus(tensor.name) for tensor in group) for group in groups]
        self._destinations: list[Destination] = []

    def start(self, arrays: Mapping[str, Any], outs: Mapping[str, Any], comm: Any) -> None:
        """Start the bucket with the tensors' gradients, whose means go to `outs` where one is given; see `Bucket`."""
        destinations = [_destination(group, outs) for group in self.groups]
        self._destinations = [each for each in destinations if isinstance(each, Destination)]
        pairs = zip(destinations, self.flats(arrays), strict=True)
        self.bucket.start([flat if isinstance(to, Destination) else to for to, flat in pairs], comm)

    def commit(self) -> dict[str, Any]:
        """Let the bucket keep what did not travel, and return what the caller gets, by name."""
        results = self.bucket.commit([destination.whole for destination in self._destinations])
        means: dict[str, Any] = {}
        for destination, result in zip(self._destinations, results, strict=True):
            means |= zip((tensor.name for tensor in destination.tensors), destination.restore(result), strict=True)
        self._destinations = []
        return means

    def abandon(self, *, wait: bool) -> None:
        """See `Bucket.abandon`."""
        self._destinations = []
        self.bucket.abandon(wait=wait)

    def flats(self, arrays: Mapping[str, Any]) -> list[Array | Exception]:
        """Return the vector of each pipeline, or why there is none; a tensor without an array counts as zero."""
        return [_joined(group, arrays) for group in self.groups]

    def check_lengths(self) -> None:
        """Raise ValueError where what a feedback keeps is not as long as its vector: it was loaded from elsewhere."""
        for vector, group, pipeline in zip(self.bucket.vectors, self.groups, self.bucket.pipelines, strict=True):
            size = sum(tensor.size for tensor in group)
            for kept in (getattr(part, "size", None) for part in (pipeline.feedback, pipeline.downlink)):
                if kept not in (None, size):
                    raise ValueError(f"the state of {vector!r} has {kept} numbers: expected {size}")

    def restore(self, results: Sequence[Array]) -> dict[str, Any]:
        """Return what the caller gets, by name."""
        return {
            tensor.name: tensor.restore(part)
            for group, result in zip(self.groups, results, strict=True)
            for tensor, part in zip(group, divided(result, [tensor.size for tensor in group]), strict=True)
        }


def divided(flat: Array, sizes: Sequence[int]) -> list[Array]:
    """Return views of a vector: its parts of these sizes."""
    return np.split(flat, np.cumsum(sizes)[:-1].tolist())


def build(tensors: Sequence[Tensor], rules: Rules) -> list[Station]:
    """Return the buckets of tensors, in the order in which they start."""
    small: list[Tensor] = []
    stations: list[Station] = []
    waiting: list[Tensor] = []
    nbytes = 0  # of those that wait
    for tensor in tensors:
        if rules.dense is not None and tensor.size < rules.small:
            small.append(tensor)
            continue
        if waiting and (tensor.dtype != waiting[0].dtype or nbytes + tensor.nbytes > rules.bucket_nbytes):
            stations.append(_station(waiting, rules))
            waiting, nbytes = [], 0
        waiting.append(tensor)
        nbytes += tensor.nbytes
    if waiting:
        stations.append(_station(waiting, rules))
    for dtype in dict.fromkeys(tensor.dtype for tensor in small):
        stations.append(_dense_station([tensor for tensor in small if tensor.dtype == dtype], rules))
    return stations


def _station(tensors: Sequence[Tensor], rules: Rules) -> Station:
    groups = [[tensor] for tensor in tensors if tensor.size >= rules.small]
    fused = [tensor for tensor in tensors if tensor.size < rules.small]
    pipelines = [rules.make(group[0]) for group in groups]
    if fused:
        groups, pipelines = [*groups, fused], [*pipelines, rules.make(None)]
    return Station(groups, pipelines, rules.collective, rules.bucket)


def _dense_station(tensors: Sequence[Tensor], rules: Rules) -> Station:
    assert rules.dense is not None
    pipeline = rules.make(None)
    pipeline.compressor, pipeline.downlink = Dense(), None
    return Station([tensors], [pipeline], rules.dense, rules.bucket, dense=True)


def _without_plus(name: str) -> str:
    """Return a name that may stand between plus signs: as it is, or with a backslash before its own."""
    return name.replace("\\", "\\\\").replace("+", "\\+")


def _joined(group: Sequence[Tensor], arrays: Mapping[str, Any]) -> Array | Exception:
    try:
        parts = [tensor.flat(arrays.get(tensor.name)) for tensor in group]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    except Exception as error:  # whatever it is: the other ranks have to hear of it
        return error


def _destination(group: Sequence[Tensor], outs: Mapping[str, Any]) -> Destination | Exception:
    try:
        return Destination(group, [outs.get(tensor.name) for tensor in group])
    except Exception as error:  # as for a bad gradient
        return error


def agreed(tensors: Sequence[Tensor], settings: Mapping[str, str], comm: Any) -> list[Tensor]:
    """Return this rank's tensors in the order of rank 0, once all ranks have said what they have: one allgather.

    settings: what else the buckets go by. Raises CollectiveError on every rank when names, shapes, dtypes or settings
    differ.
    """
    kinds = {tensor.name: f"{tensor.dtype} of shape {tensor.shape}" for tensor in tensors}
    everyone = comm.allgather((kinds, settings))
    for what, brought in zip(("tensors", "settings"), zip(*everyone, strict=True), strict=True):
        check_same(what, brought)
    here = {tensor.name: tensor for tensor in tensors}
    return [here[name] for name in everyone[0][0]]


def check_same(what: str, brought: Sequence[dict[str, str]]) -> None:
    """Raise CollectiveError where what the ranks brought, by name, is not the same; alike on all that have it."""
    for rank, theirs in enumerate(brought):
        for name in brought[0] | theirs:
            first, here = brought[0].get(name, "missing"), theirs.get(name, "missing")
            if first != here:
                raise CollectiveError(
                    f"all ranks must have the same {what}: {name!r} is {first} on rank 0, and {here} on rank {rank}"
                )
