"""Draw the figures of docs/contributing/architecture.md, and list the layers of the code.

    python docs/figures/architecture.py          # needs matplotlib; writes rooms.svg and gradient.svg beside this file

`FLOORS` are the layers from top to bottom: a module imports modules of its own layer
and of those below. `tests/repository/test_house.py` compares that with the code.
"""

import sys
from pathlib import Path

FLOORS = [  # modules by the beginning of their names; the longest one that fits counts
    ["mpicomp_bench"],
    ["collectives.torch", "collectives.jax"],
    ["collectives.local_steps"],
    ["collectives.exchange"],
    ["collectives.*"],  # a collective a file
    ["collectives.calls"],
    ["collectives.runtime"],
    ["collectives.planning"],
    ["collectives.faults"],
    ["mpicomp"],
]  # fmt: skip

BOXES = [  # x, y, width, height, name, contents, colour
    (0, 11.4, 12.4, 1.0, "mpicomp_bench/", "the command: info, bench, explain", "tool"),
    (0, 9.8, 12.4, 1.2, "collectives/local_steps/   collectives/exchange/",
     "OuterLoop: local steps between two exchanges\n"
     "GradientExchange: correct, compress, sum, keep the rest", "ranks"),
    (0, 8.2, 12.4, 1.2, "collectives/",
     "gtopk, allreduce, quantised, ...: a collective a file\njax: gradients of a pytree",
     "ranks"),
    (0, 6.3, 12.4, 1.5, "collectives/calls/", "collective: declares one;  start: checks and starts a call\n"
     "notification, all_or_none, recovery: all ranks raise, or none\nfirst_call; debug: the debug mode", "ranks"),
    (0, 4.4, 12.4, 1.5, "collectives/runtime/", "group: the interface of an algorithm to the network\n"
     "engine, progress: drive operations, blocking or in flight;  deadline\n"
     "link, messages, staging: bytes through MPI", "ranks"),
    (0, 1.9, 6.0, 2.1, "collectives/planning/", "schedule, partition: peers of\neach round, owners of shares\n"
     'choice: the algorithm of "auto"', "ranks"),
    (6.4, 1.9, 6.0, 2.1, "collectives/faults/", "state: a pure state machine of\nabsent and dead ranks\n"
     "errors, interrupts, ulfm", "fault"),
    (0, 0, 12.4, 1.5, "mpicomp/     the computation of one rank: no MPI",
     "feedback: the residual     compressors: array to SparseVector     codec: SparseVector to message\n"
     "vector: merge, top_k     arrays: NumPy, CuPy, DLPack     kernels/host, kernels/device: the hot loops", "rank"),
]  # fmt: skip
COLOURS = {"tool": "#efe6d8", "ranks": "#dbe7f3", "fault": "#f6dcd8", "rank": "#dcefdc"}
ARROWS = [  # x, from y, to y
    *((4.6, 11.4, 11.0), (4.6, 9.8, 9.4), (4.6, 8.2, 7.8), (4.6, 6.3, 5.9)),
    *((4.6, 4.4, 4.0), (4.6, 1.9, 1.5), (9.2, 4.4, 4.0), (9.2, 1.9, 1.5)),
]

# of a gradient: the name, what happens, the file, and whether all ranks take part
STATIONS = [
    ("gradient", "any array,\nlist or dict", "mpicomp/tensors.py", False),
    ("correct", "with the residual\nof the last step", "mpicomp/feedback/", False),
    ("compress", "select entries:\na SparseVector", "mpicomp/compressors/", False),
    (
        "exchange",
        "rounds of\nmessages",
        "collectives/gtopk.py, ...",
        True,
    ),
    (
        "prepare",
        "mean, residual:\nall that can fail",
        "collectives/exchange/",
        False,
    ),
    (
        "agree",
        "keep the step on\nall ranks or none",
        "collectives/calls/",
        True,
    ),
    ("commit", "mean returned,\nresidual kept", "collectives/exchange/", False),
]


def draw_rooms(path: Path) -> None:
    """Draw the packages and their imports."""
    figure, axes = canvas(8.2, 8.4, (-0.1, 12.5), (-0.1, 12.5))
    for x, y, width, height, name, inside, colour in BOXES:
        box(axes, x, y, width, height, COLOURS[colour])
        axes.text(
            x + 0.15,
            y + height - 0.12,
            name,
            va="top",
            weight="bold",
            size=9,
            family="monospace",
        )
        lines = name.count("\n") + 1
        axes.text(
            x + 0.15,
            y + height - 0.15 - 0.36 * lines,
            inside,
            va="top",
            size=8,
            linespacing=1.35,
        )
    for x, start, end in ARROWS:
        arrow(axes, x, start, x, end)
    figure.savefig(path)


def draw_gradient(path: Path) -> None:
    """Draw a gradient in one step, from left to right."""
    figure, axes = canvas(8.6, 2.9, (-0.2, 15.5), (-1.6, 2.9))
    for place, (name, what, where, together) in enumerate(STATIONS):
        x = 2.2 * place
        box(axes, x, 0, 1.8, 1.7, COLOURS["ranks" if together else "rank"])
        axes.text(x + 0.9, 1.35, name, ha="center", weight="bold", size=9.5)
        axes.text(
            x + 0.9, 0.62, what, ha="center", va="center", size=7.2, linespacing=1.4
        )
        path_in_lines = where.replace("/", "/\n", 1)
        axes.text(
            x + 0.9,
            -0.35,
            path_in_lines,
            ha="center",
            va="center",
            size=7.2,
            family="monospace",
        )
        if place:
            arrow(axes, x - 0.4, 0.85, x, 0.85)
        if together:
            arrow(axes, x + 0.6, 2.5, x + 0.6, 1.7)
            arrow(axes, x + 1.2, 1.7, x + 1.2, 2.5)
            axes.text(x + 0.9, 2.55, "other ranks", ha="center", size=7.2)
    axes.annotate(
        "",
        (3.1, -0.75),
        (14.1, -0.75),
        arrowprops={"arrowstyle": "->", "connectionstyle": "bar,fraction=-0.035"},
    )
    axes.text(
        8.6,
        -1.5,
        "the residual: entries not sent, for the next step",
        ha="center",
        size=7.5,
    )
    figure.savefig(path)


def canvas(width: float, height: float, x: tuple[float, float], y: tuple[float, float]):
    """Return an empty figure without axes."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {
        "svg.hashsalt": "mpicomp",
        "svg.fonttype": "none",
        "font.family": "DejaVu Sans",
    }
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1), xlim=x, ylim=y)
    axes.axis("off")
    return figure, axes


def box(axes, x: float, y: float, width: float, height: float, colour: str) -> None:
    """Draw a box with round corners."""
    from matplotlib.patches import FancyBboxPatch

    shape = "round,pad=0,rounding_size=0.12"
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            shape,
            facecolor=colour,
            edgecolor="#555555",
            linewidth=0.8,
        )
    )


def arrow(axes, x: float, y: float, to_x: float, to_y: float) -> None:
    """Draw an arrow."""
    axes.annotate(
        "",
        (to_x, to_y),
        (x, y),
        arrowprops={"arrowstyle": "->", "color": "#333333", "linewidth": 1},
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    draw_rooms(folder / f"rooms.{'png' if len(sys.argv) > 1 else 'svg'}")
    draw_gradient(folder / f"gradient.{'png' if len(sys.argv) > 1 else 'svg'}")
