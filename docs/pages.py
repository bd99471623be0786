"""A Sphinx extension: the pages, which GitHub renders as they are, as pages of a site.

Sphinx knows the files below docs/ only. A link to another file of the repository
becomes a download of it, and one to a folder its text. The front page gets the list of
pages of conf.py, and each page the words of it by which the search finds that page first;
both would be noise on GitHub.
"""

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#]+)(#[^)]*)?\)")


def to_downloads(text: str, folder: Path, root: Path) -> str:
    """Return a page, in a folder below root, without links that lead out of root."""

    def rewritten(found: re.Match[str]) -> str:
        name, target = found.group(1), found.group(2)
        if (folder / target).resolve().is_relative_to(root):
            return found.group()
        return (
            f"{{download}}`{name.strip('`')} <{target}>`"
            if (folder / target).is_file()
            else name
        )

    return LINK.sub(rewritten, text)


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


def rewrite(app: Any, page: str, source: list[str]) -> None:
    """Rewrite the source of a page."""
    root = Path(app.srcdir)
    source[0] = to_downloads(source[0], (root / page).parent, root)
    if page in app.config.searched:
        source[0] = with_words(source[0], app.config.searched[page])
    if page == "index":
        source[0] += "\n" + list_of_pages(app.config.contents, root) + "\n"


def setup(app: Any) -> dict[str, bool]:
    """Register the extension with Sphinx."""
    app.add_config_value("contents", {}, "env")
    app.add_config_value("searched", {}, "env")
    app.connect("source-read", rewrite)
    return {"parallel_read_safe": True}
