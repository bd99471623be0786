"""The assignment of tensors to buckets: made once, after all ranks compared their tensors.

The rules, in the order in which they apply:

1. Named tensors are in rank 0's order, of its gradients in the first step or of
   `register`.
2. A named tensor of fewer than `small` values is sent dense, in one bucket for each
   dtype and memory, after the others.
3. A bucket contains tensors of one dtype in one memory, on each rank, up to about
   `bucket_nbytes`; a tensor is never divided. Each is a segment of the bucket's vector:
   its entries compete with each other only. Tensors of other dtypes may come between
   those of a bucket. By default the bytes follow from the links between nodes: what is
   sent last, after the last gradient, is short (`Links.bucket_nbytes`).
4. Buckets start in the order of their last tensors, in which they become complete.

One array, or the arrays of a list, are one bucket of one segment.
"""

import math
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from collectives.calls.all_or_none import (
    all_or_none,
    check_same,
    contributed,
    gather_objects,
    outcome_of,
)
from collectives.calls.first_call import link_of
from collectives.exchange.checkpoint import (
    COMPRESSOR,
    Saved,
    called,
    load_whole_state,
)
from collectives.exchange.reduction import CONTRIBUTORS, OPERATION, Reduction
from collectives.planning.links import Links
from collectives.runtime.link import Link
from mpicomp.arrays import ByName
from mpicomp.bases import Basis
from mpicomp.bucket import Bucket
from mpicomp.compressors import Compressor, Dense
from mpicomp.compressors.base import check_compressor
from mpicomp.feedback import Feedback
from mpicomp.state import Configured, check_object, load
from mpicomp.tensors import ALONE, DICT, Form, Tensor, describe

# Bytes of a bucket, at most: those of a bucket in host memory fit caches. A bucket on a
# device takes the host as long as a GPU takes to read 1 to 2 GB, so the GPU would wait
# for shorter ones.
_HOST_NBYTES = 2**25
_DEVICE_NBYTES = 2**30
# Bytes sent over those of a dense array if all values are sent in few bits: about 4
# bits of float32.
_CODED = 1 / 8

# A function of the name and the shape of a tensor.
Choose = Callable[[str, tuple[int, ...]], Compressor]
Part = Callable[[Bucket], Configured]


