"""Draw map.svg of docs/slow_links.md: the loss of local steps by ranks, and by the bits that a rank sends.

python docs/figures/map.py  # needs matplotlib; from experiments/results/map.json
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "benchmarks"),
    str(ROOT / "experiments" / "every_step"),
]
import cells
from cells import Cell, local
from losses import SEED, grouped, of, rows_at_best_rate
from rendering import draw
from style import target

Row = dict[str, Any]
LINES = {
    "dense AdamW": ("dense", "adamw"),
    "dense Muon": ("dense", "muon"),
    "4 bits in every step, Muon": ("few-bits-4", "muon"),
    **{
        f"local Muon, 4 bits, H = {every}": (local(every), "muon")
        for every in cells.EVERY
    },
}
NAME = re.compile(
    r"local-(few-bits-in-basis|few-bits|sparse)-\d+(?::(?:bits|k)=(\d+))?"
)
FORMATS = {  # and what is sent without a setting
    "few-bits": ("{} bits a value", 4),
    "few-bits-in-basis": ("{} bits, in a basis", 4),
    "sparse": ("{} of 4,096 entries", 128),
}
# formats as they are published, of 12 bits an index and 2 a value: the bits of a value and step
PUBLISHED = {
    "SparseLoCo's format": ("local-sparse-15", 14 * 128 / 4096 / 15),
    "Covenant's format": ("local-sparse-30:k=64", 14 * 64 / 4096 / 30),
}


def by_ranks(rows: list[Row], title: str, places: list[Cell]) -> Row:
    """Return a panel of the losses of cells against their ranks."""
    lines = []
    for label, method in LINES.items():
        losses = [(cell.ranks, cell.loss(rows, *method)) for cell in places]
        known = [(ranks, loss) for ranks, loss in losses if loss is not None]
        if known:
            x, y = zip(*known, strict=True)
            lines.append({"label": label, "x": x, "y": y})
    words = {"title": title, "xlabel": "ranks", "ylabel": "held-out loss, nats"}
    return {"lines": lines, "xscale": "log", "xticks": [cells.RANKS] * 2, **words}


def by_bits(rows: list[Row]) -> Row:
    """Return the panel of the losses of local steps of Muon on 4 ranks against the bits of a value and step."""
    total, batch = cells.ALONE
    own = of(rows, model="small", ranks=total // batch, batch=batch, optimizer="muon")
    own = of(own, steps=cells.STEPS, seed=SEED)
    losses = {
        name: (each[0]["bits"], fmean(row["loss"] for row in rows_at_best_rate(each)))
        for name, each in grouped(own, lambda row: row["method"]).items()
    }
    points: dict[str, list[tuple[float, float]]] = {}
    for name, point in losses.items():
        if known := NAME.fullmatch(name):
            label, usual = FORMATS[known[1]]
            points.setdefault(label.format(known[2] or usual), []).append(point)
    for label, (name, bits) in PUBLISHED.items():
        points[label] = [(bits, losses[name][1])]
    lines = []
    for label in sorted(points, key=lambda label: -max(points[label])[0]):
        x, y = zip(*sorted(points[label]), strict=True)
        lines.append({"label": label, "x": x, "y": y})
    words = {"title": "local Muon, 4 ranks", "ylabel": "held-out loss, nats"}
    about = "bits that a rank sends, a value and step"
    return {"lines": lines, "xscale": "log", "xlabel": about, **words}


def kinds() -> Iterator[tuple[str, list[Cell]]]:
    """Yield the two ways in which the batch goes with the ranks, and the second text."""
    total, own = cells.ALONE
    yield (
        f"{total} windows a step, of all ranks",
        [Cell("small", total, ranks) for ranks in cells.RANKS],
    )
    yield (
        f"{own} windows a step and rank",
        [Cell("small", own * ranks, ranks) for ranks in cells.RANKS],
    )
    yield (
        f"the second text, {total} windows a step",
        [Cell("small-manual", total, ranks) for ranks in cells.RANKS],
    )


if __name__ == "__main__":
    file = ROOT / "experiments" / "results" / "map.json"
    trained = json.loads(file.read_text())["rows"]
    stays, grows, second = (by_ranks(trained, *each) for each in kinds())
    draw([[stays, grows], [second, by_bits(trained)]], target("map"))
