"""Whether all ranks have the same parameters: compared by digests, in agreements that exist anyway or by a call."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from collectives.calls.all_or_none import gather_results
from collectives.calls.positions import Position, check_digests
from mpicomp.arrays.frameworks import is_array, to_array
from mpicomp.digests import digest
from mpicomp.settings import to_integer

EVERY = 100  # steps from one comparison to the next

_PLAIN = bool | int | float | str | None
REMEDY = "Expected the same bits on all ranks: broadcast rank 0's, or load one checkpoint on all ranks"


def check_replicas(parameters: Any, comm: Any) -> None:
    """Raise CollectiveError on all ranks unless the parameters of all ranks have the same bits.

    All ranks call it, for example after they loaded a checkpoint. It reads the
    parameters once, and sends 2 ceil(lg P) messages with about 70 bytes a tensor.

    Args:
        parameters: An array of any shape and real dtype, of a kind that an exchange
            accepts; or a dict, list or tuple of these, which may be nested, such as
            `dict(model.named_parameters())` or a pytree of JAX. Numbers, texts and None
            are compared as well.
        comm: An mpi4py intracommunicator.

    Raises:
        CollectiveError: On all ranks. It names the ranks that differ from most others,
            and the first tensor that differs; or what a rank got instead of arrays.
        TypeError: On a rank that has anything else in its parameters.

    Example:
        >>> check_replicas({"weight": np.ones(4, np.float32)}, comm)
    """
    everyone = gather_results(
        lambda: digests_of(parameters), comm, check_replicas.__name__
    )
    check_digests("", dict(enumerate(everyone)), REMEDY)


class Comparison:
    """What an exchange compares between the ranks when they agree on a step: the first one and every `every`-th.

    parameters: returns them; an empty dict on a rank whose parameters are not compared
    in this step. remedy: a sentence for errors.
    """

    def __init__(self, parameters: Callable[[], Any], every: int, remedy: str) -> None:
        self._parameters = parameters
        self._every = to_integer("check_every", every)
        self._remedy = remedy
        # Whether to compare at the next step, as after a state was loaded.
        self.is_due = True

    def position(self, state: str, step: int) -> Position:
        """Return this rank's position before a step, with digests if they are compared in it."""
        if not (self.is_due or step % self._every == 0):
            return Position(state)
        return Position(state, digests_of(self._parameters()), self._remedy)


def digests_of(parameters: Any) -> dict[str, str]:
    """Return the digests of nested arrays, by name; TypeError for anything else."""
    return {
        name: digest(to_array(leaf)) if is_array(leaf) else repr(leaf)
        for name, leaf in _leaves(parameters, "")
    }


def _leaves(parameters: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested containers, and their names, which begin with `name`."""
    parts: Iterable[tuple[Any, Any]]
    if isinstance(parameters, Mapping):
        parts = parameters.items()
    elif isinstance(parameters, list | tuple):
        parts = enumerate(parameters)
    elif is_array(parameters) or isinstance(parameters, _PLAIN):
        yield name or "array", parameters
        return
    else:
        raise TypeError(
            f"{name or 'parameters'} is {type(parameters).__name__}: expected an array, or a dict, list or tuple of "
            "arrays, such as dict(model.named_parameters()) or jax.tree.leaves(parameters)"
        )
    for key, part in parts:
        inner = f"{name}.{key}" if name else str(key)
        yield from _leaves(part, inner)
