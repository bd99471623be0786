"""Write the tables of measurements in the pages anew, from the JSON files in docs/results, and those of formulas.

    benchmarks/tables.sh exchange docs/results && MPI=impi-rt benchmarks/tables.sh exchange docs/results
    benchmarks/tables.sh choice docs/results
    benchmarks/tables.sh steps docs/results
    benchmarks/tables.sh few_bits docs/results                                            # with PyTorch installed
    python benchmarks/threads.py --json docs/results/threads.json
    mpirun -n 4 python -m mpi4py benchmarks/few_bits.py --json docs/results/quantised-4.json             # and on 2
    python benchmarks/cold.py --json docs/results/cold.json
    python benchmarks/patches.py --json docs/results/patches.json --weights build/weights.npz    # names all
    sudo python benchmarks/overlap.py --json docs/results/overlap.json                    # with PyTorch installed
    python experiments/race/race.py --json experiments/results/race.json    # experiments/race/README.md has all
    mpirun -n 4 python -m mpi4py experiments/race/hook.py --json experiments/results/hook.json
    mpirun -n 8 python -m mpi4py benchmarks/large.py --json docs/results/large/1e8-memory.json  # names all
    python experiments/every_step/simulate.py --json experiments/results/every_step.json   # README.md there: map.json
    mpirun -n 4 python -m mpi4py experiments/training/train.py ...  # docs/contributing/accuracy.md: all of it
    mpirun -n 2 python -m mpi4py benchmarks/memory.py --json docs/results/memory.json
    make gpu-evidence                                                    # on a machine with a GPU
    python benchmarks/gpu_costs.py --architecture sm_90 --json docs/results/gpu_costs.json
    python experiments/papers/papers.py E1 E2 E3 E4 E5 E6 E7 E8 E9 E10    # and so experiments/papers/README.md
    python benchmarks/doc_tables.py

Each table is between two comments that name it; the rest of its page is left alone.
With --check nothing is written: the exit status is 1 where a page is not what the files
give.
"""

import argparse
import json
import pathlib
import re
import sys
from functools import partial
from typing import Any

import numpy as np

from collectives.planning.choice import Case
from collectives.planning.links import NETWORKS
from mpicomp_bench.bench.choice import NEAR
from mpicomp_bench.explain import explained
from mpicomp_bench.methods import METHODS

sys.path += [
    str(pathlib.Path(__file__).parents[1] / name)
    for name in (
        "benchmarks",
        "experiments/race",
        "experiments/every_step",
        "experiments/papers",
    )
]

import cells
import losses
import overlap
import results
from cold import FIRST_STEPS
from cold import shown as first_steps
from fit_choice import slowdowns
from rendering import table
from tables import table as of_experiment

ROOT = pathlib.Path(__file__).parent.parent

RESULTS = ROOT / "docs" / "results"
STUDIES = ROOT / "experiments" / "results"
# of `make gpu-evidence` on an H200
EVIDENCE = ROOT / "docs" / "gpu_evidence" / "2026-11-27-0c91573a30a2.json"
MPIS = {"exchange": "Open MPI", "exchange-impi-rt": "Intel MPI"}
RANKS = 4, 2
CHOICES = 2, 4, 8  # ranks
STEPS = [
    f"{density} {step}"
    for density in (0.001, 0.01)
    for step in (
        "GradientExchange residual in place, sparse mean",
        "GradientExchange, mean in out=",
    )
]
TENSORS = ["0.01 54 tensors, means in out=", "0.01 one vector, mean in out="]
TRAININGS = [  # values, seconds of computing, ranks, density
    *(("25e6", 0.2, ranks, density) for ranks in (8, 64) for density in (0.001, 0.01)),
    *(("1e9", 2.0, 64, density) for density in (0.001, 0.01)),
]
LINKS = {
    "100mbit": "100 Mbit/s",
    "1gbit": "1 Gbit/s",
    "10gbit": "10 Gbit/s",
    "hdr": "200 Gbit/s",
}
VALUES = ["all tensors", "normal", "Laplace", "t(3)"]  # that are quantised


