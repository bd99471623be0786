"""A Sphinx extension: the pages, which GitHub renders as they are, as pages of a site.

Sphinx knows the files below docs/ only. Other files that pages link to become pages
below docs/files, which git ignores: Markdown as it is, code in a block. A link to a folder
becomes its text, and one to any other file a download. The front page gets the list of
pages of conf.py, and each page the words of it by which the search finds that page first;
both would be noise on GitHub. The reference gets an entry for each public name.
"""

import importlib
import inspect
import os
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^):#]+)(#[^)]*)?\)")
PUBLIC = re.compile(r"(?m)^\.\. public:: (\w+) (\S+)\n")
OTHERS = "files"  # the folder of pages that are made of other files
ORPHAN = "---\norphan: true\n---\n\n"  # no list of pages need have it
CODE = """\
# {name}

{{download}}`Download <{target}>`

```{{literalinclude}} {target}
:language: python
```
"""


def page_of(path: Path, repository: Path) -> str | None:
    """Return the name of the page that is made of a file, or None."""
    if path.suffix not in (".md", ".py") or not path.is_file():
        return None
    name = "-".join(path.relative_to(repository).with_suffix("").parts)
    return f"{OTHERS}/{name.removesuffix('-README')}"


def rewritten(text: str, origin: Path, page: Path, root: Path) -> str:
    """Return Markdown of the file `origin` for the place `page`, with links that lead somewhere on the site.

    root: docs/, in which both the other pages and `page` are.
    """

    def link(found: re.Match[str]) -> str:
        image, name, target, anchor = found.groups(default="")
        path = (origin.parent / target).resolve()
        relative = os.path.relpath(path, page.parent)
        if path.is_relative_to(root) and path.exists():
            return f"{image}[{name}]({relative}{anchor})"
        if path.is_dir() or not path.exists():
            return name
        if other := page_of(path, root.parent):
            beside = os.path.relpath(root / f"{other}.md", page.parent)
            return f"[{name}]({beside}{anchor})"
        return f"{{download}}`{name.strip('`')} <{relative}>`"

    return LINK.sub(link, text)


def linked_files(text: str, origin: Path, root: Path) -> set[Path]:
    """Return the files outside docs/ that Markdown links to and that become pages."""
    targets = {
        (origin.parent / found.group(3)).resolve() for found in LINK.finditer(text)
    }
    return {
        path
        for path in targets
        if path.is_relative_to(root.parent)
        and not path.is_relative_to(root)
        and page_of(path, root.parent)
    }


def make_pages(app: Any) -> None:
    """Write the pages of other files: those that any page links to."""
    root = Path(app.srcdir)
    folder = root / OTHERS
    folder.mkdir(exist_ok=True)
    made: set[Path] = set()
    waiting = {page for page in root.rglob("*.md") if page.parent != folder}
    while waiting:
        origin = waiting.pop()
        text = origin.read_text()
        if not origin.is_relative_to(root):
            made.add(origin)
            page = root / f"{page_of(origin, root.parent)}.md"
            new = rewritten(text, origin, page, root)
            if origin.suffix == ".py":
                target = os.path.relpath(origin, folder)
                new = CODE.format(name=origin.relative_to(root.parent), target=target)
            if not page.exists() or page.read_text() != ORPHAN + new:
                page.write_text(ORPHAN + new)
        if origin.suffix == ".md":
            waiting |= linked_files(text, origin, root) - made


def list_of_pages(contents: dict[str, list[str]], root: Path) -> str:
    """Return the list of pages for the front page: those of `contents` under their headings, and then the others."""
    known = {"index", *(page for pages in contents.values() for page in pages)}
    others = sorted(path.stem for path in root.glob("*.md") if path.stem not in known)
    sections = {**contents, "More": others} if others else contents
    trees = (
        f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n"
        + "\n".join(pages)
        + "\n```"
        for caption, pages in sections.items()
    )
    return "\n\n".join(trees)


def with_words(text: str, words: list[str]) -> str:
    """Return a page with words for the index below its title."""
    title, _, rest = text.partition("\n")
    entries = ", ".join(f"!{word}" for word in words)  # !: before other results
    return f"{title}\n\n```{{index}} {entries}\n```\n{rest}"


def with_public(text: str) -> str:
    """Return a page of the reference with entries in place of its lines ``.. public:: package pattern``.

    They are of the public names of the package whose "module:name" the pattern matches,
    and that have no entry of their own on the page.
    """

    def entries(found: re.Match[str]) -> str:
        name_of_it, pattern = found.groups()
        package = importlib.import_module(name_of_it)
        lines = []
        for name in sorted(package.__all__):
            public = getattr(package, name)
            is_here = re.fullmatch(pattern, f"{public.__module__}:{name}")
            if is_here and f":: {name_of_it}.{name}\n" not in text:
                kind = "class" if inspect.isclass(public) else "function"
                lines.append(f".. auto{kind}:: {name_of_it}.{name}\n")
        return "".join(lines)

    return PUBLIC.sub(entries, text)


def rewrite(app: Any, page: str, source: list[str]) -> None:
    """Rewrite the source of a page."""
    root = Path(app.srcdir)
    if not page.startswith((f"{OTHERS}/", "api/")):
        path = root / f"{page}.md"
        source[0] = rewritten(source[0], path, path, root)
    source[0] = with_public(source[0])
    if page in app.config.searched:
        source[0] = with_words(source[0], app.config.searched[page])
    if page == "index":
        source[0] += "\n" + list_of_pages(app.config.contents, root) + "\n"


def setup(app: Any) -> dict[str, bool]:
    """Register the extension with Sphinx."""
    app.add_config_value("contents", {}, "env")
    app.add_config_value("searched", {}, "env")
    app.connect("builder-inited", make_pages)
    app.connect("source-read", rewrite)
    return {"parallel_read_safe": True}
