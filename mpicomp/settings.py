"""Settings: the constructor's arguments of a part, as text; compared between ranks and with saved states."""

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any

import numpy as np
from numpy.typing import NDArray

OTHER_SETTINGS = "make the exchange with the settings that were saved, or load with same_settings=False"


class Configured:
    """Base class of compressors and feedback.

    Store every constructor argument in an attribute of the same name: `repr` shows them.
    """

    def _settings(self) -> dict[str, Any]:
        """Return the constructor's arguments by name, except those that change between steps."""
        variadic = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
        parameters = signature(type(self)).parameters.values()
        return {each.name: getattr(self, each.name, "?") for each in parameters if each.kind not in variadic}

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._settings().items() if value is not None)
        return f"{type(self).__name__}({shown})"


def refuse_bools(**numbers: Any) -> None:
    """Raise ValueError if one of the arguments, by name, is a bool, which Python would treat as 1 or 0."""
    for name, value in numbers.items():
        if isinstance(value, bool | np.bool_):
            raise ValueError(f"{name} is {value!r}, a bool: expected a number")


def to_table(settings: Mapping[str, Any]) -> NDArray[Any]:
    """Return settings as an array of text that np.savez stores, shape (settings, 2): names and values."""
    return np.array([[name, str(value)] for name, value in settings.items()], np.str_).reshape(-1, 2)


def from_table(table: Any) -> dict[str, str]:
    """Return the names and values, as text, of an array that `to_table` returned."""
    return {str(name): str(value) for name, value in np.reshape(table, (-1, 2))}


def check_table(state: str, table: Any, settings: Mapping[str, Any], remedy: str) -> None:
    """Raise ValueError that names both values if a table from `to_table` differs from `settings`.

    state: whose table it is, in the error.
    """
    saved = from_table(table)
    for name, value in settings.items():
        if saved.get(name) != str(value):
            raise ValueError(f"{state} was saved with {name} {saved.get(name)}: expected {value}; {remedy}")