def loaded(name: str) -> dict[str, Any]:
    """Return a file of results."""
    folder = RESULTS if (RESULTS / f"{name}.json").exists() else STUDIES
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def times(steps: list[str], suffix: str = "") -> list[str]:
    """Return the table of steps: milliseconds, and how many times as long MPI's dense sum takes, by MPI and ranks."""
    runs = [loaded(f"{mpi}-{ranks}{suffix}") for mpi in MPIS for ranks in RANKS]
    heads = ["step", *(f"{MPIS[mpi]}, P = {ranks}" for mpi in MPIS for ranks in RANKS)]
    by_name = [{row["name"]: row for row in run["rows"]} for run in runs]
    rows = []
    for name in steps:
        cells = [
            f"{1e3 * rows_of[name]['seconds']:.1f} ms, {rows_of[name]['speedup']:.2f}x"
            for rows_of in by_name
        ]
        density, _, step = name.partition(" ")
        rows.append([f"{100 * float(density):g} %: {step}", *cells])
    dense = [
        f"{1e3 * max(row['baseline_seconds'] for row in run['rows']):.1f} ms"
        for run in runs
    ]
    return table(heads, [*rows, ["`MPI_Allreduce`, dense", *dense]])


def compressors() -> list[str]:
    """Return the table of whole steps with each compressor: milliseconds, and how many times as long as with TopK."""
    shown = {"one vector": "steps", "54 tensors": "steps-tensors"}
    columns = []
    for file in shown.values():
        rows = {
            tuple(row["name"].split(" ", 1)): row["seconds"]
            for row in loaded(file)["rows"]
        }
        for density in dict.fromkeys(density for density, _ in rows):
            columns.append(
                {
                    name: seconds
                    for (each, name), seconds in rows.items()
                    if each == density
                }
            )
    heads = [f"{what}, {density}" for what in shown for density in ("0.1 %", "1 %")]
    rows, top_k = [], next(iter(columns[0]))
    for name in columns[0]:
        cells = [
            f"{1e3 * own[name]:.1f} ms, {own[name] / own[top_k]:.2f}" for own in columns
        ]
        rows.append([f"`{name.partition(',')[0]}`", *cells])
    return table(["compressor", *heads], rows)


def few_bits() -> list[str]:
    """Return the table of whole steps in few bits: copies of the gradient, and MPI's dense sum over them."""
    files = {
        "P = 1": "few-bits-1",
        "P = 1, AVX2": "few-bits-avx2",
        "P = 2": "few-bits-2",
        "P = 4": "few-bits-4",
        "54 tensors, P = 1": "few-bits-1-tensors",
        "54 tensors, P = 2": "few-bits-2-tensors",
    }
    rows: dict[str, list[str]] = {}
    for file in files.values():
        copy, *steps = loaded(file)["rows"]
        rows.setdefault("a copy", []).append(f"{1e3 * copy['seconds']:.1f} ms")
        for step in steps:
            copies = step["seconds"] / copy["seconds"]
            cell = f"{copies:.2f}, {step['speedup']:.2f}x"
            rows.setdefault(f"`{step['name']}`", []).append(cell)
    return table(["25e6 float32", *files], [[name, *own] for name, own in rows.items()])


def coders() -> list[str]:
    """Return the table of steps of 16-bit gradients, and of another library's kernels, in copies and in bytes."""
    files = {"AVX-512": "coders", "AVX2": "coders-avx2"}
    found = {name: loaded(file)["rows"] for name, file in files.items()}
    lines = []
    for rows in zip(*found.values(), strict=True):
        line = [f"`{rows[0]['name']}`"]
        line.append(f"{rows[0]['nbytes']:g}" if rows[0]["nbytes"] else "")
        for row, own in zip(rows, found.values(), strict=True):
            copies = row["seconds"] / own[0]["seconds"]
            line.append(f"{1e3 * row['seconds']:.1f} ms, {copies:.2f}")
        lines.append(line)
    return table(["25e6 values, P = 1", "bytes a value", *files], lines)


