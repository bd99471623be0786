"""PyTorch: `make test-torch` installs it and runs these tests, those marked `mpi` on 2 and on 4 ranks.

Gradients are integers, so that sums and means over 2 and 4 ranks are exact.
"""

import pytest


@pytest.fixture(scope="session")
def world():
    """Return MPI.COMM_WORLD, with a process group of torch over its ranks."""
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    from collectives.torch import init_process_group

    torch.set_num_threads(1)
    init_process_group(MPI.COMM_WORLD)
    yield MPI.COMM_WORLD
    dist.destroy_process_group()
