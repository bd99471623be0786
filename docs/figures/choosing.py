"""Draw the figures of docs/choosing.md, and write its table.

    python docs/figures/choosing.py          # needs matplotlib; writes choosing.svg and loss_steps.svg beside this file
    python docs/figures/choosing.py --check  # writes nothing; exit status 1 where the page has another table

The chart and the table are those of `mpicomp explain --train`; the losses are those of docs/results/every_step.json.
"""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent), str(ROOT / "benchmarks" / "every_step")]
from losses import STEPS, rows_at_best_rate

from collectives.choice.links import Links, links_of
from mpicomp_bench import advice

PAGE = ROOT / "docs" / "choosing.md"
GPU = 1e12  # bytes a second that it reads and writes
LINKS = [("20mbit", "20 Mbit/s"), ("100mbit", "100 Mbit/s"), ("1gbit", "1 Gbit/s"), ("10gbit", "10 Gbit/s")]
LINKS += [("100gbit", "100 Gbit/s")]
LATE = 10e-3  # seconds of a message
RATES = np.geomspace(1e7, 2e11, 50)  # bits a second


class Training(NamedTuple):
    """A training to predict: parameters, ranks, seconds of computing a step, bytes a second of a rank's memory."""

    about: str
    parameters: int
    ranks: int
    computing: float
    memory: float

    def ranked(self, links: Links) -> list[Any]:
        """Return the rows of `mpicomp explain --train`."""
        return advice.ranked(self.ranks, self.parameters, self.computing, links, memory=self.memory)


TRAININGS = [
    Training("3e6 parameters, 4 ranks, 0.16 s, cores", 3_000_000, 4, 0.16, advice.MEMORY),
    Training("1e8 parameters, 16 ranks, 0.2 s, GPUs", 100_000_000, 16, 0.2, GPU),
    Training("1e9 parameters, 64 ranks, 1 s, GPUs", 1_000_000_000, 64, 1.0, GPU),
]
SHOWN = {  # of the simulation
    "adamw": "dense, AdamW",
    "lion": "dense, Lion",
    "bits:bits=8": "8 bits of every value, AdamW",
    "bits:bits=4": "4 bits of every value, AdamW",
    "coefficients:form=two_bit": "in a basis, two bits, signs",
    "topk:density=0.01": "Top-k, 1 %, AdamW",
    "powersgd:rank=8": "PowerSGD, rank 8, AdamW",
    "local:every=5,message=two_bit": "local steps of AdamW, H = 5, two bits",
    "local:every=10,message=two_bit": "local steps of AdamW, H = 10, two bits",
    "diloco:every=10": "DiLoCo, H = 10",
}


def draw_chart() -> None:
    """Draw how many times as fast as dense each method trains, against the rate of the links."""
    from style import target

    from mpicomp_bench.output import draw

    panels = []
    training = TRAININGS[1]
    for delay, about in (20e-6, "20 us"), (LATE, "10 ms"):
        rows = [training.ranked(Links(delay, links_of(f"{rate / 1e3:.0f}kbit").rate)) for rate in RATES]
        lines = []
        for method in advice.METHODS:
            gains = [row["gain"] for found in rows for row in found if row["method"] == method.about]
            lines.append({"label": method.about, "x": RATES, "y": gains, "markevery": 7})
        panel = {"title": f"{training.about}; {about} a message", "xscale": "log", "yscale": "log"}
        panels.append({"lines": lines, "xlabel": "bit/s of a link", "ylabel": "time of dense / time", **panel})
    draw([panels], target("choosing"))


def draw_losses() -> None:
    """Draw the loss against the steps, each method at its best rate, the means over the seeds."""
    from style import target

    from mpicomp_bench.output import draw

    rows = json.loads((ROOT / "docs" / "results" / "every_step.json").read_text())["rows"]
    lines = []
    for method, label in SHOWN.items():
        own = [row for row in rows if (row["method"], row["schedule"], row["steps"]) == (method, "constant", STEPS)]
        if own:
            steps, losses = np.mean([row["curve"] for row in rows_at_best_rate(own)], axis=0).T
            lines.append({"label": label, "x": steps, "y": losses, "final": losses[-1]})
    lines.sort(key=lambda line: line.pop("final"))
    panel = {"xlabel": "steps", "ylabel": "held-out loss, nats", "title": "GPT, 3.2e6 parameters, 4 ranks"}
    draw([[{"lines": lines, **panel}]], target("loss_steps"))


def table() -> list[str]:
    """Return the lines of the table: what to take, and how many times as fast as dense it is."""
    lines = [["link", *(training.about for training in TRAININGS)], ["---"] * (1 + len(TRAININGS))]
    for network, link in LINKS:
        for late in (False, True):
            links = replace(links_of(network), latency=LATE) if late else links_of(network)
            cells = [link + ", 10 ms" * late]
            for training in TRAININGS:
                rows = training.ranked(links)
                taken = advice.recommended(rows)
                gain = next(row["gain"] for row in rows if row["method"] == taken)
                cells.append(f"{taken}: {gain:.2g}x" if gain != 1 else taken)
            lines.append(cells)
    return [f"| {' | '.join(cells)} |" for cells in lines]


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
    PAGE.write_text(page()[1])