def by_name() -> list[str]:
    """Return the table of whole steps of a model's tensors, and in DDP's hook, over those of one vector."""
    files = {
        "P = 1": "few-bits-1-by-name",
        "P = 1, PyTorch in huge pages": "few-bits-1-by-name-huge",
        "P = 2": "few-bits-2-by-name",
        "P = 4": "few-bits-4-by-name",
    }
    rows: dict[str, list[str]] = {}
    for file in files.values():
        for row in loaded(file)["rows"]:
            cell = f"{1e3 * row['seconds']:.1f} ms, {row['over']:.2f}"
            rows.setdefault(row["name"], []).append(cell)
    heads = ["25e6 float32, 4 bits", *files]
    return table(heads, [[name, *cells] for name, cells in rows.items()])


def gains() -> list[str]:
    """Return the table of predicted training steps: with a dense allreduce over with an exchange, by rate and case."""
    heads = [
        f"{length}, {ranks} ranks, {100 * density:g} %"
        for length, _, ranks, density in TRAININGS
    ]
    rows = []
    for network, name in LINKS.items():
        cells = []
        for length, computing, ranks, density in TRAININGS:
            case = Case(ranks, int(float(length)), float(length) * density)
            found = explained(case, NETWORKS[network], computing)
            cells += [
                f"{row['speedup']:.3g}"
                for row in found
                if row["algorithm"] == "by sparse_allreduce"
            ]
        rows.append([name, *cells])
    return table(["link of a rank", *heads], rows)


def threads() -> list[str]:
    """Return the table of threads."""
    found = loaded("threads")["rows"]
    rows = []
    for row in found:
        times = [
            f"{1e3 * row['seconds'][way]:.2f} ms"
            for way in ("one thread", "threads", "processes")
        ]
        shares = [
            row["rate"]["threads"] / row["rate"][way]
            for way in ("one thread", "processes")
        ]
        rows.append([row["call"], *times, *(f"{share:.2f}" for share in shares)])
    heads = [
        "25e6 float32",
        "one thread",
        "two threads",
        "two processes, one vector each",
    ]
    return table(
        [*heads, "throughput: two threads over one", "over two processes"], rows
    )


def parts() -> list[str]:
    """Return the table of the parts of a sum in few bits, and how many reads of the array each takes."""
    found = {size: loaded(f"quantised-{size}")["rows"] for size in (4, 2)}
    columns = [(size, bits) for size in found for bits in (8, 4)]
    rows: dict[str, list[str]] = {}
    for size, bits in columns:
        for row in found[size]:
            name = row["name"].removeprefix(f"{bits} bits").lstrip(": ")
            if row["name"].startswith(f"{bits} bits") and row["baseline"] != "16 bits":
                whole = f"a call, and its speed-up over `{row['baseline']}`"
                last = (
                    f"{row['speedup']:.2f}"
                    if name == "direct"
                    else f"{row['seconds'] / row['floor']:.1f} reads"
                )
                rows.setdefault(whole if name == "direct" else name, []).append(
                    f"{1e3 * row['seconds']:.1f} ms, {last}"
                )
    return table(
        ["25e6 float32", *(f"P = {size}, {bits} bits" for size, bits in columns)],
        [[k, *v] for k, v in rows.items()],
    )


