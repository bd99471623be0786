"""Connect torch.distributed to the ranks of MPI."""

import os
from typing import Any

import torch.distributed as dist

from collectives.calls.all_or_none import gather_results
from collectives.runtime.launcher import master_address, torchrun_warning


def init_process_group(comm: Any, backend: str = "gloo") -> None:
    """Initialise torch.distributed with the ranks of an MPI communicator; all of them call it.

    Rank 0 listens on a free port, and sends the port and its address to all: its MASTER_ADDR,
    else 127.0.0.1 on one node, else its host's name.

    Args:
        comm: an mpi4py intracommunicator.
        backend: for torch's own messages; with `attach` only the small ones of DDP.

    Raises:
        RuntimeError: started by torchrun, whose processes MPI does not connect, or there is a
            process group already. Torch's error is raised if rank 0 cannot listen.
        CollectiveError: rank 0 failed.

    >>> init_process_group(MPI.COMM_WORLD)
    """
    from mpi4py import MPI

    check_launcher()
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    is_one_node = node.size == comm.size
    node.Free()
    server: dist.TCPStore | None = None

    def listen() -> tuple[str, int] | None:
        nonlocal server
        if dist.is_initialized():
            raise RuntimeError(
                "torch.distributed has a process group already: expected init_process_group(comm) in place of torch's, "
                "once, or after torch.distributed.destroy_process_group()"
            )
        if comm.rank > 0:
            return None
        host = master_address(
            os.environ, MPI.Get_processor_name(), is_one_node=is_one_node
        )
        server = dist.TCPStore(
            host, 0, comm.size, is_master=True, wait_for_workers=False
        )
        return host, server.port

    host, port = gather_results(listen, comm, "init_process_group")[0]
    store = server or dist.TCPStore(host, port, comm.size, is_master=False)
    dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size)


def check_launcher() -> int:
    """Return the number of ranks of MPI.

    Raises RuntimeError under torchrun, whose processes MPI does not connect, and where
    torch has one process only.
    """
    from mpi4py import MPI

    ranks: int = MPI.COMM_WORLD.size
    if warning := torchrun_warning(ranks, os.environ):
        raise RuntimeError(warning)
    if dist.is_initialized() and dist.get_world_size() == 1 < ranks:
        raise RuntimeError(
            f"torch.distributed has 1 process, and MPI {ranks}: each would train alone; start with mpirun -n {ranks} "
            "python -m collectives.torch train.py, or call collectives.torch.init_process_group(comm)"
        )
    return ranks
