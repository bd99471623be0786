"""Settings: checked arguments as plain Python values.

A setting of another kind raises TypeError, and one out of range ValueError; both name
it. NumPy's scalars become Python's, the same text on all ranks.
"""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from inspect import Parameter, getfullargspec, signature
from math import inf
from typing import Any

import numpy as np

# Integers have 64 bits in messages and arrays.
LARGEST = 2**63 - 1
INTEGERS = int, np.integer
REALS = int, float, np.integer, np.floating
# Python and NumPy register these as integers.
NO_NUMBERS = bool, np.timedelta64
OTHER_SETTINGS = "make the exchange with the settings that were saved, or load with same_settings=False"


class CheckedKeywords:
    """Base class whose constructor says what is wrong with its arguments by the name of the class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # A copy, of which each of thousands of tensors may have one, is made without.
        if not (args or kwargs):
            return super().__new__(cls)
        name, function = cls.__name__, cls.__init__
        if error := unknown_keyword(name, function, kwargs):
            raise error
        positional = getfullargspec(function)
        known = positional.args[1:]
        if len(args) > len(known) and not positional.varargs:
            raise TypeError(
                f"{name} got {len(args)} arguments by position: expected at most {len(known)} {known}; "
                "pass others by name"
            )
        return super().__new__(cls)


def unknown_keyword(
    name: str, function: Callable[..., Any], keywords: Iterable[str]
) -> TypeError | None:
    """Return an error for the first keyword that a function does not take, with the nearest that it does; else None.

    Args:
        name: of the function or class, as the caller knows it.
        function: whose signature is looked at.
        keywords: of the caller.
    """
    parameters = signature(function).parameters
    if any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values()):
        return None
    known = parameters.keys() - {"self"}
    for keyword in keywords:
        if keyword not in known:
            meant = get_close_matches(keyword, known, 1) or sorted(known) or ["none"]
            return TypeError(
                f"{name} has no argument {keyword!r}: expected {' or '.join(meant)}"
            )
    return None


class SetOnce:
    """An attribute that is set in `__init__` and not again, as nothing would follow a later change.

    It has no `__get__`, so Python reads the value in the object itself.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

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
        bounds = f"from {least} to {most}"
        if most == LARGEST:
            bounds = f"of at least {least}, below 2^63"
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
        lower = "-infinity <"
        if above > -inf:
            lower = f"{above} <"
        elif least > -inf:
            lower = f"{least} <="
        upper = "< infinity"
        if below < inf:
            upper = f"< {below}"
        elif most < inf:
            upper = f"<= {most}"
        raise ValueError(
            f"{name} is {value!r}: expected {lower} {name} {upper}{remedy}"
        )
    return number


def to_bool(name: str, value: Any) -> bool:
    """Return a setting as a bool; 1 and 0 are refused."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is {value!r}: expected True or False")
    return bool(value)


def to_choice(name: str, value: Any, choices: Iterable[Any]) -> Any:
    """Return the one of `choices` (str, int, bool or None) that equals a setting of its type: 1 is not True."""
    plain = value.item() if isinstance(value, np.generic) else value
    known = list(choices)
    for choice in known:
        if type(plain) is type(choice) and plain == choice:
            return choice
    raise ValueError(f"{name} is {value!r}: expected one of {known}")
