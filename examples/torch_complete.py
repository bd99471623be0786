"""A whole training in PyTorch: DDP, mixed precision, accumulation, clipping, a schedule, EMA, checkpoints, a resume.

    mpirun -n 2 --bind-to none python -m collectives.torch examples/torch_complete.py

Started again it resumes from the newest checkpoint that all ranks have. The lines of
this library end in `# mpicomp`. The data are made up: replace `new_model` and `batch`.
Needs torch. It checks itself at the end and exits with status 1 when a check fails.
"""

import argparse
import math
import os
import pathlib
import sys

try:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
except ImportError as error:
    sys.exit(f"{error}; in the checkout: pip install '.[torch,examples]'")
from checks import verdict
from mpi4py import MPI

from collectives import GradientExchange  # mpicomp
from collectives.torch import attach  # mpicomp

WARM_UP = 5  # steps
ACCUMULATED = 2  # batches of a step
AUTOCAST = {"device_type": "cpu", "dtype": torch.float16}  # on a GPU "cuda"


def new_model():
    """Return the model, with the same parameters on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def batch(generator):
    """Return inputs and labels; each rank draws its own from its generator."""
    images = torch.randn(32, 64, generator=generator)
    return images, images[:, :10].argmax(dim=1)


def rate(step, steps):
    """Return the factor of the learning rate: a warm-up, then half of a cosine."""
    return min((step + 1) / WARM_UP, (1 + math.cos(math.pi * step / steps)) / 2)


class Training:
    """Model, optimiser, and all else that a checkpoint has."""

    def __init__(self, comm, steps):
        self.comm = comm
        self.steps = steps
        self.step = 0
        self.model = DistributedDataParallel(new_model())
        self.ema = AveragedModel(
            self.model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: rate(step, steps)
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        self.generator = torch.Generator().manual_seed(comm.rank)
        self.exchange = GradientExchange(comm, bits=4, nonfinite="skip")  # mpicomp
        self.handle = attach(self.model, self.exchange, scaler=self.scaler)  # mpicomp
        self.saved = {
            "model": self.model.module,
            "ema": self.ema,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "scaler": self.scaler,
            "exchange": self.handle,  # mpicomp: the residual of this rank
        }

    def loss(self):
        """Return the loss of a batch, over the number of batches of a step."""
        images, labels = batch(self.generator)
        with torch.autocast(**AUTOCAST):
            loss = nn.functional.cross_entropy(self.model(images), labels)
        return loss / ACCUMULATED

    def train_step(self):
        """Take a step, and return the loss of its batches on this rank."""
        with self.model.no_sync():
            losses = [self.loss() for _ in range(ACCUMULATED - 1)]
            for loss in losses:
                self.scaler.scale(loss).backward()
        losses.append(self.loss())
        self.scaler.scale(losses[-1]).backward()  # `.grad` has the means
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.ema.update_parameters(self.model.module)
        self.step += 1
        return sum(loss.item() for loss in losses)

    def run(self, folder, every):
        """Train to the last step, save every `every` steps, and return the losses."""
        losses = []
        while self.step < self.steps:
            losses.append(self.train_step())
            if self.step % every == 0:
                self.save(folder)
        return losses

    def save(self, folder):
        """Write the checkpoint of this rank; one that is cut short has another name."""
        state = {name: part.state_dict() for name, part in self.saved.items()}
        state["generator"] = self.generator.get_state()
        path = folder / f"{self.step}-{self.comm.rank}.pt"
        torch.save(state, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)

    def load(self, folder, step):
        """Load the checkpoint of this rank after a step."""
        state = torch.load(folder / f"{step}-{self.comm.rank}.pt")
        for name, part in self.saved.items():
            part.load_state_dict(state[name])
        self.generator.set_state(state["generator"])
        self.step = step

    def bits(self):
        """Return the parameters and their averages, as bytes."""
        both = [*self.model.parameters(), *self.ema.parameters()]
        return b"".join(each.detach().numpy().tobytes() for each in both)


def newest(folder, comm):
    """Return the last step of which all ranks have a checkpoint; 0 if there is none."""
    files = folder.glob(f"*-{comm.rank}.pt")
    steps = {int(path.name.partition("-")[0]) for path in files}
    return max(set.intersection(*comm.allgather(steps)), default=0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="(%(default)s)")
    parser.add_argument("--every", type=int, default=20, help="between checkpoints")
    parser.add_argument("--folder", type=pathlib.Path, default="checkpoints")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    folder = options.folder
    folder.mkdir(exist_ok=True)
    dist.init_process_group("gloo")

    training = Training(comm, options.steps)
    first = newest(folder, comm)
    if first:
        training.load(folder, first)
    losses = training.run(folder, options.every)
    again = Training(comm, options.steps)
    if begun := newest(folder, comm) - options.every:
        again.load(folder, begun)
    again.run(folder, options.every)

    if comm.rank == 0 and losses:
        print(
            f"steps {first} to {training.step}, loss {losses[0]:.2f} to {losses[-1]:.2f}"
        )
        print(training.exchange.report())
    elif comm.rank == 0:
        print(f"all {first} steps were taken before: to train again, remove {folder}")
    checks = {
        "the same bits on all ranks": len(set(comm.allgather(training.bits()))) == 1,
        "a resumed run ends with the same bits": again.bits() == training.bits(),
        "the loss falls": first or losses[-1] < losses[0] - 0.5,
    }
    return verdict(checks, comm)


if __name__ == "__main__":
    sys.exit(main())
