"""Draw the figures of docs/choosing.md, and write its table of predictions.

    python docs/figures/choosing.py          # needs matplotlib; writes choosing.svg and loss_bytes.svg beside this file
    python docs/figures/choosing.py --check  # writes nothing; exit status 1 where the page has another table

The chart is drawn from `QUESTIONS`; the losses are those of docs/results/race.json; the table is that of
`mpicomp explain`, for the links and ranks of `LINKS`.
"""

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
from collectives.choice.formulas import Case
from collectives.choice.links import NETWORKS, Links
from mpicomp_bench import explain

PAGE = ROOT / "docs" / "choosing.md"
LINKS = [("100mbit", "100 Mbit/s"), ("1gbit", "1 Gbit/s"), ("10gbit", "10 Gbit/s")]
RANKS = 8, 64
LENGTH = 25_000_000
METHODS = {  # how the pages call them: the operation, the algorithm and the density of `mpicomp explain`
    "dense, 32 bits": ("dense_allreduce", "mpi", 0.01),
    "dense, 16 bits": (explain.HALVED, "mpi", 0.01),
    "`bits=8`": ("GradientExchange", "8 bits", 0.01),
    "`bits=4`": ("GradientExchange", "4 bits", 0.01),
    "Top-k, 1 %": ("GradientExchange", "sparse_allreduce", 0.01),
    "Top-k, 0.1 %": ("GradientExchange", "sparse_allreduce", 0.001),
}
STEPS = 200  # of the losses that are compared
OTHERS = "dense, 32 bits", "dense, 16 bits", "`bits=4`"  # with which each method is compared by link rate
LATENCY, FRAMES = 40e-6, 1.06  # seconds of a message; bytes on the link over those sent

QUESTIONS = [  # a question; how the arrow to its answer is called; the answer; how the arrow to the next one is called
    ("Does a dense allreduce take\nover a fifth of a step?", "no",
     "dense_allreduce, or\nPyTorch's fp16 hook", "yes"),
    ("May ranks take several steps\nbetween two exchanges?", "yes",
     'OuterLoop(exchange, ..., every=10)\nQuantised(ChunkedTopK(128, 4096), "two_bit")\n'
     'ErrorFeedback(decay=0.95)\naverage="contributors"', "no"),
    ("Does the optimiser rescale\nentries, as AdamW does?", "yes",
     "OuterLoop(exchange, ..., every=1)\ncompresses the update", "no: SGD, momentum"),
    ("Many ranks: is the union of\ntheir entries too large?", "yes",
     "GradientExchange(comm, TopK(0.01),\n    collective=gtopk_allreduce)", "no"),
]  # fmt: skip
LAST = "GradientExchange(comm, TopK(0.01))"


def draw_chart() -> None:
    """Draw the questions from top to bottom, with the answers on the right."""
    from style import COLOURS, arrow, blank, box, save

    figure, axes = blank(7.2, 5.6, (-0.15, 11.15), (-0.15, 8.55))
    for place, (question, to_answer, answer, to_next) in enumerate(QUESTIONS):
        y = 7.1 - 1.85 * place
        box(axes, 0, y, 4.4, 1.3, COLOURS["tool"])
        axes.text(2.2, y + 0.65, question, ha="center", va="center", size=9.5, weight="bold")
        box(axes, 5.4, y, 5.6, 1.3, COLOURS["ranks"])
        axes.text(5.55, y + 0.65, answer, va="center", size=8, family="monospace", linespacing=1.35)
        arrow(axes, 4.4, y + 0.65, 5.4, y + 0.65)
        axes.text(4.9, y + 0.78, to_answer, ha="center", size=9.5)
        arrow(axes, 2.2, y, 2.2, y - 0.55)
        axes.text(2.4, y - 0.38, to_next, size=9.5)
    y = 7.1 - 1.85 * len(QUESTIONS)
    box(axes, 0, y + 0.3, 5.6, 1, COLOURS["ranks"])
    axes.text(0.15, y + 0.8, LAST, va="center", size=8, family="monospace")
    save(figure, "choosing")


