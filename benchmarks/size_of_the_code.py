"""Count what a newcomer has to learn: tokens, classes, functions, imports; of this tree, or of a commit.

    python benchmarks/size_of_the_code.py [commit ...]

tokens: Python's, without comments, docstrings and layout, of the library outside
kernels; tools: of the command line. density: tokens a line that has one. wide
assignments: of three or more values at once, `a, b, c = x, y, z`. classes, functions:
of the library. private nouns: classes that neither package exports, but for exceptions
and the implementations of a contract (compressors, feedbacks, formats of the codec).
closure: modules outside kernels that the module of gTop-k imports, with what these
import, and their tokens; files that only describe a package, or export its names, are
left out. entries: what `ls collectives` shows. owners: files that write the state of a
communicator that is finished.
"""

import ast
import io
import re
import subprocess
import sys
import tarfile
import tokenize
from collections.abc import Iterator
from pathlib import PurePosixPath as Path

LIBRARY, TOOLS = ("mpicomp", "collectives"), ("collectives/cli", "mpicomp_bench")
STATE = re.compile(r"revoked\w*|gave_up|raised_as|notices|dead")
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
METHODS = (
    "mpicomp/compressors",
    "mpicomp/feedback",
    "mpicomp/codec/indices.py",
    "mpicomp/codec/values.py",
)


def sources(commit: str | None) -> dict[Path, str]:
    """Return the text of every file that git tracks, or of a commit, by path."""
    if commit is None:
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"],
            capture_output=True,
            text=True,
            check=True,
        )
        paths = [
            Path(line) for line in listed.stdout.splitlines() if line.endswith(".py")
        ]
        return {
            path: open(path, encoding="utf-8").read() for path in paths if _exists(path)
        }
    packed = subprocess.run(
        ["git", "archive", commit], capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        files = [
            member
            for member in archive
            if member.isfile() and member.name.endswith(".py")
        ]
        return {
            Path(each.name): archive.extractfile(each).read().decode() for each in files
        }  # type: ignore[union-attr]


def _exists(path: Path) -> bool:
    try:
        open(path, encoding="utf-8").close()
    except OSError:
        return False
    return True


def inside(path: Path, *folders: str) -> bool:
    """Return whether a path is in one of some folders."""
    return any(path.is_relative_to(folder) for folder in folders)


def classes(files: dict[Path, str]) -> Iterator[tuple[Path, ast.ClassDef]]:
    """Yield the classes of files, those inside of others too."""
    for path, text in files.items():
        yield from (
            (path, node)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.ClassDef)
        )


def exported(files: dict[Path, str]) -> set[str]:
    """Return the names that the two packages export."""
    found: set[str] = set()
    for package in LIBRARY:
        for node in ast.walk(ast.parse(files[Path(package, "__init__.py")])):
            if (
                isinstance(node, ast.Assign)
                and getattr(node.targets[0], "id", "") == "__all__"
            ):
                found |= set(ast.literal_eval(node.value))
    return found


def module_path(name: str, files: dict[Path, str]) -> Path | None:
    """Return the file of a module of this distribution."""
    stem = Path(*name.split("."))
    return next(
        (
            path
            for path in (stem.with_suffix(".py"), stem / "__init__.py")
            if path in files
        ),
        None,
    )


def imports(path: Path, files: dict[Path, str]) -> set[Path]:
    """Return the files that a module imports when it is imported."""
    found: set[Path | None] = set()

    def visit(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.Import):
                found.update(module_path(each.name, files) for each in node.names)
            elif isinstance(node, ast.ImportFrom):
                found.add(module_path(node.module or "", files))
                found.update(
                    module_path(f"{node.module}.{each.name}", files)
                    for each in node.names
                )
            elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(
                node.test
            ):
                visit(node.body)

    visit(ast.parse(files[path]).body)
    return {each for each in found if each is not None}


def closure(path: Path, files: dict[Path, str]) -> set[Path]:
    """Return the files that have to be read to know all of a module, kernels and packages' own files left out."""
    found, left, tops = (
        set[Path](),
        [path],
        {Path(package, "__init__.py") for package in LIBRARY},
    )
    while left:
        each = left.pop()
        if (
            each not in found
            and not inside(each, "mpicomp/kernels")
            and each not in tops
        ):
            found.add(each)
            left += imports(each, files)
    return {each for each in found if len(ast.parse(files[each]).body) > 1}


def tokens_by_line(text: str) -> list[int]:
    """Return the number of tokens of each line that has one, without comments and docstrings."""
    documented = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    counts: dict[int, int] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line = token.start[0]
        if token.type not in LAYOUT and line not in documented:
            counts[line] = counts.get(line, 0) + 1
    return list(counts.values())


def wide_assignments(text: str) -> int:
    """Return the number of assignments of three or more values at once."""
    return sum(
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        and len(node.value.elts) >= 3
        for node in ast.walk(ast.parse(text))
    )


def functions(text: str) -> int:
    """Return the number of functions and methods, those inside of others too."""
    return sum(isinstance(node, ast.FunctionDef) for node in ast.walk(ast.parse(text)))


def count(files: dict[Path, str]) -> dict[str, object]:
    """Return all figures of a tree."""
    tokens = {
        path: tokens_by_line(text)
        for path, text in files.items()
        if inside(path, *LIBRARY, *TOOLS)
    }
    library = {
        path: text
        for path, text in files.items()
        if inside(path, *LIBRARY) and not inside(path, *TOOLS)
    }
    outside = {
        path: text
        for path, text in library.items()
        if not inside(path, "mpicomp/kernels")
    }
    public = exported(files)
    nouns = sorted(
        node.name
        for path, node in classes(outside)
        if node.name not in public
        and not node.name.endswith("Error")
        and not inside(path, *METHODS)
    )
    gtopk = closure(Path("collectives/gtopk.py"), files)
    inner = {"__init__.py", "__pycache__", "py.typed"}
    entries = {path.parts[1] for path in files if inside(path, "collectives")} - inner
    total = sum(sum(tokens[path]) for path in outside)
    return {
        "tokens": total,
        "density": round(total / sum(len(tokens[path]) for path in outside), 2),
        "wide assignments": sum(map(wide_assignments, outside.values())),
        "tool tokens": sum(sum(tokens[path]) for path in files if inside(path, *TOOLS)),
        "classes": sum(1 for _ in classes(library)),
        "functions": sum(map(functions, library.values())),
        "private nouns": len(nouns),
        "closure modules": len(gtopk),
        "closure tokens": sum(sum(tokens[path]) for path in gtopk),
        "entries": len(entries),
        "owners": sum(map(_writes_state, library.values())),
        "nouns": nouns,
    }


def _writes_state(text: str) -> bool:
    for node in ast.walk(ast.parse(text)):
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [getattr(node, "target", None)]
        )
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Attribute) and STATE.fullmatch(
                    each.attr.lstrip("_")
                ):
                    return True
    return False


def main() -> None:
    """Print the figures of each tree asked for beside each other."""
    for commit in [*sys.argv[1:], None]:
        figures = count(sources(commit))
        print(commit or "this tree")
        for name, value in figures.items():
            print(f"  {name:14} {value}")


if __name__ == "__main__":
    main()
