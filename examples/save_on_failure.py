"""Save the state of every surviving rank, before a job ends because a rank is lost.

    mpirun -n 3 python -m mpi4py examples/save_on_failure.py

With `--stop RANK` that rank stops responding (SIGSTOP) halfway: after the deadline the
others raise CollectiveTimeoutError, save, and the job ends with an error. The same
command without it continues from what was saved. With `--kill RANK` the rank dies: the
launcher ends the job by SIGTERM, on which the others save, if it leaves them the time.
Open MPI 5 sends SIGKILL a fifth of a second later: save regularly as well
(checkpointed_training.py).

`saving` is all that a program of your own needs. Under `python -m mpi4py` a job ends as
soon as one rank exits with an error, so a rank that has saved waits `grace` seconds, in
which the others save too. All of them raise within about a second, and save the state
after the last completed step of the exchange.

The gradients are drawn from a seed, so the saved state can be compared with an
uninterrupted run: the example checks it when it continues, and exits with status 1 when
a check fails.
"""

import argparse
import os
import pathlib
import signal
import sys
import threading
import time
from contextlib import contextmanager

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores

import numpy as np

LENGTH, STEPS, DEADLINE = 5000, 20, 1.0  # values, steps, seconds


@contextmanager
def saving(save, *, grace=1.0):
    """Call save(error), once, when this rank cannot continue with the others, or on SIGTERM; then raise the error.

    save: a function without communication. grace: seconds to wait afterwards until the
    others have saved; not on SIGTERM, which launchers send to end a job. SIGTERM raises
    SystemExit with status 143, in the main thread, unless the program handles the
    signal itself.
    """
    from collectives import CollectiveTimeoutError, RankFailedError

    here = threading.current_thread() is threading.main_thread()
    listens = here and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if listens:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    except (CollectiveTimeoutError, RankFailedError) as error:
        save(error)
        time.sleep(grace)
        raise
    except SystemExit as error:
        if error.code == 128 + signal.SIGTERM:
            save(error)
        raise
    finally:
        if listens:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Training:
    """The state that a step changes: the parameters, the state of the exchange, and the number of the step."""

    def __init__(self, comm):
        from collectives import GradientExchange
        from mpicomp import TopK

        self.comm, self.parameters, self.step = comm, np.zeros(LENGTH, np.float32), 0
        self.exchange = GradientExchange(comm, TopK(density=0.02))
        # a saved state is loaded by name
        self.exchange.register({"parameters": self.parameters})

    def advance(self):
        """Take one step."""
        rng = np.random.default_rng([self.step, self.comm.rank])
        gradient = self.parameters + rng.standard_normal(LENGTH, np.float32)
        self.parameters -= 0.1 * self.exchange({"parameters": gradient})["parameters"]
        self.step += 1

    def state(self):
        """Return arrays by name, which np.savez can store; RuntimeError in the middle of a step."""
        if self.exchange.steps != self.step:  # SIGTERM may arrive at any time
            raise RuntimeError(
                "ended between the exchange and the update of the parameters: nothing is saved"
            )
        return {
            "array": self.parameters,
            "step": np.array(self.step),
            **self.exchange.state_dict(),
        }

    def load(self, saved):
        """Load what `state` returned on the ranks that were saved; one that was lost starts without a residual."""
        shared = next(iter(saved.values()))
        self.parameters[...] = shared["array"]
        self.step = int(shared["step"])
        from collectives import redistribute_state

        self.exchange.load_state_dict(
            redistribute_state(
                lambda rank: of_exchange(saved.get(rank)),
                self.comm.size,
                self.comm.rank,
                self.comm.size,
            )
        )


def continued(training, saved, check):
    """Check the saved states, and load them; a rank that was lost starts with the parameters of another one."""
    comm, mine = training.comm, saved.get(training.comm.rank)
    steps = {int(state["step"]) for state in saved.values()}
    check("all saved the same step", len(steps) == 1)
    whole = Training(comm)  # affordable here only
    while whole.step < max(steps):
        whole.advance()
    same = mine is None or all(
        np.array_equal(array, mine[name]) for name, array in whole.state().items()
    )
    check(
        f"ranks {sorted(saved)} saved what a run without a break has after step {max(steps)}",
        same,
    )
    training.load(saved)


def of_exchange(state):
    """Return the part of a saved state that is the exchange's; None without a state."""
    if state is None:
        return None
    return {
        name: array for name, array in state.items() if name not in ("array", "step")
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder",
        type=pathlib.Path,
        default="saved",
        help="of the states (default %(default)s)",
    )
    parser.add_argument(
        "--stop", type=int, metavar="RANK", help="this rank stops responding halfway"
    )
    parser.add_argument(
        "--kill", type=int, metavar="RANK", help="this rank dies halfway"
    )
    options = parser.parse_args()
    from mpi4py import MPI

    from collectives import configure

    comm, failed = MPI.COMM_WORLD, []

    def check(claim, holds):
        holds = comm.allreduce(bool(holds), MPI.LAND)
        failed.extend([] if holds else [claim])
        if comm.rank == 0:
            print(f"check: {claim}: {'ok' if holds else 'FAILED'}", flush=True)

    def save(error):
        options.folder.mkdir(parents=True, exist_ok=True)
        written = options.folder / f"writing-{comm.rank}.npz"
        np.savez(written, **training.state())
        written.rename(options.folder / f"rank-{comm.rank}.npz")
        print(f"rank {comm.rank} saved step {training.step}: {error}", flush=True)

    first = Training(comm)
    for _ in range(2):  # compiles the kernels: the deadline is shorter
        first.advance()
    training, files = Training(comm), sorted(options.folder.glob("rank-*.npz"))
    comm.Barrier()  # before any rank saves again
    if files:
        continued(
            training, {int(path.stem[5:]): dict(np.load(path)) for path in files}, check
        )
    configure(timeout=DEADLINE)
    with saving(save):
        while training.step < STEPS:
            if training.step == STEPS // 2 and comm.rank in (
                options.stop,
                options.kill,
            ):
                os.kill(
                    os.getpid(),
                    signal.SIGSTOP if comm.rank == options.stop else signal.SIGKILL,
                )
            training.advance()
    check(
        f"all ranks have the same parameters after step {STEPS}",
        same_everywhere(training),
    )
    return 1 if failed else 0


def same_everywhere(training):
    return len(set(training.comm.allgather(training.parameters.tobytes()))) == 1


if __name__ == "__main__":
    sys.exit(main())
