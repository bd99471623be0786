"""Draw map.svg of docs/slow_links.md: the loss of local steps by ranks, and by the bits that a rank sends.

python docs/figures/map.py  # needs matplotlib; from docs/results/map.json
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
    str(ROOT / "benchmarks" / "every_step"),
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
NAME = re.compile(r"local-(few-bits|sparse)-(\d+)(?::bits=\d|:k=\d+)?")
KINDS = {"few-bits": "every value", "sparse": "entries"}
# bits a value and step of published formats, of 12 bits an index and 2 a value
PUBLISHED = {"SparseLoCo": 14 * 128 / 4096 / 15, "Covenant": 14 * 64 / 4096 / 30}


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
    own = [row for row in own if NAME.fullmatch(row["method"])]
    points: dict[str, dict[float, float]] = {}
    for name, each in grouped(own, lambda row: row["method"]).items():
        kind, every = NAME.fullmatch(name).groups()
        label = f"{KINDS[kind]}, H = {every}"
        best = rows_at_best_rate(each)
        points.setdefault(label, {})[best[0]["bits"]] = fmean(
            row["loss"] for row in best
        )
    lines = []
    for label, losses in sorted(points.items()):
        x, y = zip(*sorted(losses.items()), strict=True)
        lines.append({"label": label, "x": x, "y": y})
    marks = [(bits, name, lines[0]["label"]) for name, bits in PUBLISHED.items()]
    words = {"title": "4 ranks, 16 windows a step", "ylabel": "held-out loss, nats"}
    about = "bits that a rank sends, a value and step"
    return {"lines": lines, "xscale": "log", "xlabel": about, "marks": marks, **words}


def kinds() -> Iterator[tuple[str, list[Cell]]]:
    """Yield the two ways in which the batch goes with the ranks."""
    total, own = cells.ALONE
    yield (
        f"{total} windows a step, of all ranks",
        [Cell("small", total, ranks) for ranks in cells.RANKS],
    )
    yield (
        f"{own} windows a step and rank",
        [Cell("small", own * ranks, ranks) for ranks in cells.RANKS],
    )


if __name__ == "__main__":
    file = ROOT / "docs" / "results" / "map.json"
    trained = json.loads(file.read_text())["rows"]
    panels = [by_ranks(trained, *each) for each in kinds()]
    draw([panels, [by_bits(trained)]], target("map"))
