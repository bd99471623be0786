"""The declaration of a benchmark: its options, its rows, their rendering and its files."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpicomp_bench.measuring import Row
from mpicomp_bench.output import COMPARISON, Column

Options = argparse.Namespace


@dataclass(frozen=True)
class Suite:
    """A subject of `mpicomp bench`. help: one line, without a full stop; about: notes below the examples.

    rows: yields the rows; all ranks call it with the communicator, or with `alone` rank
    0 only, with None. length, repeats: the defaults of these options; None: no common
    --length. refuse: returns an error of this rank before the measurement; it may
    complete the options. report: returns the text below the table.
    """

    help: str
    examples: str
    add_options: Callable[[Any], None]
    rows: Callable[[Options, Any], Iterable[Row]]
    about: str = ""
    columns: Sequence[Column] = field(default_factory=lambda: COMPARISON)
    alone: bool = False
    length: int | None = None
    repeats: int = 9
    refuse: Callable[[Options, Any], str | None] = lambda options, comm: None
    report: Callable[[Options, Sequence[Row]], str] = lambda options, rows: ""
