"""Name, for each measured figure in README and docs/*.md, the results, the command or the code that it comes from.

    python benchmarks/doc_figures.py            # all figures, with their sources
    python benchmarks/doc_figures.py --missing  # those that have none; the exit status is 1 if there are any

A figure is a number with a unit of a result: nats, times or x, per cent, points, seconds,
bytes of messages or memory. Code is left out, and so are rates of links, which are
settings. A table between two comments comes from docs/figures/choosing.py or
benchmarks/doc_tables.py, which name its file. Elsewhere a figure has the sources of its
section, in `SOURCES`.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent

NUMBER = r"[-+]?\d[\d.,]*(?:e\d+)?(?:\s(?:to|and|or)\s[-+]?\d[\d.,]*)?"
UNIT = r"(?:nats|times|points|%|GB|MB|KB|us|ms|s(?:econds)?|minutes|bytes|x)"
# losses in tables of nats have no unit, but a sign or a word
NATS = r"[-+]0\.\d+(?:\sto\s[-+]0\.\d+)?|0\.\d+(?:\sto\s0\.\d+)?\s(?:ahead|behind|higher|lower)"
FIGURE = re.compile(rf"(?<![\w.`^])({NUMBER}\s?{UNIT}|{NATS})(?![\w/`^])")
FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
GENERATED = re.compile(r"<!-- ([\w-]+) -->.*?<!-- end of \1 -->", re.DOTALL)
CODE = re.compile(r"`[^`]*`")

RESULTS = "experiments/results"
RACE = f"{RESULTS}/race.json"
MAP = f"{RESULTS}/map.json"
EVERY_STEP = f"{RESULTS}/every_step.json"
H200 = "docs/gpu_evidence/2026-11-27-0c91573a30a2.json"
ACCURACY = f"{RESULTS}/accuracy.json"
EXPLAIN = "mpicomp_bench/explain.py"
# by page and section: files of results, commands that print them, or the code of a setting
SOURCES: dict[str, dict[str, list[str]]] = {
    "README.md": {
        "mpicomp: sparse MPI collectives for compressed gradients": [RACE],
        "See it train": ["make demo"],
    },
    "docs/choosing.md": {
        "Ask for your training": [EXPLAIN, "tests/tools/test_explain.py", RACE],
        "Loss per step": [EVERY_STEP, ACCURACY, "docs/results/memory.json"],
        "Which density": [ACCURACY, EVERY_STEP],
    },
    "docs/collectives.md": {
        "Costs": [
            "collectives/planning/links.py",
            "collectives/planning/partition.py",
            "tests/mpicomp/test_codec.py",
        ],
        "Quantization: every value in few bits": ["collectives/quantised.py"],
    },
    "docs/coming_from.md": {"DeepSpeed's 1-bit Adam": [EVERY_STEP]},
    "docs/compressors.md": {
        "Compressors: sparsification and quantization": [
            "docs/results/compressors.json"
        ],
        "Which one": ["docs/results/compressors.json"],
    },
    "docs/devices.md": {
        "GPUs: CuPy, PyTorch and JAX arrays, CUDA-aware MPI": [H200],
    },
    "docs/frameworks.md": {
        "Start as with torchrun": ["collectives/torch/__main__.py"],
        "On GPUs": [H200],
    },
    "docs/index.md": {"mpicomp": [RACE]},
    "docs/memory.md": {"Memory": ["docs/results/memory.json"]},
    "docs/mpi.md": {"Progress": ["collectives/runtime/progress.py"]},
    "docs/overlap.md": {
        "What overlaps with what": [
            "PyTorch's default of bucket_cap_mb",
            "python -c 'import sys; print(sys.getswitchinterval())'",
        ],
    },
    "docs/performance.md": {
        "A large gradient": ["docs/results/large/1e8-1gbit.json"],
        "Behind the computation": ["docs/results/overlap.json"],
    },
    "docs/reliability.md": {
        "A node or a rank died: what now": ["collectives/faults/ulfm.py"],
        "Timeouts": ["collectives/torch/__main__.py"],
    },
    "docs/slow_links.md": {
        "How far this holds": [MAP, EVERY_STEP, f"{RESULTS}/h200_training.jsonl"],
        "Local steps": [EVERY_STEP, MAP, "docs/results/memory.json"],
        "How many local steps": [MAP, f"{RESULTS}/h200_training.jsonl"],
        "Fewer bits still": [EVERY_STEP],
        "What it gives": [RACE],
    },
    "docs/symptoms.md": {"Symptoms": ["collectives/torch/__main__.py"]},
    "docs/working.md": {"Is it working?": ["mpirun -n 4 python -m mpi4py train.py"]},
}


class Figure(NamedTuple):
    """A figure on a page. line: its number."""

    page: str
    line: int
    section: str
    text: str


def blanked(found: re.Match[str]) -> str:
    """Return as many lines, which are empty."""
    return "\n" * found.group().count("\n")


def figures(page: Path) -> Iterator[Figure]:
    """Yield the figures of a page that no command writes."""
    text = GENERATED.sub(blanked, FENCED.sub(blanked, page.read_text()))
    section = ""
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("#"):
            section = line.lstrip("# ")
        elif not line.startswith("    "):
            prose = CODE.sub("", re.sub(r"\]\([^)]*\)", "]", line))
            for found in FIGURE.finditer(prose):
                name = str(page.relative_to(ROOT))
                yield Figure(name, number, section, found.group(1))


def all_figures() -> list[Figure]:
    """Return the figures of README and of all pages for users."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [figure for page in pages for figure in figures(page)]


def source_of(figure: Figure) -> list[str]:
    """Return the sources of a figure; none if its section has none."""
    return SOURCES.get(figure.page, {}).get(figure.section, [])


def missing_files() -> list[str]:
    """Return the sources that are files and do not exist."""
    named = {
        each for page in SOURCES.values() for some in page.values() for each in some
    }
    return sorted(
        each for each in named if " " not in each and not (ROOT / each).exists()
    )


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--missing", action="store_true")
    only_missing = parser.parse_args().missing
    found = all_figures()
    without = [figure for figure in found if not source_of(figure)]
    for figure in without if only_missing else found:
        sources = ", ".join(source_of(figure)) or "NONE"
        print(f"{figure.page}:{figure.line}: {figure.text}: {sources}")
    print(f"{len(found)} figures, {len(without)} without a source")
    return int(bool(without or missing_files()))


if __name__ == "__main__":
    sys.exit(main())
