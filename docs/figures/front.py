"""Draw the figure of the front page from the results of experiments/race.

python docs/figures/front.py          # needs matplotlib; writes front.svg beside this file
"""

import json
import sys
from pathlib import Path

from style import save

ROOT = Path(__file__).parents[2]
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "benchmarks"),
    str(ROOT / "experiments" / "race"),
    str(ROOT / "experiments" / "every_step"),
]
from losses import of
from rendering import look_of
from results import SECONDS, lines, settings

RATES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}
SETTING = {"batch": 16, "schedule": "linear", "delay": 0}
SHOWN = {
    "fp16": "PyTorch, fp16 hook, AdamW",
    "fp16 (muon)": "PyTorch, fp16 hook, Muon",
    "powersgd-8": "PyTorch, PowerSGD hook, AdamW",
    "powersgd-8 (muon)": "PyTorch, PowerSGD hook, Muon",
    "local-few-bits-10": "mpicomp, ten steps of AdamW, then 4 bits",
    "few-bits-4 (muon)": "mpicomp, 4 bits of every gradient, Muon",
    "local-few-bits-10 (muon)": "mpicomp, ten steps of Muon, then 4 bits",
    "in-basis-two-bit-8": "mpicomp, coefficients in a basis, signs",
}

if __name__ == "__main__":
    from matplotlib.figure import Figure

    rows = json.loads((ROOT / "experiments" / "results" / "race.json").read_text())[
        "rows"
    ]
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    panels = figure.subplots(1, len(RATES), sharey=True)
    for axes, (rate, link) in zip(panels, RATES.items(), strict=True):
        ((_, by_method),) = settings(of(rows, rate=rate, **SETTING)).items()
        shown = {method: by_method[method] for method in SHOWN if method in by_method}
        for curve in lines(shown, SECONDS, lambda curve: curve[1:, SECONDS]):
            place = list(SHOWN).index(curve["label"])
            axes.plot(
                curve["x"],
                curve["y"],
                label=SHOWN[curve["label"]],
                markevery=5,
                **look_of(place),
            )
        axes.set(
            xlabel="seconds of training", title=f"links of {link}", ylim=(1.75, 3.15)
        )
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="held-out loss, nats")
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
        fontsize="small",
    )
    save(figure, "front")
