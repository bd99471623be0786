"""The errors that are the library's own; bad arguments raise ``ValueError`` or ``TypeError`` as everywhere."""


class CollectiveError(RuntimeError):
    """Say that a collective did not happen because of what *other* ranks brought, and name them.

    It is raised on every rank that brought sound arguments itself; a rank that brought a bad one raises that error
    (``ValueError`` or ``TypeError``) instead. No rank returns a result, and no vector or residual was changed.
    """


class CollectiveTimeoutError(CollectiveError):
    """Say that a collective waited longer than `collectives.configure(timeout=...)` allows, in what and for whom.

    Raised on every rank that waits, and by every later call on this communicator. No vector or residual was changed.
    """


class CodecError(ValueError):
    """Say that bytes are no message of this codec: truncated, of another version, or inconsistent in themselves."""


class DamagedMessageError(CollectiveError):
    """Say that a message arrived other than it was sent: cut, or, in the debug mode (MPICOMP_CHECK), with other bits.

    Raised on the rank that gets it, and, where there is a deadline or the debug mode, on all that wait; then the
    communicator is as after a deadline. No vector or residual was changed by the calls that raise it.
    """


class RankFailedError(CollectiveError):
    """Say that a rank died, and which one, where MPI can tell (ULFM); `collectives.shrink` goes on with the others.

    Raised by every operation in flight on this communicator, and by every later call. No vector or residual was changed
    by the calls that raise it.
    """


class CheckError(CollectiveError):
    """Say that the debug mode (MPICOMP_CHECK=1) found a promise broken, or ranks that call different operations."""
