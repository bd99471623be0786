"""Draw the figures of docs/concepts.md: the selection on one rank, and the sum over the ranks.

    python docs/figures/concepts.py          # needs matplotlib; writes one_rank.svg and ranks.svg beside this file

The numbers are those of the library: it compresses and adds up the vectors that are
drawn.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from style import COLOURS, arrow, blank, cells, save

sys.path.insert(0, str(Path(__file__).parents[2]))
from mpicomp import SparseVector, TopK
from mpicomp.vector import add_up

LENGTH, K = 12, 3
WHITE, SENT, KEPT = "#ffffff", COLOURS["ranks"], COLOURS["fault"]


def gradients(ranks: int) -> list[Any]:
    """Return a vector of small integers for each rank."""
    return [
        np.random.default_rng([18, rank]).integers(-9, 10, LENGTH).astype(np.float32)
        for rank in range(ranks)
    ]


def tinted(values: Any, colour: str, elsewhere: str = WHITE) -> list[str]:
    """Return a colour for each cell: one for numbers, another for zeros."""
    return [colour if value else elsewhere for value in values]


def draw_one_rank() -> None:
    """Draw correction, selection, and the residual of one rank."""
    figure, axes = blank(8, 2.9, (-4.6, 20.6), (0.6, 9.5))
    gradient, residual = (
        gradients(1)[0],
        np.array([0, 2, 0, -4, 0, 0, 1, 0, 3, 0, -2, 0], np.float32),
    )
    corrected = gradient + residual
    sent = TopK(k=K).compress(corrected)
    dense = sent.to_dense()
    rows = [
        (8, "gradient", gradient, [WHITE] * LENGTH),
        (6.4, "+ residual", residual, tinted(residual, KEPT)),
        (4.4, "= corrected", corrected, tinted(dense, SENT)),
        (1, "new residual", corrected - dense, tinted(corrected - dense, KEPT)),
    ]
    for y, name, values, colours in rows:
        cells(axes, 0, y, values, colours)
        axes.text(-0.4, y + 0.5, name, ha="right", va="center", size=9)
    arrow(axes, 6, 4.2, 6, 2.2)
    arrow(axes, 12.2, 4.9, 14.6, 4.9)
    axes.text(13.3, 5.3, f"TopK(k={K})", ha="center", size=8, family="monospace")
    cells(axes, 15, 4.9, sent.values, [SENT] * K)
    cells(axes, 15, 3.9, sent.indices, [WHITE] * K, zeros=True)
    axes.text(18.2, 5.4, "values", va="center", size=8)
    axes.text(18.2, 4.4, "indices", va="center", size=8)
    axes.text(16.5, 6.3, "SparseVector: sent", ha="center", size=9, weight="bold")
    axes.text(
        6.4,
        3.1,
        "entries not sent stay on the rank, and are added to the next gradient",
        va="center",
        size=8,
    )
    save(figure, "one_rank")


def draw_ranks() -> None:
    """Draw the sum over four ranks."""
    ranks = 4
    figure, axes = blank(8, 3.7, (-3.2, 22), (-2.6, 9))
    vectors = [TopK(k=K).compress(gradient) for gradient in gradients(ranks)]
    for rank, vector in enumerate(vectors):
        y = 7.4 - 1.4 * rank
        cells(axes, 0, y, vector.to_dense(), tinted(vector.to_dense(), SENT))
        axes.text(-0.4, y + 0.5, f"rank {rank}", ha="right", va="center", size=9)
        arrow(axes, 12.2, y + 0.5, 13.3, 5.4)
    total: SparseVector = add_up(vectors)
    axes.text(
        15.8,
        5.3,
        "sparse_allreduce",
        ha="center",
        va="center",
        size=9,
        weight="bold",
        family="monospace",
    )
    axes.text(
        15.8,
        4.3,
        "messages of indices\nand values, no zeros",
        ha="center",
        va="center",
        size=7.5,
    )
    arrow(axes, 13.3, 3.4, 12.2, 1)
    cells(axes, 0, 0.3, total.to_dense(), tinted(total.to_dense(), COLOURS["rank"]))
    axes.text(-0.4, 0.8, "sum", ha="right", va="center", size=9)
    text = f"the same bits on every rank: {total.nnz} entries from {ranks} x {K}; the mean is this over {ranks}"
    axes.text(6, -0.8, text, ha="center", size=8)
    axes.text(
        6,
        -1.9,
        f"dense: every rank would send all {LENGTH} values",
        ha="center",
        size=8,
        color="#666666",
    )
    save(figure, "ranks")


if __name__ == "__main__":
    draw_one_rank()
    draw_ranks()
