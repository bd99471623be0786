"""CuPy's signatures, which calls of the stand-in have to fit; and the names that the stand-in answers to."""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

_TABLE = json.loads((Path(__file__).parents[1] / "signatures.json").read_text())
_OWN = "FAKE", "surface"  # what CuPy does not have
_CLASSES = "ndarray", "RawModule", "RawKernel"
_OF_PYTHON = {
    *dir(object),
    *"__module__ __dict__ __weakref__ __annotations__ __doc__ __slots__".split(),
}


def checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that raises TypeError where CuPy's function of this name does not take the arguments."""

    def call(*args: Any, **how: Any) -> Any:
        check(name, args, how)
        return function(*args, **how)

    return call


def check(name: str, args: Sequence[Any], how: Mapping[str, Any]) -> None:
    """Raise TypeError where CuPy's function of this name does not take the arguments."""
    if name not in _TABLE:
        raise TypeError(f"the stand-in for CuPy has no {name}")
    try:
        _signature(_TABLE[name]).bind(*args, **how)
    except TypeError as error:
        raise TypeError(f"CuPy's {name}{_TABLE[name]}: {error}") from None


@cache
def _signature(text: str) -> inspect.Signature:
    scope: dict[str, Any] = {}
    exec(f"def function{text.replace('=', '=None')}: ...", scope)
    return inspect.signature(scope["function"])


def surface() -> Iterator[str]:
    """Yield the dotted name of everything that the stand-in answers to."""
    import cupy

    for name in cupy.__all__:
        if name not in (*_OWN, "cuda", "random", *_CLASSES):
            yield name
    classes = ("Stream", "Event", "Device", "MemoryPointer")
    modules = {
        f"cuda.{name}": getattr(cupy.cuda, name) for name in ("runtime", "driver")
    }
    for place, owner in {"cuda": cupy.cuda, **modules}.items():
        for name, value in vars(owner).items():
            ours = getattr(
                value, "__module__", "cupy.cuda"
            ) == "cupy.cuda" and not inspect.ismodule(value)
            if ours and not name.startswith("_") and name not in classes:
                yield f"{place}.{name}"
    yield "ndarray._c_contiguous"
    yield "cuda.Function.ptr"  # of what RawKernel.kernel returns
    for place, owner in [(name, getattr(cupy, name)) for name in _CLASSES] + [
        (f"cuda.{name}", getattr(cupy.cuda, name)) for name in classes
    ]:
        yield place
        for name in vars(owner):
            if not name.startswith("_") or (
                name.startswith("__") and name not in _OF_PYTHON | {"__init__"}
            ):
                yield f"{place}.{name}"
