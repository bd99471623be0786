"""Settings: checked arguments as plain Python values, and as text that is compared with that of saved states.

A setting of another kind raises TypeError, and one out of range ValueError; both name
it. NumPy's scalars become Python's, the same text on all ranks.
"""

import json
from collections.abc import Iterable, Mapping
from inspect import Parameter, ismethod, signature
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST = 2**63 - 1  # in messages and arrays integers have 64 bits
INTEGERS = int, np.integer
REALS = int, float, np.integer, np.floating
NO_NUMBERS = bool, np.timedelta64  # though Python and NumPy register them as integers
OTHER_SETTINGS = "make the exchange with the settings that were saved, or load with same_settings=False"


class Configured:
    """Base class of compressors and feedback.

    Store every constructor argument in an attribute of the same name: `repr` shows
    them.
    """

    def _settings(self) -> dict[str, Any]:
        """Return the constructor's arguments by name, except those that change between steps."""
        variadic = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
        parameters = signature(type(self)).parameters.values()
        settings = {}
        for parameter in parameters:
            if parameter.kind not in variadic:
                value = getattr(self, parameter.name, "?")
                # a method of that name is no setting
                settings[parameter.name] = "?" if ismethod(value) else value
        return settings

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{name}={value!r}"
            for name, value in self._settings().items()
            if value is not None
        )
        return f"{type(self).__name__}({shown})"


class SetOnce:
    """An attribute that is set in `__init__` and not again, as nothing would follow a later change."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else vars(owner)[self._name]

    def __set__(self, owner: Any, value: Any) -> None:
        if self._name in vars(owner):
            raise AttributeError(
                f"{self._name} of {type(owner).__name__} is read-only: make a new object with another {self._name}"
            )
        vars(owner)[self._name] = value


def to_integer(
    name: str, value: Any, least: int = 1, most: int = LARGEST, *, remedy: str = ""
) -> int:
    """Return a setting as an int from `least` to `most`; bools and floats are refused."""
    if isinstance(value, NO_NUMBERS) or not isinstance(value, INTEGERS):
        raise TypeError(f"{name} is {value!r}: expected an integer{remedy}")
    if not least <= (number := int(value)) <= most:
        bounds = (
            f"of at least {least}, below 2^63"
            if most == LARGEST
            else f"from {least} to {most}"
        )
        raise ValueError(f"{name} is {value!r}: expected an integer {bounds}{remedy}")
    return number


def to_number(
    name: str,
    value: Any,
    *,
    above: float = -inf,
    least: float = -inf,
    below: float = inf,
    most: float = inf,
    remedy: str = "",
) -> float:
    """Return a setting as a finite float with above < value < below and least <= value <= most; bools are refused."""
    if isinstance(value, NO_NUMBERS) or not isinstance(value, REALS):
        raise TypeError(f"{name} is {value!r}: expected a number{remedy}")
    number = float(value)
    if not (above < number < below and least <= number <= most):
        lower = (
            f"{above} <"
            if above > -inf
            else f"{least} <="
            if least > -inf
            else "-infinity <"
        )
        upper = (
            f"< {below}"
            if below < inf
            else f"<= {most}"
            if most < inf
            else "< infinity"
        )
        raise ValueError(
            f"{name} is {value!r}: expected {lower} {name} {upper}{remedy}"
        )
    return number


def to_bool(name: str, value: Any) -> bool:
    """Return a setting as a bool; 1 and 0 are refused."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} is {value!r}: expected True or False")
    return bool(value)


def to_choice(
    name: str, value: Any, choices: Iterable[Any], *, remedy: str = ""
) -> Any:
    """Return the one of `choices` (str, int, bool or None) that equals a setting of its type: 1 is not True."""
    plain = value.item() if isinstance(value, np.generic) else value
    known = list(choices)
    for choice in known:
        if type(plain) is type(choice) and plain == choice:
            return choice
    raise ValueError(f"{name} is {value!r}: expected one of {known}{remedy}")


def to_table(settings: Mapping[str, Any]) -> NDArray[Any]:
    """Return settings as an array of bytes, the JSON of an object of texts, which any store of arrays takes."""
    texts = {name: str(value) for name, value in settings.items()}
    return np.frombuffer(json.dumps(texts).encode(), np.uint8).copy()


def from_table(table: Any) -> dict[str, str]:
    """Return the names and values, as text, of an array that `to_table` returned; raises ValueError for another one."""
    array = np.asarray(table)
    if array.dtype != np.uint8:
        raise ValueError(
            f"the settings of the state are {array.dtype}: expected bytes (uint8); the state is damaged, "
            "or was saved by another version"
        )
    texts: dict[str, str] = json.loads(array.tobytes())
    return texts


def check_table(
    state: str, table: Any, settings: Mapping[str, Any], remedy: str
) -> None:
    """Raise ValueError that names both values if a table from `to_table`, of a state, differs from `settings`."""
    saved = from_table(table)
    for name, value in settings.items():
        if saved.get(name) != str(value):
            raise ValueError(
                f"{state} was saved with {name} {saved.get(name)}: expected {value}; {remedy}"
            )
