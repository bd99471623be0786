"""Run a script that was written for torchrun on the ranks of MPI.

    mpirun -n 4 python -m collectives.torch train.py --epochs 3
    srun python -m collectives.torch -m package.train --epochs 3

Sets the environment variables that torchrun sets (`collectives.launcher.torchrun_variables`), and runs the script as
`python -m mpi4py` does: an exception on one rank ends the job. It initialises MPI and imports nothing else; the script
calls `torch.distributed.init_process_group` as under torchrun. A process group that is left when the script ends is
destroyed, before the interpreter and MPI end. MASTER_ADDR and MASTER_PORT are those of the environment
of rank 0, if they are set there: give MASTER_ADDR where the nodes know each other by another network than that of rank
0's host name.
"""

import atexit
import os
import socket
import sys
import threading

from mpi4py import run

from collectives.launcher import singleton_warning, torchrun_variables


def main() -> None:
    """Set the variables, and run the script of the command line."""
    try:
        reserved = socket.socket()
        set_variables(reserved)
    except BaseException:
        run.set_abort_status(1)  # the other ranks may wait for this one
        raise
    with reserved:
        try:
            run.main()
        except SystemExit as ended:
            if ended.code:
                raise
    _end()


def _end() -> None:
    """End the process after a script that ended without an error; with torch without the end of the interpreter.

    A DistributedDataParallel model keeps gloo's threads alive, also after `destroy_process_group`. One that asks for
    Python's lock while the interpreter ends is ended inside C++, which aborts the process.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return
    from mpi4py import MPI

    if distributed.is_initialized():
        distributed.destroy_process_group()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does first
    atexit._run_exitfuncs()
    if not MPI.Is_finalized():
        MPI.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def set_variables(reserved: socket.socket) -> None:
    """Set the environment variables of this rank; all ranks call it.

    reserved: on rank 0 it is bound to the port, so that no other program is given it before torch listens there. Linux
    allows the second bind if both sockets have SO_REUSEADDR, as torch's has, and none of them listens.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if warning := singleton_warning(world.size, _without_torchrun(world.size)):
        sys.exit(warning)
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    first_on_node = world.allgather(node.bcast(world.rank))
    node.Free()
    where = None
    if world.rank == 0:
        alone = len(set(first_on_node)) == 1
        address = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if alone else MPI.Get_processor_name())
        where = address, int(os.environ.get("MASTER_PORT") or _free_port(reserved))
    os.environ.update(torchrun_variables(world.rank, first_on_node, *world.bcast(where)))


def _without_torchrun(size: int) -> dict[str, str]:
    """Return the environment; without WORLD_SIZE where MPI connects ranks, as it is then of an earlier job."""
    return {name: value for name, value in os.environ.items() if name != "WORLD_SIZE" or size == 1}


def _free_port(reserved: socket.socket) -> int:
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    port: int = reserved.getsockname()[1]
    return port


if __name__ == "__main__":
    main()