def losses() -> dict[str, tuple[float, float]]:
    """Return bytes a step and held-out loss after `STEPS` steps by method, means over the runs that took as many."""
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for row in json.loads((ROOT / "docs" / "results" / "race.json").read_text())["rows"]:
        _, steps, nbytes, loss = np.array(row["curve"]).T
        if steps[-1] >= STEPS:
            found[row["method"]].append((nbytes[-1] / steps[-1], np.interp(STEPS, steps, loss)))
    return {method: tuple(np.mean(runs, axis=0).tolist()) for method, runs in found.items()}


def draw_losses() -> None:
    """Draw the loss against the bytes of a step."""
    from style import target

    from mpicomp_bench.output import draw

    found = losses()
    _, alone = found.pop("alone")
    points = sorted(found.items(), key=lambda item: item[1][1])
    look = {"linestyle": "", "markersize": 9}
    panel = {
        "lines": [{"label": method, "x": [nbytes], "y": [loss], **look} for method, (nbytes, loss) in points],
        "xlabel": "bytes that the busiest host sends a step",
        "ylabel": f"held-out loss after {STEPS} steps, nats",
        "xscale": "log",
        "title": f"GPT, 3.2e6 parameters, AdamW, 4 ranks; without communication: {alone:.2f}",
    }
    draw([[panel]], target("loss_bytes"))


def predicted(links: Links, ranks: int) -> dict[str, float]:
    """Return the predicted seconds of each method for links and ranks."""
    found: dict[str, float] = {}
    for density in {density for _, _, density in METHODS.values()}:
        rows = explain.explained(Case(ranks, LENGTH, LENGTH * density), ranks, links, most_counted=0)
        seconds = {(row["operation"], row["algorithm"]): row["seconds"] for row in rows}
        found |= {name: seconds[key] for name, (*key, own) in METHODS.items() if own == density for key in [tuple(key)]}
    return found


def table() -> list[str]:
    """Return the lines of the table of predictions."""
    lines = [["link", "ranks", *METHODS], ["---"] * (2 + len(METHODS))]
    for network, link in LINKS:
        for ranks in RANKS:
            seconds = predicted(NETWORKS[network], ranks)
            dense = seconds["dense, 32 bits"]
            cells = [f"{rounded(each)} ({rounded(dense / each, 2)}x)" for each in seconds.values()]
            lines.append([link, str(ranks), rounded(dense), *cells[1:]])
    return lined(lines)


def limits() -> list[str]:
    """Return the lines of the table of the link rates up to which an exchange is faster than another method."""
    rates = np.geomspace(1e7, 2e11, 201)
    lines = [["", *(f"{other}, {ranks} ranks" for other in OTHERS for ranks in RANKS)]]
    lines.append(["---"] * len(lines[0]))
    links = [Links(LATENCY, rate / 8 / FRAMES) for rate in rates]
    seconds = {ranks: [predicted(each, ranks) for each in links] for ranks in RANKS}
    for name in [name for name in METHODS if not name.startswith("dense")]:
        cells = []
        for other in OTHERS:
            for ranks in RANKS:
                slower = [place for place, each in enumerate(seconds[ranks]) if each[name] > each[other]]
                cells.append("" if name == other else up_to(rates, slower))
        lines.append([name, *cells])
    return lined(lines)


def up_to(rates: Any, slower: list[int]) -> str:
    """Return the rate from which on a method is slower, as text. slower: the places of these rates."""
    assert slower == list(range(len(rates)))[len(rates) - len(slower) :], "one limit"
    if len(slower) in (0, len(rates)):
        return "none" if slower else "all rates"
    rate = rates[slower[0]]
    return f"{rounded(rate / 1e9, 2)} Gbit/s" if rate >= 1e9 else f"{rounded(rate / 1e6, 2)} Mbit/s"


def lined(lines: list[list[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in lines]


def rounded(number: float, digits: int = 3) -> str:
    """Return a number with so many significant digits, and no exponent."""
    return f"{float(f'{number:.{digits}g}'):g}"


def page() -> tuple[str, str]:
    """Return the page as it is, and as it has to be."""
    text = new = PAGE.read_text()
    for name, lines in (("predicted", table()), ("limits", limits())):
        between = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", re.DOTALL)
        whole = "\n" + "\n".join(lines) + "\n\n"
        new = between.sub(lambda found, whole=whole: whole, new)
    return text, new


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(page()[0] != page()[1])
    draw_chart()
    draw_losses()
    if PAGE.exists():
        PAGE.write_text(page()[1])