def choice() -> list[str]:
    """Return in how many places "auto" is near the best algorithm, by ranks and collective."""
    found = slowdowns()
    rows = []
    for name in dict.fromkeys(name for name, _ in found):
        runs = [np.array(found[name, size]) for size in CHOICES]
        whole = np.concatenate(runs)
        near = [f"{np.sum(run <= NEAR)} of {run.size}" for run in runs]
        rows.append(
            [
                f"`{name}`",
                *near,
                f"{100 * np.mean(whole <= NEAR):.0f} %",
                f"{whole.max():.1f}",
            ]
        )
    heads = ['"auto" of', *(f"P = {size}" for size in CHOICES), "together", "worst"]
    return table(heads, rows)


def short() -> list[str]:
    """Return the microseconds of short sums: dense and gathered by MPI, and sparse."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for size in reversed(RANKS):
        for row in loaded(f"short-{size}")["rows"]:
            case = (
                f"{size}",
                f"{row['length']:.0e}".replace("e+0", "e"),
                f"{100 * row['density']:g} %",
            )
            found.setdefault(case, {})[row["algorithm"]] = (
                f"{1e6 * row['seconds']:.0f} us"
            )
    heads = [
        "P",
        "values",
        "density",
        "`MPI_Allreduce`, dense",
        "`MPI_Allgatherv`",
        "`sparse_allreduce`",
    ]
    names = "MPI_Allreduce", "MPI_Allgatherv", "auto"
    return table(
        heads,
        [[*case, *(taken[name] for name in names)] for case, taken in found.items()],
    )


def race(schedule: str, name: str = "race") -> list[str]:
    """Return the tables of a race with a schedule of the learning rate, one for each rate of the links."""
    rows = losses.of(loaded(name)["rows"], schedule=schedule)

    def loss(pair: tuple[str, list[Any]]) -> float:
        return results.final(results.by_learning_rate(pair[1])[0])

    ordered = {
        setting: dict(sorted(own.items(), key=loss))
        for setting, own in results.settings(rows).items()
    }
    tables = (
        results.table(setting, own, results.sittings(rows, setting))
        for setting, own in ordered.items()
    )
    return "\n".join(tables).rstrip().split("\n")


def patches() -> list[str]:
    """Return the table of bytes a change of a patch and of the form of grail, and the patch's rates."""
    heads = ["rate", "steps", "changed", "bytes a change", "of grail's", "make, apply"]
    rows = []
    for row in loaded("patches")["rows"]:
        cells = training_of(row)
        cells += [f"{row[name]:.2f}" for name in ("bytes", "rows bytes")]
        rows.append([*cells, f"{row['encode']:.2f}, {row['apply']:.2f}"])
    return table(heads, rows)


def forms_of_patches() -> list[str]:
    """Return the table of bytes a change, and GB of weights a second, of other forms, and of the entropies."""
    codecs = {"rows": "rows, columns, zstd", "zlib": "differences, zlib"}
    heads = ["rate", "steps", *codecs.values(), "32 bits and a value"]
    heads += ["entropy", "given exponents"]
    heads += [f"{name}: make, apply" for name in codecs.values()]
    rows = []
    for row in loaded("patches")["rows"]:
        cells = training_of(row)[:2]
        names = *(f"{name} bytes" for name in codecs), "naive bytes"
        cells += [
            f"{row[name]:.2f}" for name in (*names, "bound", "bound given exponents")
        ]
        for name in codecs:
            cells.append(f"{row[f'{name} encode']:.2f}, {row[f'{name} apply']:.2f}")
        rows.append(cells)
    return table(heads, rows)


def training_of(row: dict[str, Any]) -> list[str]:
    """Return the learning rate, the steps, and how many weights these changed."""
    rate = row["rate"].replace("e-0", "e-")
    return [rate, str(row["steps"]), f"{100 * row['changed']:.1f} %"]


def patches_over_links() -> list[str]:
    """Return the table of the patch of a step beside a broadcast of all weights."""
    found = loaded("patches-8")
    taken, nbytes = found["seconds"], found["bytes"]
    rows = [
        ["`changes` on the root", "", f"{taken['making']:.3f}"],
        [
            "`sparse_bcast`, applied on all ranks",
            f"{nbytes['patch']:,}",
            f"{taken['patch']:.3f}",
        ],
        ["MPI_Bcast of all weights", f"{nbytes['model']:,}", f"{taken['model']:.3f}"],
    ]
    return table([f"{found['ranks']} hosts", "bytes", "seconds"], rows)


