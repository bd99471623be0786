"""Train, save and stop on a signal, and resume bitwise: for batch jobs that end at their time limit.

    mpirun -n 4 python -m mpi4py examples/checkpointed_training.py

On SIGUSR1 or SIGTERM at any rank, or after `--stop-after STEP`, the ranks finish the
step, save, and exit with status 75; the same command then resumes.
slurm/checkpointed_training.sbatch automates both: Slurm sends the signal before the
time limit, and the script requeues a job that ends with 75.

Each rank saves its own file: the parameters, the state of its exchange (residuals and
momentum: without them the gradients that have not been sent yet would be lost), and the
step. When all files of a set are on disk, one rename makes the set visible; incomplete
sets are never loaded. The folder has to be on a file system that all nodes see.

With another `-n` the run continues too, though no longer with the same bits: residuals
and momentum of the ranks that saved are redistributed over the new ranks.

The network is plain NumPy and learns the outputs of a fixed random one at random
points, so there are no data to load. It checks itself at the end, against an
uninterrupted run, and exits with status 1 when a check fails.
"""

import argparse
import hashlib
import os
import pathlib
import shutil
import signal
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from mpi4py import MPI

from collectives import GradientExchange, gtopk_allreduce, redistribute_state
from mpicomp import MomentumCorrection, TopK

INPUTS, HIDDEN, CLASSES, BATCH, RATE = 32, 128, 10, 32, 0.1
TO_BE_CONTINUED = os.EX_TEMPFAIL  # 75
KEPT = 2  # sets on disk


class Training:
    """The state to save, which a step changes: the parameters, the state of the exchange, the number of the step."""

    def __init__(self, comm, seed):
        rng = np.random.default_rng(seed)
        self.comm, self.seed, self.step = comm, seed, 0
        self.sizes = [comm.size]  # numbers of ranks that the run has had
        self.teacher = rng.standard_normal((INPUTS, CLASSES))
        self.parameters = {
            "hidden": rng.normal(0, np.sqrt(2 / INPUTS), (INPUTS, HIDDEN)).astype(
                np.float32
            ),
            "output": rng.normal(0, np.sqrt(2 / HIDDEN), (HIDDEN, CLASSES)).astype(
                np.float32
            ),
        }
        self.exchange = GradientExchange(
            comm, TopK(density=0.05), MomentumCorrection(0.9), gtopk_allreduce
        )
        # a saved state is loaded by name, so the names come first
        self.exchange.register(self.parameters)

    def advance(self):
        """Take one step of SGD."""
        # Points are drawn from the step's number. A generator that runs on would be one
        # thing more to save.
        gradients = self.gradients(
            *self.points(
                np.random.default_rng([self.seed, self.step, self.comm.rank]), BATCH
            )
        )
        for name, mean in self.exchange(gradients).items():
            self.parameters[name] -= RATE * mean
        self.step += 1

    def gradients(self, points, labels):
        """Return the gradient of the mean cross entropy, by the names of the parameters."""
        hidden, logits = self.forward(points)
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        delta = powers / powers.sum(axis=1, keepdims=True)
        delta[np.arange(labels.size), labels] -= 1
        delta /= labels.size
        entering = (delta @ self.parameters["output"].T) * (hidden > 0)
        return {"hidden": points.T @ entering, "output": hidden.T @ delta}

    def forward(self, points):
        """Return the input of the last layer, and the logits."""
        hidden = np.maximum(points @ self.parameters["hidden"], 0)
        return hidden, hidden @ self.parameters["output"]

    def points(self, rng, count):
        """Return points, and their classes."""
        points = rng.standard_normal((count, INPUTS), np.float32)
        return points, (points @ self.teacher).argmax(axis=1)

    def accuracy(self):
        """Return the fraction of new points that are classified correctly."""
        points, labels = self.points(np.random.default_rng([self.seed, 2**32]), 2000)
        return float(np.mean(self.forward(points)[1].argmax(axis=1) == labels))

    def digest(self):
        """Return a short digest of the parameters' bits."""
        return hashlib.sha256(
            b"".join(array.tobytes() for array in self.parameters.values())
        ).hexdigest()[:16]

    def state_dict(self):
        """Return arrays by name, which np.savez can store."""
        own = {f"parameters/{name}": array for name, array in self.parameters.items()}
        remembered = {
            f"exchange/{name}": array
            for name, array in self.exchange.state_dict().items()
        }
        numbers = {
            name: np.array(getattr(self, name)) for name in ("step", "seed", "sizes")
        }
        return {**own, **remembered, **numbers}

    def load_states(self, ranks, load):
        """Load the states that `state_dict` returned on each of `ranks` ranks: load(rank)."""
        # but for the exchange's part they are all the same
        state = load(self.comm.rank % ranks)
        if state["seed"] != self.seed:
            raise ValueError(
                f"what is saved was trained with --seed {state['seed']}: expected {self.seed}"
            )
        for name, array in self.parameters.items():
            array[...] = state[f"parameters/{name}"]
        # RATE stays as it is on more or fewer ranks, so the mean over them must not
        # change. If it were proportional to their number, as it often is,
        # conserve="sum" would be right.
        self.exchange.load_state_dict(
            redistribute_state(
                lambda rank: exchange_part(load(rank)),
                ranks,
                self.comm.rank,
                self.comm.size,
                conserve="mean",
            )
        )
        self.step, self.sizes = int(state["step"]), state["sizes"].tolist()
        if self.sizes[-1] != self.comm.size:
            self.sizes.append(self.comm.size)


def exchange_part(state):
    """Return the exchange's part of a state."""
    prefix = "exchange/"
    return {
        name.removeprefix(prefix): state[name]
        for name in state
        if name.startswith(prefix)
    }


