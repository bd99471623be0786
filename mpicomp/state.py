"""Settings and state of the parts of an exchange: declared names, one saver and one checker for all of them.

A state is a dict of arrays by name. Segments of a vector, such as the tensors of a
bucket, have a state each, whatever the bucket: how a part holds the values of its
segments is its layout.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from inspect import Parameter, ismethod, signature
from typing import Any, ClassVar

import numpy as np

from mpicomp.arrays import Array, ByName
from mpicomp.arrays.device import to_numpy
from mpicomp.arrays.memory import new_vector
from mpicomp.arrays.values import VALUE_DTYPES
from mpicomp.settings import CheckedKeywords

Range = tuple[float, float]
"""The least and the most value of a number, or of all elements of an array."""

# Layouts: one value for all segments; a row, or a part of a vector, for each.
SHARED = "shared"
ROWS = "rows"
POSITIONS = "positions"
CLASS = "class"  # in settings
ONE = [slice(None)]  # the span of the only segment, of any length


_ADDRESS = (
    # The repr of a function has an address, as has that of an object without a repr of
    # its own.
    " at 0x"
)
_GENERATORS = {"Generator", "RandomState", "Random"}


class SharedStateError(ValueError):
    """Raised for segments that share a state, and were saved with different ones."""


# Thousands of tensors may have an object each, of few classes.
@lru_cache
def arguments_of(kind: type) -> list[str]:
    """Return the names of a constructor's arguments, without `*args` and `**kwargs`."""
    variadic = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
    parameters = signature(kind).parameters.values()
    return [one.name for one in parameters if one.kind not in variadic]


class Configured(CheckedKeywords):
    """Base class of compressors, feedback and bases: settings that `repr` shows, and a state.

    Store every constructor argument in an attribute of the same name.
    """

    state: ClassVar[Mapping[str, Range]] = {}
    """Attributes to save, each with the range of loaded values; an attribute that is None is not saved."""

    layout: ClassVar[str] = SHARED
    """How these attributes hold the values of segments."""

    def __init__(self) -> None:
        """See the class."""

    def _settings(self) -> dict[str, Any]:
        """Return the constructor's arguments by name, except those that change between steps."""
        settings = {}
        kind: Any = type(self)
        for name in arguments_of(kind):
            value = getattr(self, name, "?")
            # A method of that name is not a setting.
            settings[name] = "?" if ismethod(value) else value
        return settings

    def check_settings(self) -> None:
        """Raise TypeError for what two processes cannot compare, or what a step that fails cannot restore."""
        kind = type(self).__name__
        for name, value in self._settings().items():
            if isinstance(value, str) and value == "?":
                raise TypeError(
                    f"{kind} has no attribute {name!r}: store every constructor argument in an attribute of the same "
                    "name, by which states compare settings"
                )
            if _ADDRESS in repr(value):
                raise TypeError(
                    f"{name} of {kind} is {value!r}, which other processes cannot compare: expected a value that repr "
                    "shows, such as a number or a text"
                )
        for name, value in vars(self).items():
            if _GENERATORS.intersection(base.__name__ for base in type(value).__mro__):
                raise TypeError(
                    f"{name} of {kind} is a generator of random numbers, which is neither restored after a step that "
                    "fails nor saved: draw from np.random.default_rng([seed, step]), with step in `state`"
                )

    def get_config(self) -> dict[str, Any]:
        """Return the class and the settings by name, by which states are compared."""
        config: dict[str, Any] = {CLASS: type(self).__name__}
        for name, value in self._settings().items():
            if isinstance(value, Configured):
                value = value.get_config()
            config[name] = value
        return config

    def __repr__(self) -> str:
        return shown(self.get_config())

    def parts(self) -> dict[str, "Configured"]:
        """Return what has a state, by the prefix of its names: this object, and those it wraps."""
        return {"": self}

    def declared(self) -> dict[str, tuple[Range, str]]:
        """Return the names to save, each with its range and its layout."""
        return {name: (limits, self.layout) for name, limits in self.state.items()}

    def held(self) -> dict[str, Any]:
        """Return the declared values; None, or no value, is not saved."""
        return {name: getattr(self, name) for name in self.state}

    def take(self, values: ByName) -> None:
        """Take checked values; raises ValueError, and changes nothing, if they do not fit together."""
        for name, value in values.items():
            setattr(self, name, value)

    def state_dict(self) -> dict[str, Array]:
        """Return copies of the state, without settings: arrays in host memory by name, which np.savez can store."""
        (state,) = save(self, ONE)
        return state

    def load_state_dict(self, state: ByName) -> None:
        """Load copies of a `state_dict` of an object with these settings; the following steps have the same bits.

        Raises ValueError for names that are unknown or missing, and for values of a
        shape, kind or range that this object cannot have, TypeError for no state;
        nothing changes then.
        """
        check_names(state)
        load(self, {"the state": state}, ONE)


def check_object(value: Any, kind: type[Configured], name: str, example: str) -> None:
    """Raise TypeError unless this is an object of a class, whose settings can be compared.

    name: of the argument, and example: of an object, in the error.
    """
    if isinstance(value, kind):
        for part in value.parts().values():
            part.check_settings()
        return
    got = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
    raise TypeError(
        f"{name} is {got}: expected an object such as {example}, or of a class of your own that derives from "
        f"mpicomp.{kind.__name__}"
    )