def quantisers() -> list[str]:
    """Return the table of relative squared errors."""
    rows = loaded("quantisers")["rows"]
    cells = [
        [
            row["quantiser"],
            str(row["bits"]),
            *(f"{row['errors'][of]:.4f}" for of in VALUES),
        ]
        for row in rows
    ]
    return table(["quantiser", "bits", *VALUES], cells)


def accuracy() -> list[str]:
    """Return the accuracy of each method by density, with the rate that it takes and the bytes of a step."""
    rows = loaded("accuracy")["rows"]
    densities = sorted({row["density"] for row in rows if row["density"]}, reverse=True)
    heads = [
        "method",
        *(
            f"{100 * each:g} %: {what}"
            for each in densities
            for what in ("test accuracy, %", "rate", "bytes")
        ),
    ]
    lines = []
    for name in dict.fromkeys(row["name"] for row in rows):
        own = {row["density"]: row for row in rows if row["name"] == name}
        cells = []
        for row in [own.get(None, own.get(each)) for each in densities[: len(own)]]:
            cells += [
                f"{row['figure']:.2f} ± {row['spread']:.2f}",
                f"{row['rate']:g}",
                f"{row['nbytes']:,.0f}",
            ]
        lines.append([f"`{name}`", *cells, *[""] * (len(heads) - 1 - len(cells))])
    return table(heads, lines)


def large(length: str) -> list[str]:
    """Return the table of one exchange of a large gradient: bytes, and seconds over links and in shared memory."""
    links, memory = (
        loaded(f"large/{length}-{where}")["rows"] for where in ("1gbit", "memory")
    )
    dense = links[0]["seconds"]
    lines = []
    for over, inside in zip(links, memory, strict=True):
        cells = [
            f"{over['nbytes'] / 1e6:.3g}",
            f"{over['seconds']:.2f}",
            f"{dense / over['seconds']:.2g}x",
            f"{inside['seconds']:.2f}",
        ]
        lines.append([over["method"], *cells])
    return table(
        [
            f"{length} values",
            "MB sent",
            "8 hosts at 1 Gbit/s, s",
            "over dense",
            "8 ranks in shared memory, s",
        ],
        lines,
    )


def memory() -> list[str]:
    """Return the table of bytes a value of a gradient on a rank: kept between steps, and more in a step."""
    found = loaded("memory")["rows"]
    lines = [
        [row["name"], f"{row['kept']:.0f}", f"{row['in_a_step']:.1f}"] for row in found
    ]
    return table(["exchange", "kept between steps", "more while a step runs"], lines)


def methods() -> list[str]:
    """Return the table of all methods."""
    cells = [
        [f"`{name}`" + f", by `{each.number}`" * bool(each.number), each.text]
        + [f"`{line}`" if line else "" for line in (each.line, each.outer)]
        for name, each in METHODS.items()
    ]
    return table(["method", "what is sent", "exchange, or hook", "`OuterLoop`"], cells)


def first() -> list[str]:
    """Return the seconds of the first step of a method, and of that in a later process: the least and the most."""
    rows = [row for row in loaded("cold")["rows"] if row["method"] in FIRST_STEPS]
    cells = []
    for column in ("seconds", "from_files"):
        seconds = [row[column] for row in rows]
        cells.append(f"{min(seconds):.1f} to {max(seconds):.1f} s")
    return table(["the first step", "in each process after that"], [cells])


def hook() -> list[str]:
    """Return the table of where the time of a step goes."""
    return results.where(loaded("hook")["rows"])


