"""Shared supports of PyTorch's tensors."""

import warnings

import numpy as np
import pytest
from mpi4py import MPI

from collectives import SupportPlan
from mpicomp import SparseVector

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-torch")


def test_torch_takes_values_at_a_plan_without_a_warning():
    """It warns of indices that it cannot write to, once in a process."""
    plan = SupportPlan.union(
        SparseVector([1, 4], np.ones(2, np.float32), 6), MPI.COMM_SELF
    )
    gradient = torch.arange(6.0).reshape(3, 2)
    rows = torch.arange(12.0).reshape(6, 2).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan.take(gradient).tolist() == [1, 4]
        taken = plan.take(rows)
        assert plan.allreduce(plan.take(gradient)).tolist() == [1, 4]
    taken.sum().backward()
    assert rows.grad[:, 0].tolist() == [0, 1, 0, 0, 1, 0]
    assert not plan.indices.flags.writeable
