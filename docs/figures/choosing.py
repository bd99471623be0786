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
from collectives.choice.links import NETWORKS
from mpicomp_bench import explain

PAGE = ROOT / "docs" / "choosing.md"
LINKS = [("100mbit", "100 Mbit/s"), ("1gbit", "1 Gbit/s"), ("10gbit", "10 Gbit/s")]
RANKS = 8, 64
LENGTHS = {25_000_000: "25e6", 1_000_000_000: "1e9"}
DENSITIES = 0.01, 0.001
STEPS = 200  # of the losses that are compared

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


def predicted(network: str, ranks: int, length: int, density: float) -> tuple[float, float]:
    """Return the seconds of a dense allreduce, and of a whole exchange by `sparse_allreduce`."""
    rows = list(explain.explained(Case(ranks, length, length * density), ranks, NETWORKS[network], most_counted=0))
    (dense,) = (row["seconds"] for row in rows if row["operation"] == "dense_allreduce" and row["algorithm"] == "mpi")
    (whole,) = (
        row["seconds"]
        for row in rows
        if (row["operation"], row["algorithm"]) == ("GradientExchange", "sparse_allreduce")
    )
    return dense, whole


def table() -> list[str]:
    """Return the lines of the table of predictions."""
    heads = ["link", "ranks"]
    for values in LENGTHS.values():
        heads += [f"{values}: dense", *(f"{100 * density:g} %" for density in DENSITIES)]
    lines = [heads, ["---"] * len(heads)]
    for network, link in LINKS:
        for ranks in RANKS:
            cells = [link, str(ranks)]
            for length in LENGTHS:
                pairs = [predicted(network, ranks, length, density) for density in DENSITIES]
                cells.append(rounded(pairs[0][0]))
                cells += [f"{rounded(whole)} ({rounded(dense / whole, 2)}x)" for dense, whole in pairs]
            lines.append(cells)
    return [f"| {' | '.join(cells)} |" for cells in lines]


def rounded(number: float, digits: int = 3) -> str:
    """Return a number with so many significant digits, and no exponent."""
    return f"{float(f'{number:.{digits}g}'):g}"


def page() -> tuple[str, str]:
    """Return the page as it is, and as it has to be."""
    text = PAGE.read_text()
    between = re.compile(r"(?<=<!-- predicted -->\n).*?(?=<!-- end of predicted -->)", re.DOTALL)
    return text, between.sub(lambda found: "\n" + "\n".join(table()) + "\n\n", text)


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(page()[0] != page()[1])
    draw_chart()
    draw_losses()
    if PAGE.exists():
        PAGE.write_text(page()[1])
