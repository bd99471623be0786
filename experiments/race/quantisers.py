"""How well a few bits hold the values that are selected from pseudo-gradients: a table of relative squared errors.

    python experiments/race/quantisers.py --json experiments/results/quantisers.json

One process trains the GPT of the race: rounds of local AdamW steps, each followed by
the selection of the k largest magnitudes in every chunk of the pseudo-gradient plus
residual, as in local-sparse but for one rank. The rest stays in the residual, which
decays. The error of a quantiser is sum((v - q)^2) / sum(v^2) over the selected values v
of a tensor. The table has its mean over rounds and over the tensors of a kind, and for
comparison the errors on random values: normal, Laplace, and Student's t with 3 degrees
of freedom.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mpicomp_bench.files import check_files, new_file
from mpicomp_bench.options import Parser, positive
from mpicomp_bench.output import write_rows

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from rendering import table

Array = NDArray[np.float64]
CHUNK = 4096
DECAY = 0.95
SMALL = 1024  # named tensors of fewer numbers are sent dense
KINDS = {  # part of the name of a tensor: its kind
    "symbols": "embeddings",
    "places": "embeddings",
    "attention.": "attention",
    "projection": "attention",
    "mlp": "perceptron",
    "head": "head",
}


def four_bins(values: Array) -> Array:
    """Return the values by the published rule: four bins over six standard deviations, each with its members' mean."""
    scale = 6 * values.std(ddof=1) / 4
    codes = np.clip(np.round((values - values.mean()) / scale + 2), 0, 3).astype(int)
    sums, counts = np.bincount(codes, values, 4), np.bincount(codes, minlength=4)
    return (sums / np.maximum(counts, 1))[codes]


def lloyd(values: Array, bits: int) -> Array:
    """Return signs times 2**bits magnitudes, which Lloyd's rule finds in at most 20 rounds.

    It starts from one magnitude, the mean, and splits every group at its mean once for
    each bit.
    """
    magnitudes = np.abs(values)
    bounds = np.array([])
    for _ in range(bits):
        bounds = np.sort([*bounds, *centres(magnitudes, bounds)])
    for _ in range(20):
        found = centres(magnitudes, bounds)
        moved = (found[1:] + found[:-1]) / 2
        if np.array_equal(moved, bounds):
            break
        bounds = moved
    return (
        np.sign(values)
        * centres(magnitudes, bounds)[np.searchsorted(bounds, magnitudes)]
    )


def centres(magnitudes: Array, bounds: Array) -> Array:
    """Return the mean of the magnitudes up to each bound, and above the last; of an empty group the mean of all."""
    groups = np.searchsorted(bounds, magnitudes)
    counts = np.bincount(groups, minlength=bounds.size + 1)
    sums = np.bincount(groups, magnitudes, bounds.size + 1)
    return np.sort(np.where(counts, sums / np.maximum(counts, 1), magnitudes.mean()))


def linear(values: Array) -> Array:
    """Return the values as integers of 4 bits, -8 to 7, times the maximum magnitude of 64 consecutive ones over 7.5."""
    found = np.empty_like(values)
    for start in range(0, values.size, 64):
        part = values[start : start + 64]
        scale = np.abs(part).max() / 7.5
        found[start : start + 64] = np.clip(np.round(part / scale), -8, 7) * scale
    return found


QUANTISERS: dict[str, tuple[int, Callable[[Array], Array]]] = {
    "4 bins over 6 sigma": (2, four_bins),
    "sign, one magnitude": (1, lambda values: lloyd(values, 0)),
    "sign + 1 bit, Lloyd": (2, lambda values: lloyd(values, 1)),
    "sign + 2 bits, Lloyd": (3, lambda values: lloyd(values, 2)),
    "linear, 4 bits": (4, linear),
}


