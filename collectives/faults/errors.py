"""The errors between ranks; bad arguments raise ``ValueError`` or ``TypeError``.

A call that raises one of these changes no vector or residual.
"""


class CollectiveError(RuntimeError):
    """A collective failed because of the arguments of other ranks, which the text names.

    It is raised on every rank whose own arguments are valid; another one raises
    `ValueError` or `TypeError` instead.
    """


class NotFiniteError(ValueError):
    """The gradient of this rank has a NaN or an infinity, and the exchange has nonfinite="skip".

    A rank contributes it instead of a vector, and raises it unless all ranks raise
    `StepSkippedError`.
    """


class StepSkippedError(CollectiveError):
    """Raised on all ranks if one or more contributed `NotFiniteError`, and none contributed another error."""


class CollectiveTimeoutError(CollectiveError):
    """A collective exceeded the timeout; the text names operation, round and absent ranks.

    It is raised on every rank that waits, and by every later call on this communicator.
    `collectives.configure(timeout=...)` and MPICOMP_TIMEOUT set the timeout.
    """


class DamagedMessageError(CollectiveError):
    """A message was damaged in transit: it is truncated, or, in the debug mode (MPICOMP_CHECK), has other bits.

    It is raised on the rank that receives the message, and, with a timeout or in the debug
    mode, on all ranks that wait; the communicator is then in the state after a timeout.
    """


class RankFailedError(CollectiveError):
    """A rank died, which the text names, detected by MPI (ULFM); `collectives.shrink` continues with the other ranks.

    It is raised by every operation in flight on this communicator, and by every later call.
    """


class CheckError(CollectiveError):
    """The debug mode (MPICOMP_CHECK=1) found a wrong result, or ranks that call different operations."""
