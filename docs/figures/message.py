"""Draw the figure of docs/contributing/wire_format.md: the header of a message, and the bits of an entry by density.

    python docs/figures/message.py          # needs matplotlib; writes message.svg beside this file

Widths of the fields and sizes of the messages are those of `mpicomp.codec`.
"""

import sys
from pathlib import Path

import numpy as np
from style import COLOURS, blank, save

sys.path.insert(0, str(Path(__file__).parents[2]))
from mpicomp import Quantised, TopK, codec

FIELDS = [  # in the order of the header: bytes, name, and who writes it
    (2, '"MV"', "rank"), (1, "3", "rank"), (1, "form", "rank"), (4, "row width", "rank"), (8, "length", "rank"),
    (8, "entries", "rank"), (8, "bytes of the message", "rank"),
    (8, "count", "ranks"), (8, "signature", "ranks"),
    (1, "kind", "ranks"), (3, "", "none"), (4, "CRC-32", "ranks"), (8, "", "none"),
]  # fmt: skip
ROW = 16  # bytes in a line of the figure
DENSITIES = 0.1, 0.01, 0.001, 0.0001
LENGTH = 2_000_000


def draw_header(axes) -> None:
    """Draw the header, 16 bytes a line, and the two sections behind it."""
    from matplotlib.patches import Rectangle

    assert sum(width for width, _, _ in FIELDS) == codec.HEADER_NBYTES
    offset = 0
    for width, name, writer in FIELDS:
        x, y = offset % ROW, 10 - offset // ROW
        colour = COLOURS.get(writer, "#ffffff")
        axes.add_patch(
            Rectangle(
                (x, y), width, 1, facecolor=colour, edgecolor="#555555", linewidth=0.8
            )
        )
        axes.text(
            x + width / 2,
            y + 0.5,
            name,
            ha="center",
            va="center",
            size=7 if width == 1 else 8.5,
        )
        if not offset % ROW:
            axes.text(-0.3, y + 0.5, f"byte {offset}", ha="right", va="center", size=8)
        offset += width
    for y, name in (
        (5.9, "indices: plain, range, bitmap or Elias-Fano"),
        (4.8, "values: plain, 16 bits, signs, offsets"),
    ):
        axes.add_patch(
            Rectangle(
                (0, y),
                ROW,
                1,
                facecolor=COLOURS["tool"],
                edgecolor="#555555",
                linewidth=0.8,
            )
        )
        axes.text(ROW / 2, y + 0.5, name, ha="center", va="center", size=8.5)
    axes.text(-0.3, 6.4, "byte 64", ha="right", va="center", size=8)


def bits(density: float, form: str | None) -> tuple[float, float]:
    """Return the bits of an index and of a value of the largest of normal values, in the smallest message."""
    gradient = np.random.default_rng(0).standard_normal(LENGTH).astype(np.float32)
    compressor = TopK(density) if form is None else Quantised(TopK(density), form)
    vector = compressor.compress(gradient)
    indices, values = codec.smallest(vector)
    index_nbytes = indices.nbytes(vector)
    return 8 * index_nbytes / vector.nnz, 8 * values.nbytes(vector.nnz) / vector.nnz


def draw_bits(axes) -> None:
    """Draw a bar for each density and form of the values."""
    from matplotlib.patches import Rectangle

    axes.text(
        -0.3, 3.9, "bits of an entry", ha="right", va="center", size=8, weight="bold"
    )
    for place, (density, form) in enumerate(
        (density, form) for form in (None, "two_bit") for density in DENSITIES
    ):
        index, value = bits(density, form)
        y, scale = 3.1 - 0.75 * place - 0.5 * (place >= len(DENSITIES)), ROW / 42
        name = f"{100 * density:g} %, {'float32' if form is None else 'two_bit'}"
        axes.text(-0.3, y + 0.25, name, ha="right", va="center", size=8)
        axes.add_patch(
            Rectangle(
                (0, y),
                index * scale,
                0.5,
                facecolor=COLOURS["rank"],
                edgecolor="#555555",
                linewidth=0.6,
            )
        )
        axes.add_patch(
            Rectangle(
                (index * scale, y),
                value * scale,
                0.5,
                facecolor=COLOURS["fault"],
                edgecolor="#555555",
                linewidth=0.6,
            )
        )
        text = f"{index:.1f} index + {value:.1f} value"
        axes.text((index + value) * scale + 0.15, y + 0.25, text, va="center", size=7.5)


if __name__ == "__main__":
    figure, axes = blank(8, 6.4, (-3.6, 20.4), (-3.6, 11.3))
    draw_header(axes)
    draw_bits(axes)
    save(figure, "message")