def every_step(which: str) -> list[str]:
    """Return a table of losses at equal steps: of all trainings by rate, or of those with a schedule at the best."""
    heads, *rows = getattr(losses, which)(loaded("every_step")["rows"])
    return table(heads, rows)


def local_steps(which: str) -> list[str]:
    """Return the map of local steps, or a table of its trainings."""
    heads, *rows = getattr(cells, which)(loaded("map")["rows"])
    return table(heads, rows)


def paper(name: str) -> list[str]:
    """Return the table of an experiment on the claims of the papers."""
    file = STUDIES / "papers" / f"{name}.json"
    found: list[str] = of_experiment(
        name, loaded(f"papers/{name}")["rows"] if file.exists() else []
    )
    return found


def of_calls(part: str) -> dict[str, dict[str, Any]]:
    """Return the rows of calls on a GPU by name."""
    rows = json.loads(EVIDENCE.read_text())[part]
    return {row["name"]: row for row in rows if "error" not in row}


def gpu_selection() -> list[str]:
    """Return the table of selections of a thousandth on a GPU: milliseconds, reads, and PyTorch's over them."""
    lines = []
    for part, values in (("calls 268435456", "2.7e8"), ("selection 1e9", "1e9")):
        rows = of_calls(part)
        own, torch = rows["largest"], rows.get("torch.topk of magnitudes")
        ratio = f"{torch['seconds'] / own['seconds']:.1f}" if torch else ""
        lines.append(
            [values, f"{1e3 * own['seconds']:.2f}", f"{own['reads']:.1f}", ratio]
        )
    heads = ["float32 values", "Top-k, 0.1 %: ms", "reads", "`torch.topk` over it"]
    return table(heads, lines)


def gpu_step() -> list[str]:
    """Return the table of steps of two ranks on one GPU: milliseconds, and over MPI's dense sum."""
    found = json.loads(EVIDENCE.read_text())
    ways = [found[f"step {way}"] for way in ("staged", "direct")]
    lines = [
        [staged["name"]]
        + [f"{1e3 * row['seconds']:.1f}, {row['over_dense']:.3f}" for row in rows]
        for staged, *rows in zip(ways[0], *ways, strict=True)
    ]
    return table(["step", "staged: ms, over dense", "direct"], lines)


def gpu_calls() -> list[str]:
    """Return the table of what one rank computes on a GPU: reads of 1.07 GB, and the time with nothing to compute."""
    long, short = of_calls("calls 268435456"), of_calls("calls 10000")
    names = {
        "TopK": "`TopK.compress`",
        "ChunkedTopK": "`ChunkedTopK`",
        "SIDCo exponential": "`SIDCo`",
        "AggregationAware": "`AggregationAware`",
        "AdaComp": "`AdaComp`",
        "Quantised ChunkedTopK, two bits": "`ChunkedTopK` in two bits",
        "step in place, sparse": "a step, Top-k, in place, `sparse=True`",
        "step, out=": "a step, Top-k, `out=`",
        "step, bits=4, out=": "a step, `bits=4`",
    }
    for count in ("1 tensor", "54 tensors", "160 tensors", "54 tensors of odd sizes"):
        for method in ("top-k", "bits=4", "chunks in two bits"):
            names[f"{count}, {method}"] = f"a step of {count}, {method}"
    lines = [
        [label, f"{long[name]['reads']:.1f}", f"{1e6 * short[name]['seconds']:,.0f}"]
        for name, label in names.items()
    ]
    heads = ["call, 0.1 %", "reads of 2.7e8 values", "us for 10,000 values"]
    return table(heads, lines)


