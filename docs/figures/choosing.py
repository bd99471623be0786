"""Draw the figures of docs/choosing.md, and write its table of predictions and that of docs/performance.md.

    python docs/figures/choosing.py          # needs matplotlib; writes choosing.svg and loss_steps.svg beside this file
    python docs/figures/choosing.py --check  # writes nothing; exit status 1 where a page has other tables

The chart and the table of what to take are those of `mpicomp explain --train`; the
tables of one exchange are those of `mpicomp explain`; the losses are those of
experiments/results/every_step.json.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [
    str(ROOT),
    str(Path(__file__).parent),
    str(ROOT / "experiments" / "every_step"),
    str(ROOT / "benchmarks"),
]
import losses as losses_of
from losses import SCHEDULED, STEPS, grouped, of, rows_at_best_rate
from rendering import draw
from rendering import table as lines_of

from collectives.planning.choice import Case
from collectives.planning.links import NETWORKS, Links, links_of
from mpicomp_bench import advice, answer, explain

PAGE = ROOT / "docs" / "choosing.md"
OF_EXCHANGES = PAGE.with_name("performance.md")
GPU = 1e12  # bytes a second that it reads and writes
LINKS = [
    ("20mbit", "20 Mbit/s"),
    ("100mbit", "100 Mbit/s"),
    ("1gbit", "1 Gbit/s"),
    ("10gbit", "10 Gbit/s"),
]
RATES = np.geomspace(1e7, 1e10, 40)  # bits a second
EXCHANGES = [("100mbit", "100 Mbit/s"), ("1gbit", "1 Gbit/s"), ("10gbit", "10 Gbit/s")]
RANKS = 8, 64
LENGTH = 25_000_000
METHODS = {  # the operation, the algorithm and the density of `mpicomp explain`
    "dense": ("dense_allreduce", "mpi", 0.01),
    "fp16": ("dense_allreduce", explain.HALVED, 0.01),
    "few-bits-8": ("GradientExchange", "8 bits", 0.01),
    "few-bits-4": ("GradientExchange", "4 bits", 0.01),
    "topk-0.01": ("GradientExchange", "sparse_allreduce", 0.01),
    "topk-0.001": ("GradientExchange", "sparse_allreduce", 0.001),
}

# parameters, ranks, seconds of computing a step, bytes a second of a rank's memory
TRAININGS = {
    "3e6 parameters, 4 ranks, 0.16 s, cores": (3_000_000, 4, 0.16, advice.MEMORY),
    "2.5e7 parameters, 8 ranks, 0.3 s, cores": (25_000_000, 8, 0.3, advice.MEMORY),
    "1e8 parameters, 16 ranks, 0.2 s, GPUs": (100_000_000, 16, 0.2, GPU),
}
OPTIMISERS = {"adamw": "AdamW", "muon": "Muon"}


def draw_chart() -> None:
    """Draw how many times as fast as dense each method trains, against the rate of the links."""
    from style import target

    panels = []
    about = next(iter(TRAININGS))
    for optimizer, name in OPTIMISERS.items():
        links = [Links(20e-6, links_of(f"{rate / 1e3:.0f}kbit").rate) for rate in RATES]
        gains: dict[str, list[float]] = {}
        for row in [
            row
            for each in links
            for row in advice.ranked(training(about, each, optimizer))
        ]:
            gains.setdefault(row["method"], []).append(row["gain"])
        lines = [
            {"label": name, "x": RATES, "y": each, "markevery": 7}
            for name, each in sorted(gains.items())
        ]
        marks = [(1e9, "above: never measured", advice.DENSE)]
        panel = {
            "title": f"{about}; {name}",
            "xscale": "log",
            "yscale": "log",
            "marks": marks,
        }
        panels.append(
            {
                "lines": lines,
                "xlabel": "bit/s of a link",
                "ylabel": "time of dense / time",
                **panel,
            }
        )
    draw([panels], target("choosing"))


def draw_losses() -> None:
    """Draw the loss against the steps, each method at its best rate, the means over the seeds."""
    from style import target

    rows = of(
        json.loads((ROOT / "experiments" / "results" / "every_step.json").read_text())[
            "rows"
        ],
        steps=STEPS,
    )
    panels = []
    for model, schedule in SCHEDULED.items():
        lines = []
        trained = of(rows, model=model, schedule=schedule)
        for (method, optimizer), own in grouped(
            trained, lambda row: (row["method"], row["optimizer"])
        ).items():
            steps, losses = np.mean(
                [row["curve"] for row in rows_at_best_rate(own)], axis=0
            ).T
            lines.append(
                {
                    "label": f"{method}, {losses_of.OPTIMISERS[optimizer]}",
                    "x": steps,
                    "y": losses,
                }
            )
        titles = {
            "title": f"{model}, {schedule} schedule",
            "xlabel": "steps",
            "ylabel": "held-out loss, nats",
        }
        panels.append({"lines": lines, **titles})
    draw([panels], target("loss_steps"))


def training(about: str, links: Links, optimizer: str) -> advice.Training:
    """Return one of the trainings over links."""
    parameters, ranks, computing, memory = TRAININGS[about]
    return advice.Training(
        ranks, parameters, computing, links, memory=memory, optimizer=optimizer
    )


def table() -> list[str]:
    """Return the lines of the table: what to take, and how many times as fast as dense it is."""
    heads = [
        about + ": predicted only" * (memory >= advice.GPU)
        for about, (*_, memory) in TRAININGS.items()
    ]
    lines = []
    for network, link in LINKS:
        if links_of(network).rate > advice.FASTEST:
            kept = [
                keep(training(about, links_of(network), "adamw")) for about in TRAININGS
            ]
            lines.append([link, *kept])
            continue
        for optimizer, name in OPTIMISERS.items():
            cells = [
                cell(training(about, links_of(network), optimizer))
                for about in TRAININGS
            ]
            lines.append([f"{link}, {name}", *cells])
    return lines_of(["link, optimiser", *heads], lines)


def keep(asked: advice.Training) -> str:
    """Return what `mpicomp explain --train` keeps over links on which nothing was measured."""
    taken = advice.recommended(advice.ranked(asked), asked)
    assert taken in (advice.DENSE, advice.SIXTEEN)
    bits = "16" if taken == advice.SIXTEEN else "16 or 32"
    return f"dense, {bits} bits, by NCCL or MPI"


def cell(asked: advice.Training) -> str:
    """Return what `mpicomp explain --train` takes, and the times of dense and of the fastest other over its own.

    With a star if it only leads where PyTorch's sums do not overlap.
    """
    rows = advice.ranked(asked)
    taken = advice.recommended(rows, asked)
    gains = {row["method"]: f"{row['gain']:.2g}x" for row in rows}
    star = "\\*" * any(
        said.startswith("Only where") for said in answer.conditions(rows, asked)
    )
    if not asked.is_measured:
        first = rows[0]["method"]
        return f"{taken}: {gains[taken]}" + f" (not tried: {first}, {gains[first]})" * (
            first != taken
        )
    _, times = answer.best_alternative(rows, taken)
    return f"{taken}: {gains[taken]}, {times:.2g}x{star}"


def predicted(links: Links, ranks: int) -> dict[str, float]:
    """Return the predicted seconds of each method for links and ranks."""
    found: dict[str, float] = {}
    for density in {density for _, _, density in METHODS.values()}:
        rows = explain.explained(
            Case(ranks, LENGTH, LENGTH * density), links, most_counted=0
        )
        seconds = {(row["operation"], row["algorithm"]): row["seconds"] for row in rows}
        found |= {
            name: seconds[key]
            for name, (*key, own) in METHODS.items()
            if own == density
            for key in [tuple(key)]
        }
    return found


def exchanges() -> list[str]:
    """Return the lines of the table of predictions."""
    lines = []
    for network, link in EXCHANGES:
        for ranks in RANKS:
            seconds = predicted(NETWORKS[network], ranks)
            dense = seconds["dense"]
            cells = [
                f"{rounded(each)} ({rounded(dense / each, 2)}x)"
                for each in seconds.values()
            ]
            lines.append([link, str(ranks), rounded(dense), *cells[1:]])
    return lines_of(["link", "ranks", *METHODS], lines)


def rounded(number: float, digits: int = 3) -> str:
    """Return a number with so many significant digits, and no exponent."""
    return f"{float(f'{number:.{digits}g}'):g}"


def pages() -> dict[Path, tuple[str, str]]:
    """Return each page as it is, and as it has to be."""
    texts = {}
    for page, name, lines in (
        (PAGE, "predicted", table()),
        (OF_EXCHANGES, "exchanges", exchanges()),
    ):
        between = re.compile(
            rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", re.DOTALL
        )
        whole = "\n" + "\n".join(lines) + "\n\n"
        text = page.read_text()
        texts[page] = text, between.sub(lambda _, whole=whole: whole, text)
    return texts


if __name__ == "__main__":
    found = pages()
    if sys.argv[1:] == ["--check"]:
        sys.exit(any(text != new for text, new in found.values()))
    draw_chart()
    draw_losses()
    for page, (_, new) in found.items():
        page.write_text(new)
