"""A model whose gradients are its inputs, and what is said of a training with it."""

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

from collectives import sparse_allreduce

SIZES = {"a": 3000, "bias": 7, "b": 5000, "branch": 4000}


def blocking(vector, comm):
    """Return the sum over the ranks, as a collective that is no nonblocking one of the library's."""
    return sparse_allreduce(vector, comm)


class Weighted(nn.Module):
    """Sum of the parameters times the inputs."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        for name, size in SIZES.items():
            self.register_parameter(name, nn.Parameter(torch.ones(size, dtype=dtype)))

    def forward(self, inputs):
        """Return the sum over the names that are in the inputs."""
        return sum(
            (getattr(self, name) * values.to(self.a.dtype)).sum()
            for name, values in inputs.items()
        )


def inputs_of(step, rank, names=tuple(SIZES)):
    """Return integers, those of a step and a rank: the gradients."""
    random = np.random.default_rng([step, rank])
    everything = {name: random.integers(-8, 9, size) for name, size in SIZES.items()}
    return {name: torch.tensor(everything[name], dtype=torch.float32) for name in names}


def gradients(model):
    """Return copies of the gradients by name, zeros where there is none."""
    return {
        name: np.zeros(SIZES[name], np.float32)
        if each.grad is None
        else each.grad.detach().float().numpy().copy()
        for name, each in model.named_parameters()
    }


def residuals(handle, comm):
    """Return the sum over the ranks of the residuals, by name."""
    state, found = handle.state_dict(), {}
    for name, size in SIZES.items():
        mine = state.get(f"{name}/feedback/residual", torch.zeros(size)).numpy()
        found[name] = comm.allreduce(mine, MPI.SUM)
    return found


def have_same_bits(model, comm):
    """Return whether all ranks have the same parameters."""
    flat = (
        torch.cat([each.detach().reshape(-1).float() for each in model.parameters()])
        .numpy()
        .tobytes()
    )
    return len(set(comm.allgather(flat))) == 1
