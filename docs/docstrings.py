"""A Sphinx extension: the docstrings of this repository, plain text in Google's style, for napoleon.

Characters that would be markup are escaped, and a public name in backticks becomes a
link to its entry. Sections, paragraphs and examples stay as they are.
"""

import re
from typing import Any

from numpy.typing import ArrayLike, DTypeLike, NDArray
from sphinx.util import inspect
from sphinx.util.typing import stringify_annotation

import collectives
import collectives.torch
import mpicomp
from mpicomp.settings import CheckedKeywords

MARKUP = re.compile(r"``[^`]*``|`([^`]*)`|([*|\\]|_\b)")
PUBLIC = {
    name: package.__name__
    for package in (mpicomp, collectives, collectives.torch)
    for name in package.__all__
}

# No user calls the constructors of these.
MADE_BY_THE_LIBRARY = {"Request", "SupportPlan", "Handle", "Patch"}

# types of NumPy, as Sphinx writes them, and their names
NAMES = {
    stringify_annotation(kind, "smart"): name
    for kind, name in (
        (ArrayLike, "ArrayLike"),
        (DTypeLike, "DTypeLike"),
        (NDArray[Any], "ndarray"),
    )
}


def linked(code: str) -> str:
    """Return a name in backticks as a link to its entry, if it is public; else as code."""
    name = code.partition("(")[0]
    package = PUBLIC.get(name.partition(".")[0])
    return f":py:obj:`{code} <{package}.{name}>`" if package else f"``{code}``"


def escaped(text: str) -> str:
    """Return text without markup, apart from names in backticks."""

    def one(found: re.Match[str]) -> str:
        code, character = found.groups()
        if character:
            return f"\\{character}"
        return linked(code) if code else found.group()

    return MARKUP.sub(one, text)


def to_rst(
    app: Any, what: str, name: str, target: Any, options: Any, lines: list[str]
) -> None:
    """Escape a docstring in place, except for its examples and the marks of lists."""
    is_example = False
    for number, line in enumerate(lines):
        text = line.lstrip()
        is_example = bool(text) and (is_example or text.startswith(">>>"))
        if not is_example:
            start = len(line) - len(text) + 2 * text.startswith(("* ", "- "))
            lines[number] = line[:start] + escaped(line[start:])


def with_short_types(
    app: Any,
    what: str,
    name: str,
    target: Any,
    options: Any,
    signature: str | None,
    returned: str | None,
) -> tuple[str | None, str | None]:
    """Return a signature in which NumPy's types have their names; of a class that of its `__init__`.

    Sphinx takes that of `__new__`, which for classes of this library checks keywords only.
    """
    if name.rpartition(".")[2] in MADE_BY_THE_LIBRARY:
        return "", None
    if what == "class" and issubclass(target, CheckedKeywords):
        of_init = inspect.signature(target.__init__, bound_method=True)
        signature = inspect.stringify_signature(
            of_init, show_return_annotation=False, unqualified_typehints=True
        )
    # Sphinx takes that of a function that a collective wraps, which is its `Call`.
    if what == "function" and hasattr(target, "__signature__"):
        result = target.__signature__.return_annotation
        returned = stringify_annotation(result, "smart")
    for long, short in NAMES.items():
        signature = signature and signature.replace(long, short)
        returned = returned and returned.replace(long, short)
    return signature, returned


def setup(app: Any) -> dict[str, bool]:
    """Register the extension with Sphinx, before napoleon."""
    app.connect("autodoc-process-docstring", to_rst, priority=400)
    app.connect("autodoc-process-signature", with_short_types)
    return {"parallel_read_safe": True}
