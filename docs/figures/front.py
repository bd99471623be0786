"""Draw the figure of the front page from the results of benchmarks/race.

python docs/figures/front.py          # needs matplotlib; writes front.svg beside this file
"""

import json
import sys
from pathlib import Path

from style import save

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks" / "race")]
from results import SECONDS, lines, settings

from mpicomp_bench.output import look_of

RATE = "100mbit"
SHOWN = {
    "dense": "PyTorch, dense",
    "fp16": "PyTorch, fp16 hook",
    "topk-0.01": "mpicomp, Top-k of every gradient",
    "powersgd-8": "PyTorch, PowerSGD hook, rank 8",
    "local-sparse-10": "mpicomp, an exchange every 10 steps",
    "in-basis-8-two-bit": "mpicomp, coefficients in a basis and signs, every step",
}

if __name__ == "__main__":
    from matplotlib.figure import Figure

    rows = json.loads((ROOT / "docs" / "results" / "race.json").read_text())["rows"]
    ((_, by_method),) = settings(row for row in rows if (row["rate"], row["delay"]) == (RATE, 0)).items()
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    curves = lines({method: by_method[method] for method in SHOWN}, SECONDS, lambda curve: curve[1:, SECONDS])
    for place, curve in enumerate(curves):
        axes.plot(curve["x"], curve["y"], label=SHOWN[curve["label"]], markevery=5, **look_of(place))
    axes.set(xlabel="seconds of training, over links of 100 Mbit/s", ylabel="held-out loss, nats", ylim=(1.75, 3.15))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right", fontsize="small")
    save(figure, "front")