class _Members:
    """The tensors of a bucket, with their compressors. number: of its last tensor, in the order of all."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.compressors: list[Compressor] = []
        self.nbytes = 0
        self.number = 0

    def add(self, tensor: Tensor, compressor: Compressor, number: int) -> None:
        self.tensors.append(tensor)
        self.compressors.append(compressor)
        self.nbytes += tensor.nbytes
        self.number = number


@dataclass(frozen=True)
class Layout:
    """The settings of an exchange, and its buckets; see the module. Those of named tensors have copies of the parts.

    parts: by name, functions that make for a bucket of named tensors what else has a state
    of them. bucket_nbytes: None for a number by the links, and the memory of the tensors.
    """

    compressor: Compressor | Choose
    feedback: Feedback
    small: int
    bucket_nbytes: int | None
    nonfinite: str
    basis: Basis | None
    reduction: Reduction
    parts: dict[str, Part] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The compressors that a function returns are checked when it is called.
        compressor: Any = Dense() if is_choice(self.compressor) else self.compressor
        check_compressor(compressor)
        check_object(self.feedback, Feedback, "feedback", "ErrorFeedback()")
        if self.basis is not None:
            check_object(self.basis, Basis, "basis", "Hadamard(chunk=256)")
            if not self.feedback.has_gradient_units:
                raise ValueError(
                    f"got basis={self.basis!r} and {self.feedback!r}, whose residual is in the units of values: "
                    "expected a feedback such as ErrorFeedback()"
                )
        self._check_sum(compressor, "compressor")

    @property
    def settings(self) -> dict[str, Any]:
        """What states name, beside the parts."""
        return {
            "average": self.reduction.average,
            "small": self.small,
            "basis": self.basis,
        }

    def _check_sum(self, compressor: Compressor, name: str) -> None:
        """Raise ValueError unless the collective can sum what a compressor selects."""
        takes_arrays = self.reduction.declared.takes_arrays
        if takes_arrays and not isinstance(compressor.chain()[-1], Dense):
            raise ValueError(
                f"{name} is {compressor!r}, and bits=, or the collective, sends every value: expected no compressor, "
                "Dense() of a function, or a collective of sparse vectors such as sparse_allreduce"
            )

    def buckets(self, form: Form, arrays: ByName, comm: Any) -> list[Bucket]:
        """Return the buckets of this rank's tensors, in the order in which they start.

        The ranks compare tensors and settings first. Raises this rank's error on it,
        and CollectiveError on the others; CollectiveError on all if they differ.
        """
        parts: list[tuple[Tensor, Compressor]] = []
        try:
            mine = outcome_of(self._described, form, arrays, parts)
        except BaseException as interrupt:
            # Only this rank is interrupted, and the others wait for its contribution.
            outcome_of(gather_objects, contributed(interrupt), comm, OPERATION)
            raise
        everyone = gather_objects(mine, comm, OPERATION)
        for what in "settings", "tensors":
            check_same(what, [answer[what] for answer in everyone])
        with all_or_none(comm, OPERATION):  # copies of the parts may fail
            if form != DICT:
                return [self.alone([tensor for tensor, _ in parts])]
            here = {pair[0].name: pair for pair in parts}
            link = link_of(comm)
            members = []
            for name in everyone[0]["tensors"]:
                tensor, compressor = here[name]
                places = tuple([answer["places"][name] for answer in everyone])
                tensor = replace(tensor, places=places)
                most = self._most(tensor, everyone[0]["fractions"][name], link)
                members.append((replace(tensor, bucket_nbytes=most), compressor))
            return self.named(members)

    def _described(
        self, form: Form, arrays: ByName, parts: list[tuple[Tensor, Compressor]]
    ) -> dict[str, dict[str, Any]]:
        """Return what the ranks compare, and what sizes buckets; append each tensor and its compressor to `parts`."""
        if is_choice(self.compressor) and form != DICT:
            raise TypeError(
                f"got {form}, and for compressor a function of a tensor's name and shape: expected a dict of arrays"
            )
        tensors = {}
        for tensor in describe(arrays, form):
            compressor: Any = self.compressor
            if form == DICT:
                compressor = self._compressor(tensor)
            parts.append((tensor, compressor))
            # A tensor of bfloat16 is exchanged as float32, and is compared as such.
            text = f"{tensor.kind.dtype} of shape {tensor.shape}"
            # Votes are counted only for tensors that are not sent whole, so the ranks
            # must agree on that.
            if self.reduction.average == CONTRIBUTORS:
                is_whole = isinstance(compressor.chain()[-1], Dense)
                how = "sent whole" if is_whole else "in part"
                text += f", {how}"
            tensors[tensor.name] = text
        # Compressors and feedback may differ between ranks.
        settings = self.settings | {
            "bucket_nbytes": self.bucket_nbytes,
            "nonfinite": self.nonfinite,
        }
        texts = {name: repr(value) for name, value in settings.items()}
        return {
            "tensors": tensors,
            "settings": texts | {"gradients": form},
            "places": {tensor.name: tensor.xp.__name__ for tensor, _ in parts},
            "fractions": {
                tensor.name: compressor.chain()[-1].fraction
                for tensor, compressor in parts
            },
        }

    def alone(self, tensors: Sequence[Tensor]) -> Bucket:
        """Return the bucket of tensors that form one segment, with the caller's own parts."""
        # A function has chosen no compressor yet if there are no tensors.
        compressor: Any = Dense() if is_choice(self.compressor) else self.compressor
        return Bucket([ALONE], tensors, [compressor], self.feedback, basis=self.basis)

    def _compressor(self, tensor: Tensor) -> Compressor:
        """Return a compressor for one named tensor."""
        if tensor.size < self.small:
            return Dense()
        compressor: Any = self.compressor
        if is_choice(compressor):
            compressor = compressor(tensor.name, tensor.shape)
            name = f"compressor for {tensor.name!r}"
            check_compressor(compressor, name)
            self._check_sum(compressor, name)
        own: Compressor = deepcopy(compressor)
        own.reset()
        return own

    def named(self, members: Sequence[tuple[Tensor, Compressor]]) -> list[Bucket]:
        """Return the buckets of named tensors, given with their compressors."""
        buckets: list[_Members] = []
        # The buckets that are being filled, by what the tensors of a bucket share.
        filling: dict[Any, _Members] = {}
        for number, (tensor, compressor) in enumerate(members):
            shared = tensor.size < self.small, tensor.dtype, tensor.places
            last = filling.get(shared)
            if last is None or last.nbytes + tensor.nbytes > tensor.bucket_nbytes:
                last = filling[shared] = _Members()
                buckets.append(last)
            last.add(tensor, compressor, number)
        buckets.sort(key=lambda one: (one.tensors[0].size < self.small, one.number))
        return [self._bucket(one) for one in buckets]

    def _most(self, tensor: Tensor, fraction: float | None, link: Link) -> float:
        """Return the bytes of a bucket with a tensor, at most; the same on all ranks.

        fraction: of its values that are selected, as rank 0 expects.
        """
        if tensor.size < self.small:
            return math.inf
        if self.bucket_nbytes is not None:
            return self.bucket_nbytes
        if "numpy" not in tensor.places:
            return _DEVICE_NBYTES
        # Inside a node, or with a function of the user's own, no message is hidden
        # behind the backward pass.
        if self.reduction.is_own or len(link.by_node) == 1:
            return _HOST_NBYTES
        sent = _CODED if self.reduction.declared.takes_arrays else fraction
        links: Links = link.choice
        return min(links.bucket_nbytes(sent or 0.0, link.size), _HOST_NBYTES)

    def rearranged(
        self,
        buckets: Sequence[Bucket],
        order: Sequence[str],
        held: Collection[str],
        saved: Saved,
    ) -> tuple[list[Bucket], list[Bucket]]:
        """Return new buckets of the tensors that are not held, and of those that are, with a state that was saved.

        buckets: those until now. order: the names of their tensors. Raises the errors of
        `load_whole_state`.
        """
        if len(held) == len(order):
            raise ValueError(
                "no named tensor is left to exchange: expected one at least"
            )
        tensors = {
            tensor.name: tensor for bucket in buckets for tensor in bucket.tensors
        }
        # Neighbours are joined only if they share their state, such as the step of
        # `WarmUp`, which is not counted for those that are held.
        parts = {}
        for name in order:
            own = self._compressor(tensors[name])
            state_of_it = {called(name): saved[name][COMPRESSOR]}
            load(own, state_of_it, [slice(tensors[name].size)])
            parts[name] = tensors[name], own
        left = self.named([parts[name] for name in order if name not in held])
        out = self.named([parts[name] for name in order if name in held])
        load_whole_state([*left, *out], saved)
        return left, out

    def _bucket(self, members: _Members) -> Bucket:
        """Return a bucket with a feedback of its own, and its parts."""
        dense = members.tensors[0].size < self.small
        bucket = Bucket(
            [tensor.name for tensor in members.tensors],
            members.tensors,
            members.compressors,
            deepcopy(self.feedback),
            dense=dense,
            basis=None if dense else self.basis,
        )
        for name, make in self.parts.items():
            bucket.parts[name] = make(bucket)
        return bucket


def is_choice(compressor: Any) -> bool:
    """Return whether `compressor` is a function that returns a compressor for each named tensor."""
    return callable(compressor) and not isinstance(compressor, Compressor | type)
