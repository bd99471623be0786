"""What every feedback method can do."""

from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

from mpicomp.vector import SparseVector


class Feedback(Protocol):
    """Keep what does not travel.

    A step is `correct`, `keep`, `result`. It works in two halves so that nothing is lost when a call fails in between:
    `correct` changes nothing that another `correct` would miss, and `keep` is called only once the collective has
    succeeded.
    """

    @property
    def residual(self) -> NDArray[Any] | None:
        """What this rank owes, shape (n,): a read-only view that holds until the next call; None where nothing is."""
        ...

    def correct(self, gradient: NDArray[Any]) -> NDArray[Any]:
        """Return what is to be compressed: `gradient` (1-d) with what was kept; changes no state that `keep` needs."""
        ...

    def keep(self, corrected: NDArray[Any], sent: SparseVector, rejected: SparseVector | None) -> None:
        """Keep `corrected` less `sent`, the values that receivers decode, plus `rejected`, what came back.

        corrected: the array that `correct` returned; it belongs to the feedback from now on.
        """
        ...

    def result(self, mean: SparseVector, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return the dense vector that the exchange hands back, from the mean over the ranks of what arrived.

        out: the array to write it to, and to return, where the caller of the exchange gave one; it may be the gradient
        of the step. A method without it has its result copied there. Called once after each `keep`. The array is the
        caller's: the feedback keeps no reference to it.
        """
        ...

    def rescale(self, factor: float) -> None:
        """Multiply what is owed in gradient units by `factor`, the old learning rate over the new one."""
        ...

    def reset(self) -> None:
        """Forget everything kept: its mass is lost, as after a change of the model."""
        ...

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return copies of everything kept, by name: arrays only (numbers as 0-d ones), so that np.savez can store it.

        The settings of the constructor are not in it.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a copy of what `state_dict` returned; the steps that follow have the same bits.

        Raises ValueError for other names, dtypes or shapes, and for what is not finite; nothing changes then.
        """
        ...