def save(training, folder, comm):
    """Save the state of all ranks as one set, or as none."""
    partial, complete = folder / "partial", folder / f"step-{training.step:08d}"
    if comm.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)  # of a job that died
        partial.mkdir(parents=True)
    comm.Barrier()
    with open(partial / own_file(comm), "xb") as file:
        np.savez(file, **training.state_dict())
        file.flush()
        os.fsync(file.fileno())
    # a rank that cannot write raises before it, which ends the job (`-m mpi4py`): no
    # rename then
    comm.Barrier()
    if comm.rank == 0:
        found = len(list(partial.iterdir()))
        if found != comm.size:
            raise OSError(
                f"{folder} has {found} files of {comm.size} ranks: it must be one folder for all nodes"
            )
        partial.rename(complete)
        for old in sets(folder)[:-KEPT]:
            shutil.rmtree(old)
    comm.Barrier()


def take_up(training, folder, comm):
    """Load the newest set, if there is one, and return its path."""
    newest = comm.bcast(next(reversed(sets(folder)), None) if comm.rank == 0 else None)
    if newest is None:
        return None
    ranks = len(list(newest.glob("rank-*.npz")))
    if not ranks:
        raise ValueError(
            f"{newest} has no files on rank {comm.rank}: it must be one folder for all nodes"
        )

    def load(rank):
        with np.load(newest / f"rank-{rank}-of-{ranks}.npz") as state:
            return dict(state)

    training.load_states(ranks, load)
    if ranks != comm.size:
        # affordable here only
        check_residuals(training, [load(rank) for rank in range(ranks)])
    return newest


def check_residuals(training, saved):
    """Raise AssertionError unless the mean of the residuals over the ranks is that of the saved ones."""

    def residual(state):
        return np.concatenate(
            [
                np.float64(state[name])
                for name in sorted(state)
                if name.endswith("/residual")
            ]
        )

    expected = sum(residual(exchange_part(state)) for state in saved) / len(saved)
    mean = (
        training.comm.allreduce(residual(training.exchange.state_dict()))
        / training.comm.size
    )
    assert np.allclose(mean, expected, rtol=1e-4, atol=1e-7), "residuals were lost"


def sets(folder):
    """Return the sets that are complete, the newest last."""
    return sorted(folder.glob("step-*"))


def own_file(comm):
    return f"rank-{comm.rank}-of-{comm.size}.npz"


class StopSignal:
    """Remembers a signal until the end of the step, when the ranks agree on whether any of them received one."""

    def __init__(self):
        self.heard = False
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._hear)

    def _hear(self, number, frame):
        self.heard = True


def train(training, stop, options, say):
    """Train to the last step, and return True; or, if the training is to stop before it, save and return False."""
    comm = training.comm
    while training.step < options.steps:
        training.advance()
        time.sleep(options.pause)
        stopping = (
            comm.allreduce(stop.heard, MPI.LOR) or training.step == options.stop_after
        )
        last = training.step == options.steps
        if stopping or last or training.step % options.every == 0:
            save(training, options.folder, comm)
        if stopping and not last:
            say(f"step {training.step}: saved, to be continued")
            return False
    return True


def checks(training, comm):
    """Yield the checks of the end, as (text, whether it holds)."""
    yield (
        "all ranks hold the same parameter bits",
        len(set(comm.allgather(training.digest()))) == 1,
    )
    if len(training.sizes) > 1:
        return  # no run without a break has had these numbers of ranks
    whole = Training(comm, training.seed)  # affordable here only
    while whole.step < training.step:
        whole.advance()
    yield (
        "the same bits as of a run without a break",
        comm.allreduce(whole.digest() == training.digest(), MPI.LAND),
    )


def main():
    options, stop, comm = parse_arguments(), StopSignal(), MPI.COMM_WORLD
    say = print if comm.rank == 0 else lambda *_, **__: None
    training = Training(comm, options.seed)
    source = take_up(training, options.folder, comm)
    say(
        f"step {training.step}: "
        + (f"taken up from {source}" if source else "a new run"),
        flush=True,
    )
    if len(training.sizes) > 1:
        say(f"numbers of ranks so far: {training.sizes}", flush=True)
    if training.step > options.steps:
        say(
            f"that is beyond --steps {options.steps}: expected as many, or another --folder",
            flush=True,
        )
        MPI.Finalize()
        return 2
    if not train(training, stop, options, say):
        # else `-m mpi4py` takes a status that is not 0 for an error, and aborts
        MPI.Finalize()
        return TO_BE_CONTINUED
    say(
        f"step {training.step}: accuracy {training.accuracy():.1%}, parameters {training.digest()}"
    )
    results = list(checks(training, comm))
    for words, holds in results:
        say(f"check: {words}: {'ok' if holds else 'FAILED'}")
    return 0 if all(holds for _, holds in results) else 1


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps",
        type=int,
        default=300,
        help="steps of SGD in all (default %(default)s)",
    )
    parser.add_argument(
        "--every",
        type=int,
        default=100,
        help="save each so many steps, too (default %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the network and the points (default %(default)s)",
    )
    parser.add_argument(
        "--folder",
        type=pathlib.Path,
        default="checkpoints",
        help="of the sets (default %(default)s)",
    )
    parser.add_argument(
        "--stop-after",
        type=int,
        metavar="STEP",
        help="stop there as if a signal had come",
    )
    parser.add_argument(
        "--pause",
        type=float,
        default=0,
        help="seconds to wait in a step, for time to stop it",
    )
    options = parser.parse_args()
    if min(options.steps, options.every) < 1:
        parser.error(
            f"got --steps {options.steps} and --every {options.every}: expected at least 1 of each"
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
