"""A Sphinx extension: the docstrings of this repository, which are plain text, as reStructuredText.

In a paragraph of a docstring "name: what it is." describes a parameter. Such sentences
become a list of parameters; indented lines become a literal block, and characters that
would be markup are escaped.
"""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import collectives
import mpicomp

MARKUP = re.compile(r"`([^`]*)`|([*|\\]|_\b)")
SEVERAL = re.compile(", | or ")  # between names that are described together
# of what is said of a parameter
END = re.compile(r"(?<=\.) (?=Raises |Returns |One object )")
PUBLIC = {
    name: package.__name__
    for package in (mpicomp, collectives)
    for name in package.__all__
}
# the base of compressors with a density, not exported
PUBLIC["Density"] = "mpicomp.compressors.common"


def paragraphs(lines: list[str]) -> Iterator[list[str]]:
    """Yield the paragraphs of a docstring."""
    found: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            found.append(line)
        elif found:
            yield found
            found = []


def linked(code: str) -> str:
    """Return a name in backticks as a link: to the entry of the reference, if it is public."""
    name = code.partition("(")[0]
    package = PUBLIC.get(name.partition(".")[0])
    return f":py:obj:`{code} <{package}.{name}>`" if package else f"`{code}`"


def escaped(text: str) -> str:
    """Return text without markup, apart from names in backticks."""
    return MARKUP.sub(
        lambda found: (
            f"\\{found.group(2)}" if found.group(2) else linked(found.group(1))
        ),
        text,
    )


def described(text: str, names: list[str]) -> tuple[str, list[str]]:
    """Return a paragraph without the sentences about parameters, and these as fields of a list."""
    known = "|".join(map(re.escape, names)) or "(?!)"
    starts = re.compile(
        rf"(?:^|(?<=[.;)] ))((?:{known})(?:(?:, | or )(?:{known}))*)(?:\([^)]*\))?: "
    )
    before, *rest = starts.split(text)
    fields, after = [], ""
    for name, what in zip(rest[::2], rest[1::2], strict=True):
        about, *others = END.split(what.strip(), maxsplit=1)
        after = " ".join([after, *others]).strip()
        fields.append(f":param {SEVERAL.sub(',', name)}: {escaped(about)}")
    return f"{escaped(before.strip())}\n\n{escaped(after)}".strip(), fields


def parameters(target: Any) -> list[str]:
    """Return the names of the parameters of a function, or of a class."""
    try:
        return [name for name in inspect.signature(target).parameters if name != "self"]
    except (TypeError, ValueError):
        return []


def to_rst(
    app: Any, what: str, name: str, target: Any, options: Any, lines: list[str]
) -> None:
    """Rewrite a docstring in place."""
    names, found, fields = parameters(target), list[str](), list[str]()
    place = None  # of the list of parameters
    for paragraph in paragraphs(lines):
        first = paragraph[0]
        if first.lstrip().startswith(">>>"):
            found += [line[len(first) - len(first.lstrip()) :] for line in paragraph]
        elif all(line.startswith("  ") for line in paragraph):
            found += ["::", "", *paragraph]
        elif first.startswith(("* ", "- ")):
            found += [
                escaped(line) if line.startswith(" ") else line[:2] + escaped(line[2:])
                for line in paragraph
            ]
        else:
            text, described_here = described(
                " ".join(line.strip() for line in paragraph), names
            )
            found += text.split("\n")
            place = len(found) if described_here and place is None else place
            fields += described_here
        found.append("")
    if place is not None:
        found[place:place] = ["", *fields, ""]
    lines[:] = found


def skip(
    app: Any, what: str, name: str, target: Any, skipped: bool, options: Any
) -> bool | None:
    """Leave out the tables of checks that compressors declare."""
    return True if name == "state" and target else None


def setup(app: Any) -> dict[str, bool]:
    """Register the extension with Sphinx."""
    app.connect("autodoc-process-docstring", to_rst)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True}