def selected(values: Array, k: int) -> NDArray[np.intp]:
    """Return the indices of the k largest magnitudes of each chunk of consecutive values, without zeros."""
    found = []
    for start in range(0, values.size, CHUNK):
        chunk = np.abs(values[start : start + CHUNK])
        count = max(1, round(k * chunk.size / CHUNK))
        found.append(start + np.sort(np.argsort(-chunk, kind="stable")[:count]))
    chosen = np.concatenate(found)
    return chosen[values[chosen] != 0]


def errors(values: Array) -> dict[str, float]:
    """Return the relative squared error of each quantiser."""
    return {
        name: float(np.sum((values - quantise(values)) ** 2) / np.sum(values**2))
        for name, (_, quantise) in QUANTISERS.items()
    }


def drawn(k: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the errors on values that a generator draws, 256 chunks of them."""
    rng, size = np.random.default_rng(0), CHUNK * 256
    drawn = {
        "normal": rng.standard_normal(size),
        "Laplace": rng.laplace(size=size),
        "t(3)": rng.standard_t(3, size),
    }
    for name, values in drawn.items():
        yield name, errors(values[selected(values, k)])


def trained(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    """Train, and yield kind and errors of each tensor in each round."""
    import gpt

    trainer = gpt.Trainer(options.seed, 0, 1, gpt.TASKS["gpt"])
    trainer.optimise("local-sparse-10", 1e-3)
    arrays = {name: array.detach().numpy() for name, array in trainer.arrays.items()}
    anchors = {name: array.copy() for name, array in arrays.items()}
    residuals = {name: np.zeros_like(array) for name, array in arrays.items()}
    for step in range(options.rounds * options.every):
        trainer.step(step)
        if (step + 1) % options.every:
            continue
        for name, array in arrays.items():
            update = DECAY * residuals[name] + (anchors[name] - array)
            flat, chosen = update.reshape(-1), np.arange(update.size)
            if flat.size >= SMALL:
                chosen = selected(flat, options.k)
                yield kind_of(name), errors(flat[chosen].astype(float))
            anchors[name].reshape(-1)[chosen] -= flat[chosen]
            flat[chosen] = 0
            residuals[name], array[...] = update, anchors[name]
        sys.stderr.write(f"step {step + 1}: held-out loss {trainer.loss():.3f}\n")


def kind_of(name: str) -> str:
    """Return the kind of a tensor."""
    return next(kind for part, kind in KINDS.items() if part in name)


def main() -> int:
    """Capture, and print the table."""
    parser = Parser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add(
        "--every",
        type=positive,
        default=15,
        help="local steps of a round (%(default)s)",
    )
    add("--rounds", type=positive, default=20, help="(%(default)s)")
    add(
        "--k",
        type=positive,
        default=64,
        help=f"selected of every chunk of {CHUNK} (%(default)s)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="of the start and of the batches (%(default)s)",
    )
    add(
        "--json",
        type=new_file,
        metavar="FILE",
        help="write the errors to a file as well",
    )
    options = parser.parse_args()
    check_files(options)
    by_kind: dict[str, list[dict[str, float]]] = {}
    for kind, found in trained(options):
        by_kind.setdefault(kind, []).append(found)
        by_kind.setdefault("all tensors", []).append(found)
    by_kind |= {name: [found] for name, found in drawn(options.k)}
    rows = [
        {
            "quantiser": name,
            "bits": bits,
            "errors": {kind: mean(found, name) for kind, found in by_kind.items()},
        }
        for name, (bits, _) in QUANTISERS.items()
    ]
    cells = [
        [
            row["quantiser"],
            str(row["bits"]),
            *(f"{one:.4f}" for one in row["errors"].values()),
        ]
        for row in rows
    ]
    print(*table(["quantiser", "bits", *by_kind], cells), sep="\n")
    about = {name: getattr(options, name) for name in ("every", "rounds", "k", "seed")}
    return write_rows(options, rows, about)


def mean(found: list[dict[str, float]], name: str) -> float:
    """Return the mean error of a quantiser."""
    return float(np.mean([one[name] for one in found]))


if __name__ == "__main__":
    sys.exit(main())
