"""Settings: the constructor's arguments of a part, as text, by which ranks and saved states are compared."""

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any

import numpy as np
from numpy.typing import NDArray

OTHER_SETTINGS = "make the exchange with the settings that were saved, or load with same_settings=False"


class Configured:
    """Base of the parts that a user configures: compressors and feedback.

    Store every constructor argument in an attribute of the same name: `repr` shows them.
    """

    def _settings(self) -> dict[str, Any]:
        """Return the constructor's arguments by name: those that stay as they are between steps."""
        variadic = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
        parameters = signature(type(self)).parameters.values()
        return {each.name: getattr(self, each.name, "?") for each in parameters if each.kind not in variadic}

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._settings().items() if value is not None)
        return f"{type(self).__name__}({shown})"


def to_table(settings: Mapping[str, Any]) -> NDArray[Any]:
    """Return settings as an array of text that np.savez stores, shape (settings, 2): names and values."""
    return np.array([[name, str(value)] for name, value in settings.items()], np.str_).reshape(-1, 2)


def check_table(state: str, table: Any, settings: Mapping[str, Any], remedy: str) -> None:
    """Raise ValueError, which names both, where a table that `to_table` returned has other values than `settings`.

    state: whose table it is, in the error.
    """
    saved = {str(name): str(value) for name, value in np.reshape(table, (-1, 2))}
    for name, value in settings.items():
        if saved.get(name) != str(value):
            raise ValueError(f"{state} was saved with {name} {saved.get(name)}: expected {value}; {remedy}")