def check_names(state: Any) -> None:
    """Raise TypeError unless a state is a mapping whose keys are texts."""
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise TypeError(
            f"the state is {type(state).__name__}: expected arrays by name, what state_dict() returned"
        )


def save(owner: Configured, spans: Sequence[slice]) -> list[dict[str, Array]]:
    """Return copies of the state of each segment. spans: the positions of the segments."""
    states: list[dict[str, Array]] = [{} for _ in spans]
    for prefix, part in owner.parts().items():
        declared = part.declared()
        for name, value in part.held().items():
            if value is None:
                continue
            values = _of_segments(value, declared[name][1], spans)
            for state, own in zip(states, values, strict=True):
                state[prefix + name] = np.array(to_numpy(own))
    return states


def load(
    owner: Configured, states: Mapping[str, ByName], spans: Sequence[slice]
) -> None:
    """Load copies of the state of each segment, by what it is called in errors; see `Configured.load_state_dict`."""
    parts = owner.parts()
    known = {
        prefix + name for prefix, part in parts.items() for name in part.declared()
    }
    for called, state in states.items():
        if not state.keys() <= known:
            raise ValueError(
                f"{called} has {sorted(state)}: expected {sorted(known)} at most"
            )
    loaded = []
    for prefix, part in parts.items():
        present = part.held()
        values = {}
        for name, (limits, layout) in part.declared().items():
            like: Any = None
            if layout != POSITIONS:
                like = present[name]
            if layout == ROWS:
                like = like[0]
            by_segment = {
                called: checked(state, prefix + name, like, called, limits)
                for called, state in states.items()
            }
            values[name] = _joined(name, by_segment, layout, spans)
        loaded.append((part, values))
    for part, values in loaded:
        part.take(values)


def checked(
    state: ByName,
    name: str,
    like: Any,
    called: str,
    limits: Range,
) -> Any:
    """Return a copy of a value of a state, of the type of another one.

    like: a number; or an array, also for dtype and shape; None for any vector, and if
    the value is missing. called: the state, in errors. Raises ValueError for another
    type, and unless all values are finite and in the range.
    """
    array: Any = np.array(to_numpy(state[name])) if name in state else None
    if like is None and array is None:
        return None
    expected, fits = _compared(array, like)
    least, most = limits
    if not fits or not (np.isfinite(array) & (least <= array) & (array <= most)).all():
        if array is None:
            got = "nothing"
        elif array.size == 1:
            got = repr(array)
        else:
            got = kind_of_array(array)
        raise ValueError(
            f"{called} has {got} as {name}: expected {expected} from {least} to {most}"
        )
    return type(like)(array) if isinstance(like, int | float) else array


def _compared(array: Any, like: Any) -> tuple[str, bool]:
    """Return a text of what is expected, and whether an array is as expected."""
    dtype: Any = None if array is None else array.dtype
    shape: Any = None if array is None else array.shape
    if like is None:
        kinds = ", ".join(map(str, VALUE_DTYPES))
        return f"a finite vector of {kinds}", dtype in VALUE_DTYPES and len(shape) == 1
    if hasattr(like, "dtype"):
        return kind_of_array(like), (dtype, shape) == (like.dtype, like.shape)
    if type(like) is int:
        return "an integer", shape == () and dtype.kind in "iu"
    return "a number", shape == () and dtype.kind in "iuf"


def _of_segments(value: Any, layout: str, spans: Sequence[slice]) -> list[Any]:
    """Return the value of each segment."""
    if layout == POSITIONS:
        return [value[span] for span in spans]
    return list(value) if layout == ROWS else [value] * len(spans)


def _joined(name: str, values: ByName, layout: str, spans: Sequence[slice]) -> Any:
    """Return the values of the segments joined to one; raises ValueError if they do not fit together."""
    rows = [*values.values()]
    if layout == ROWS:
        return np.array(rows)
    if layout == SHARED:
        if any(row != rows[0] for row in rows[1:]):
            raise SharedStateError(
                f"the states of {[*values]} have different {name}: expected one step for all"
            )
        return rows[0]
    arrays = [row for row in rows if row is not None]
    if not arrays:
        return None
    if len({array.dtype for array in arrays}) > 1:
        raise ValueError(
            f"the states of {[*values]} have {name} of several dtypes: expected one"
        )
    size = arrays[0].size if spans is ONE else spans[-1].stop
    vector = new_vector(np, size, arrays[0].dtype)
    for (called, row), span in zip(values.items(), spans, strict=True):
        # A tensor that was held may have no array before its first step.
        if row is None:
            continue
        if row.size != vector[span].size:
            raise ValueError(
                f"{called} has {row.size} values: expected {vector[span].size}, of {row.dtype}"
            )
        vector[span] = row
    return vector


def kind_of_array(array: Array) -> str:
    """Return dtype and shape of an array, as text."""
    return f"{array.dtype} of shape {array.shape}"


def shown(config: Any) -> str:
    """Return settings from JSON as errors show them, those of `get_config` as a call."""
    if not (isinstance(config, dict) and CLASS in config):
        return repr(config)
    arguments = [
        f"{name}={shown(value)}"
        for name, value in config.items()
        if name != CLASS and value is not None
    ]
    return f"{config[CLASS]}({', '.join(arguments)})"
