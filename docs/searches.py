"""Check in headless Chromium that searches of the built site find the right page first.

    make docs && python docs/searches.py [build/site]

Prints each search with the page that comes first; the exit status is 1 if one is wrong.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

FIRST = {
    "overlap": "overlap.html",
    "out of memory": "memory.html",
    "local steps": "slow_links.html",
    "gradient compression": "compressors.html",
    "GPU": "devices.html",
    "NaN": "exchange.html",
    "resume": "exchange.html",
    "OOM": "memory.html",
    "deadlock": "reliability.html",
    "cite": "project.html",
    "allreduce": "collectives.html",
    "hang": "reliability.html",
}
RESULT = re.compile(r'<ul class="search">\s*<li[^>]*><a href="([^"#?]*)')


def first_of(query: str, site: Path) -> str:
    """Return the page that a search of the site finds first."""
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [
                "chromium",
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                f"--user-data-dir={profile}",
                "--virtual-time-budget=5000",
                "--dump-dom",
                f"file://{site}/search.html?q={quote(query)}",
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    found = RESULT.search(done.stdout)
    return found.group(1) if found else ""


def main() -> int:
    """Check all searches."""
    site = Path(sys.argv[1] if sys.argv[1:] else "build/site").resolve()
    found = {query: first_of(query, site) for query in FIRST}
    for query, page in found.items():
        print(f"{query:22}{page:24}{'' if page == FIRST[query] else FIRST[query]}")
    return int(found != FIRST)


if __name__ == "__main__":
    sys.exit(main())
