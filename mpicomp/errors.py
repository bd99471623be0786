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
