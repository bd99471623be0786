"""The signatures of CuPy that its stand-in goes by: read from the wheel, which needs no GPU, and kept in a file.

    python tests/support/cupy_signatures.py            # compare the file with the installed CuPy: 1 where it differs
    python tests/support/cupy_signatures.py --write    # write it anew

The stand-in (tests/fake_cupy) binds every call to these: a keyword that CuPy does not
take is refused by both.
"""

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "fake_cupy" / "signatures.json"
_MARKS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def main() -> int:
    """Compare, or write; return the exit status."""
    import cupy

    assert not hasattr(cupy, "FAKE"), (
        "this is the stand-in: install the wheel, cupy-cuda12x"
    )
    names = json.loads(FILE.read_text())
    found = {name: of(cupy, name) for name in names}
    if "--write" in sys.argv:
        FILE.write_text(json.dumps(found, indent=0) + "\n")
    differing = {
        name: (names[name], found[name]) for name in names if names[name] != found[name]
    }
    for name, (ours, theirs) in differing.items():
        print(f"{name}: the stand-in has {ours}, CuPy {cupy.__version__} has {theirs}")
    print(
        f"{len(names)} names compared with CuPy {cupy.__version__}, {len(differing)} differ"
    )
    return 1 if differing and "--write" not in sys.argv else 0


def of(cupy: Any, name: str) -> str | None:
    """Return the parameters of what has a dotted name, as text; "" of what is no function, None of what is missing."""
    place, here = cupy, ""
    for part in name.split("."):
        if not hasattr(place, part):
            return None
        place, here = getattr(place, part), part
    if isinstance(place, cupy.ufunc):
        return f"({', '.join(f'x{i}' for i in range(place.nin))}, /, out=, *, casting=, dtype=)"
    if not callable(place):
        return ""
    of_class = _documented(place, "__init__") if inspect.isclass(place) else "(...)"
    if of_class != "(...)":
        return of_class
    try:
        return _text(inspect.signature(place))
    except (TypeError, ValueError):
        return _documented(place, here)


def _text(signature: inspect.Signature) -> str:
    """Return the names of parameters and how they may be given; their defaults and types do not matter."""
    shown: list[str] = []
    before = None
    for each in signature.parameters.values():
        if before == each.POSITIONAL_ONLY != each.kind:
            shown.append("/")
        if each.kind == each.KEYWORD_ONLY and before not in (
            each.KEYWORD_ONLY,
            each.VAR_POSITIONAL,
        ):
            shown.append("*")
        shown.append(
            _MARKS.get(each.kind, "")
            + each.name
            + ("" if each.default is each.empty else "=")
        )
        before = each.kind
    return (
        f"({', '.join(shown + ['/'] * (before == inspect.Parameter.POSITIONAL_ONLY))})"
    )


def _documented(place: Any, name: str) -> str:
    """Return the parameters that the first line of a docstring gives: what Cython writes for a compiled function."""
    first = (place.__doc__ or "").strip().partition("\n")[0]
    given = re.match(rf"(?:\w+\.)*{name}\((.*)\)(?: -> .*)?$", first)
    if given is None:
        return "(...)"
    flat = re.sub(r"=\([^)]*\)", "=", given[1])  # a default that is a tuple
    parts = [part for part in (each.strip() for each in flat.split(",")) if part]
    parts = [re.sub(r"=.*", "=", part).split()[-1].replace("\\", "") for part in parts]
    return f"({', '.join(parts)})"


if __name__ == "__main__":
    sys.exit(main())