def gpu_costs() -> list[str]:
    """Return the table of steps on a device: launches and waits for numbers of tensors, bytes, time of the host."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in loaded("gpu_costs")["steps"]:
        by_name.setdefault(row["call"], []).append(row)
    lines = []
    for name, rows in by_name.items():
        counts = [f"{row['launches']}, {row['waits']}" for row in rows]
        reads = f"{max(row['reads'] for row in rows):.1f}"
        times = [f"{row['host_us']}" for row in rows if "host_us" in row]
        lines.append([name, *counts, reads, ", ".join(times)])
    heads = [f"{row['tensors']} tensors" for row in rows]
    heads[0] = "one vector: launches, waits"
    return table(["step, P = 1, `out=`", *heads, "reads", "host, us"], lines)


def gpu_instructions() -> list[str]:
    """Return the table of the machine code of kernels: instructions a value, registers, spilled bytes."""
    lines = [
        [f"`{row['kernel']}`"]
        + [str(row[name]) for name in ("instructions", "registers", "spilled")]
        for row in loaded("gpu_costs")["instructions"]
    ]
    heads = ["kernel", "instructions a value", "registers", "spilled bytes"]
    return table(heads, lines)


TABLES = {
    "docs/devices.md": {"gpu-selection": gpu_selection},
    "docs/contributing/gpu.md": {
        "gpu-calls": gpu_calls,
        "gpu-step": gpu_step,
        "gpu-costs": gpu_costs,
        "gpu-instructions": gpu_instructions,
    },
    "docs/slow_links.md": {"map": partial(local_steps, "behind")},
    "docs/performance.md": {
        "large": partial(large, "1e8"),
        "first": first,
        "overlap": lambda: overlap.shown_short(loaded("overlap")["steps"]),
    },
    "docs/memory.md": {"memory": memory},
    "docs/contributing/measurements.md": {
        "steps": lambda: times(STEPS),
        "tensors": lambda: times(TENSORS, "-tensors"),
        "compressors": compressors,
        "threads": threads,
        "cold": lambda: first_steps(loaded("cold")["rows"]),
        "overlap": lambda: overlap.shown(loaded("overlap")["steps"]),
        "rounds": lambda: overlap.shown_rounds(loaded("overlap")["rounds"]),
        "few_bits": few_bits,
        "coders": coders,
        "by_name": by_name,
        "parts": parts,
        "choice": choice,
        "short": short,
        "hook": hook,
        "quantisers": quantisers,
        "gains": gains,
        "forms-of-patches": forms_of_patches,
        "less-large": partial(large, "5e7"),
    },
    "docs/patches.md": {
        "patches": patches,
        "patches-network": patches_over_links,
    },
    "experiments/race/README.md": {
        "race-linear": partial(race, "linear"),
        "race-overlap": partial(race, "linear", "race_overlap"),
        "race": partial(race, "constant"),
    },
    "docs/contributing/accuracy.md": {
        "accuracy": accuracy,
        "E9": partial(paper, "E9"),
        "E10": partial(paper, "E10"),
        "every_step": partial(every_step, "summary"),
    },
    "experiments/every_step/README.md": {
        "methods": methods,
        "every_step": partial(every_step, "table"),
        "map": partial(local_steps, "table"),
        "fewer-bits": partial(local_steps, "fewer_bits"),
        "by-bits": partial(local_steps, "by_bits"),
        "map-trainings": partial(local_steps, "trainings"),
    },
    "experiments/papers/README.md": {
        name: partial(paper, name)
        for name in ("E1", "E2", "E3", "E4", "E5", "E6", "E7", "E8")
    },
}


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit with 1 where a page differs",
    )
    check, differ = parser.parse_args().check, False
    for name, tables in TABLES.items():
        path = ROOT / name
        page = before = path.read_text()
        for each, make in tables.items():
            block = "\n".join(
                [f"<!-- {each} -->", "", *make(), "", f"<!-- end of {each} -->"]
            )
            place = rf"<!-- {each} -->.*?<!-- end of {each} -->"
            page, count = re.subn(place, lambda _, b=block: b, page, flags=re.DOTALL)
            assert count == 1, f"{name} has {count} places for the table {each}"
        differ |= page != before
        if not check:
            path.write_text(page)
    return int(check and differ)


if __name__ == "__main__":
    sys.exit(main())
