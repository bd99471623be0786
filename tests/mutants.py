"""Mutants: faults put into a copy of the code one at a time, each of which the tests beside it have to catch.

    python tests/mutants.py                 # all of them: minutes, as some run on several ranks of MPI
    python tests/mutants.py sign schedule   # some of them

Prints a table. A mutant is caught if its tests fail with it, or do not end in time, and
pass without it. Exit status 1 if one is not caught, its tests fail without it, or the
line that it changes is gone: then change the mutant, too.
"""

import argparse
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).parents[1]
LIMIT = 400  # seconds of one run
ON_RANKS = "tests/launch.sh 2 -q -x -k P2"
ARGUMENTS = f"{ON_RANKS} tests/mpi/test_arguments.py"


@dataclass(frozen=True)
class Mutant:
    """A fault: in `file` the text `old`, which is there once, becomes `new`; the command runs tests that catch it."""

    name: str
    file: str
    old: str
    new: str
    command: str


MUTANTS = [
    Mutant(
        "sign: two entries are subtracted",
        "mpicomp/kernels/host/merging.py",
        "values[place] = value_a + value_b if",
        "values[place] = value_a - value_b if",
        "tests/mpicomp/test_vector.py",
    ),
    Mutant(
        "rejected: half of what a block rejects is dropped",
        "collectives/gtopk.py",
        "collected.append(dropped.every(block, group.rank % block))",
        "collected.append(dropped.every(2 * block, group.rank % block))",
        "tests/collectives/test_simulated.py -k gtopk",
    ),
    Mutant(
        "order: gathered vectors are not in rank order",
        "collectives/runtime/group.py",
        "return held[own:] + held[:own]",
        "return held[:own] + held[own:]",
        "tests/collectives/test_simulated.py -k exact_sum",
    ),
    Mutant(
        "agreement: ranks do not compare their calls",
        "collectives/calls/collective.py",
        "yield from self.declaration.compare(group)\n",
        "yield from ()\n",
        ARGUMENTS,
    ),
    Mutant(
        "digest: dtypes are not compared",
        "collectives/calls/start.py",
        'compared["dtype"] = DTYPE_NAMES[prepared.like.dtype]',
        'compared["dtype"] = "float32"',
        ARGUMENTS,
    ),
    Mutant(
        "range: the last share ends too early",
        "collectives/planning/partition.py",
        "length * owner // size for owner",
        "length // size * owner for owner",
        "tests/collectives/test_partition.py",
    ),
    Mutant(
        "schedule: a rank sends to the wrong parent",
        "collectives/planning/schedule.py",
        "(distance_from_root & (distance_from_root - 1))",
        "(distance_from_root & (distance_from_root - 2))",
        "tests/collectives/test_schedule.py",
    ),
    Mutant(
        "absent: a rank that answered is named",
        "collectives/faults/state.py",
        "if absent := self._others - self._notices.keys() - self._dead",
        "if absent := self._others - self._dead",
        "tests/collectives/test_fault_states.py",
    ),
    Mutant(
        "cost: a gather sends one message too many",
        "mpicomp_bench/formulas.py",
        "return in_rounds(upper(case.ranks), (case.ranks - 1) * nbytes, merged)",
        "return in_rounds(upper(case.ranks), case.ranks * nbytes, merged)",
        "tests/collectives/test_choice.py -k formulas",
    ),
    Mutant(
        "votes: the counts that differ are not written",
        "collectives/runtime/votes.py",
        "votes[share][differing.indices] = differing.values.reshape(-1)",
        "votes[share][differing.indices] += 0",
        f"{ON_RANKS} tests/mpi/test_votes.py",
    ),
    Mutant(
        "commit: a rank keeps a step that another one could not",
        "collectives/calls/all_or_none.py",
        "                _raise_together(error, comm, operation, here)\n",
        "                error is None or _raise_together(error, comm, operation, here)\n",
        f"{ON_RANKS} tests/mpi/test_faults_of_a_step.py",
    ),
    Mutant(
        "undone: compressors remember a step that failed",
        "collectives/exchange/step.py",
        "        restore(self.snapshots)\n",
        "        restore([])\n",
        f"{ON_RANKS} tests/mpi/test_faults_of_a_step.py",
    ),
    Mutant(
        "sums: only the error of the first bucket counts",
        "collectives/exchange/step.py",
        "for outcome in (error, *outcomes) if",
        "for outcome in (error, *outcomes[:1]) if",
        f"{ON_RANKS} tests/mpi/test_faults_of_a_step.py",
    ),
    Mutant(
        "settle: what a collective rejects is lost",
        "collectives/exchange/step.py",
        "prepare_residual(correction, sent, received.rejected)\n",
        "prepare_residual(correction, sent, None)\n",
        f"{ON_RANKS} tests/mpi/test_conservation.py",
    ),
    Mutant(
        "segments: entries of several tensors compete",
        "mpicomp/compressors/selection.py",
        "vector = run.compressor.select(own, run.bounds)",
        "vector = run.compressor.select(own, [0, run.bounds[-1]])",
        f"{ON_RANKS} tests/mpi/test_named.py",
    ),
    Mutant(
        "halves: ties are rounded up",
        "mpicomp/kernels/host/halves.py",
        "is_odd = (magnitudes >> 13) & 1",
        "is_odd = (magnitudes & 0) | 1",
        "tests/mpicomp/test_halves.py",
    ),
    Mutant(
        "signs: the mean out of a basis keeps its magnitudes",
        "mpicomp/means.py",
        "return replace(self, is_sign=True)",
        "return replace(self, is_sign=False)",
        f"{ON_RANKS} tests/mpi/test_basis.py",
    ),
    Mutant(
        "held: a tensor is taken up as if no step had been left out",
        "collectives/exchange/layout.py",
        "load(own, state_of_it, [slice(tensors[name].size)])",
        "own.reset()",
        f"{ON_RANKS} tests/mpi/test_out_of_step.py",
    ),
    Mutant(
        "compress: a vector of the caller's is not looked at again",
        "mpicomp/compressors/base.py",
        "self.select(correction, [0, dense.size]).forget()",
        "self.select(correction, [0, dense.size])",
        "tests/mpicomp/test_every_compressor.py",
    ),
    Mutant(
        "restart: anchors change before all parameters are checked",
        "collectives/local_steps/outer.py",
        "        self._find_parameters()\n        for replica in self._replicas:\n"
        "            replica.take_anchor()\n",
        "        for replica in self._replicas:\n"
        "            replica.find_parameters(self._named_parameters())\n"
        "            replica.take_anchor()\n",
        f"{ON_RANKS} tests/mpi/test_outer.py",
    ),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="first words of mutants (all)"
    )
    names = parser.parse_args().names
    chosen = [
        mutant
        for mutant in MUTANTS
        if not names or mutant.name.partition(":")[0] in names
    ]
    passes, sound = {}, bool(chosen)
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder, "tree")
        shutil.copytree(
            ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "build", "dist")
        )
        for mutant in chosen:
            if mutant.command not in passes:
                passes[mutant.command] = tested(tree, mutant.command)[0]
            verdict, seconds = judged(tree, mutant, passes[mutant.command])
            sound &= verdict == "caught"
            print(
                f"{mutant.name:58} {verdict:26} {seconds:6.1f} s  {mutant.command}",
                flush=True,
            )
    return 0 if sound else 1


def judged(tree, mutant, passes):
    """Return what becomes of a mutant, and after how many seconds."""
    file = tree / mutant.file
    text = file.read_text()
    if text.count(mutant.old) != 1:
        return "NOT FOUND in the code", 0.0
    if not passes:
        return "TESTS FAIL WITHOUT IT", 0.0
    before = file.stat()
    file.write_text(text.replace(mutant.old, mutant.new))
    try:
        lives, seconds = tested(tree, mutant.command)
    finally:
        file.write_text(text)
        # by which Numba knows its cache
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    return "NOT CAUGHT" if lives else "caught", seconds


def tested(tree, command):
    """Return whether the tests pass in a tree, and the seconds that they took."""
    words = [*command.split(), "-m", "not slow"]  # as in make test
    if not words[0].endswith(".sh"):
        words = [sys.executable, "-m", "pytest", "-q", "-x", *words]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "MPI_TEST_HANG": "30",
        "MPI_TEST_TIMEOUT": str(LIMIT),
    }
    began = time.monotonic()
    with open(tree / "mutant.log", "w") as log:
        run = subprocess.Popen(
            words,
            cwd=tree,
            env=environment,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = run.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            status = run.wait()
    return status == 0, time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
