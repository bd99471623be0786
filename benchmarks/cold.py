"""The cost of the first step of each method, in a new process whose folder of compiled kernels is empty.

    python benchmarks/cold.py --json docs/results/cold.json     # then benchmarks/doc_tables.py

The seconds are CPU time of the step, with Numba's import, on one rank and one thread, of
one tensor of 10^6 float32 values. "From files": the same in the next process. Compiled
functions are counted by signature, those of Numba's own library among them.
"""

import argparse
import gc
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from rendering import table

from mpicomp_bench.methods import method
from mpicomp_bench.warm import FIRST_STEPS, first_step

ALL = "all of them"
CODE = "import json, cold; print(json.dumps(cold.measured({names})))"


def measured(names: Sequence[str]) -> dict[str, Any]:
    """Return the CPU time of the first steps of methods in this process, and the functions compiled."""
    from mpi4py import MPI

    began = time.process_time()
    for name in names:
        first_step(name, MPI.COMM_SELF)
    return {"seconds": time.process_time() - began, "functions": compiled()}


def compiled() -> int:
    """Return how many versions of functions Numba compiled in this process, or read from files."""
    from numba.core.dispatcher import Dispatcher

    return sum(
        len(each.overloads) for each in gc.get_objects() if isinstance(each, Dispatcher)
    )


def in_new_process(names: Sequence[str], folder: str) -> dict[str, Any]:
    """Return what `measured` does, in a process with this folder of compiled kernels."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": folder, "MPICOMP_THREADS": "1"}
    command = [sys.executable, "-c", CODE.format(names=list(names))]
    here = pathlib.Path(__file__).parent
    done = subprocess.run(
        command, env=environment, cwd=here, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def row(name: str) -> dict[str, Any]:
    """Return the costs of a method, or of all in one process."""
    names = FIRST_STEPS if name == ALL else [name]
    with tempfile.TemporaryDirectory() as folder:
        cold, warm = (in_new_process(names, folder) for _ in range(2))
    return {"method": name, **cold, "from_files": warm["seconds"]}


def shown(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table."""
    heads = ["method", "", "first step, s", "from files, s", "functions compiled"]
    return table(
        heads,
        [
            [
                f"`{each['method']}`" if each["method"] != ALL else ALL,
                method(each["method"]).text if each["method"] != ALL else "",
                f"{each['seconds']:.1f}",
                f"{each['from_files']:.1f}",
                f"{each['functions']}",
            ]
            for each in rows
        ],
    )


def main() -> None:
    """Measure and print; the rows also as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=pathlib.Path, help="file for the rows")
    parser.add_argument("--methods", nargs="+", default=[*FIRST_STEPS, ALL])
    options = parser.parse_args()
    rows = [row(name) for name in options.methods]
    print("\n".join(shown(rows)))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
