"""What a benchmark declares: its options, its rows, how they are shown and what else is written."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpicomp_bench.measuring import Row
from mpicomp_bench.output import COMPARISON, Column

Options = argparse.Namespace


@dataclass(frozen=True)
class Suite:
    """A subject of `mpicomp bench`.

    rows: yields the rows; all ranks call it with the communicator, unless `alone`, when rank 0 calls it with None.
    length, repeats: the defaults of these options; None: without --length, or with its own. refuse: returns what is
    wrong on this rank, before anything is measured; it may complete the options. report: the text below the table.
    files: the writers of the options that name files, apart from --json.
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
    files: Mapping[str, Callable[[Sequence[Row], Path], Any]] = field(default_factory=dict)
