"""The error of a damaged message, and how errors are kept and warnings given."""

import sys
import warnings
from typing import TypeVar

Raised = TypeVar("Raised", bound=BaseException)


class CodecError(ValueError):
    """A buffer is not a message of this codec: it is truncated, of another version, or inconsistent."""


def kept(error: Raised) -> Raised:
    """Return an error to be stored, and raised later: without tracebacks, its own and of the errors that led to it.

    Their frames hold arrays, and, with what holds the error, form cycles.
    """
    linked: BaseException | None = error
    # The loop ends at an error without a traceback, which was not raised or was seen
    # before: an error may be its own cause.
    while linked is not None and linked.__traceback__ is not None:
        linked.__traceback__ = None
        linked = linked.__cause__ or linked.__context__
    return error


def prefix(error: Exception, text: str) -> None:
    """Put text before that of an error."""
    if error.args and isinstance(error.args[0], str):
        error.args = f"{text}{error.args[0]}", *error.args[1:]


def warn(text: str, depth: int) -> None:
    """Warn, with a `stacklevel` of the caller; print where a filter makes errors of warnings.

    An error of one rank would leave the others waiting, or with a step that it has not.
    """
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=depth + 1)
    except RuntimeWarning:
        print(f"RuntimeWarning: {text}", file=sys.stderr)
