"""Run a script that was written for torchrun on the ranks of MPI.

    mpirun -n 4 python -m collectives.torch train.py --epochs 3
    srun python -m collectives.torch -m package.train --epochs 3

Sets the environment variables that torchrun sets
(`collectives.runtime.launcher.torchrun_variables`), and runs the script as `python -m mpi4py`
does: an exception on one rank ends the job. It initialises MPI and does not import
torch; the script calls `torch.distributed.init_process_group` as under torchrun. A
process group that is left when the script ends is destroyed, before the interpreter and
MPI end. MASTER_ADDR and MASTER_PORT are those of the environment of rank 0, if they are
set there: give MASTER_ADDR where the nodes know each other by another network than that
of rank 0's host name.

Unless it is set, MPICOMP_TIMEOUT is 600 seconds, and with several ranks on a node
OMP_NUM_THREADS is 1, as under torchrun. A rank on which the script has ended waits for
the others: after 10 seconds it says which have not, and ends the job when
MPICOMP_TIMEOUT has passed.
"""

import atexit
import math
import os
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import run

from collectives.faults import ulfm
from collectives.faults.state import named_ranks
from collectives.runtime.launcher import (
    master_address,
    singleton_warning,
    torchrun_variables,
)
from collectives.runtime.messages import mpi
from collectives.runtime.waiting import TIMEOUT, initial_timeout

if TYPE_CHECKING:
    from mpi4py import MPI

# Options that a command line may begin with in place of a file.
_SCRIPTS = ("-m", "-c", "-", "-rc")
# Seconds after which a rank whose script has ended reports the ranks that it waits for.
_PATIENCE = 10.0


def main() -> None:
    """Set the variables, and run the script of the command line."""
    first = (sys.argv[1:] or [""])[0]
    if not first or (first[0] == "-" and first not in _SCRIPTS):
        print(__doc__)
        if first in ("-h", "--help"):
            sys.exit(0)
        sys.exit(f"expected a script, -m MODULE or -c CODE, not {first!r}")
    try:
        reserved = socket.socket()
        set_variables(reserved)
        ended = mpi().COMM_WORLD.Dup()
    except BaseException:
        # The other ranks may wait for this one, so the job has to end.
        run.set_abort_status(1)
        raise
    with reserved:
        try:
            run.main()
        except SystemExit as left:
            if left.code:
                raise
    _end(ended)


def _end(ended: "MPI.Intracomm") -> None:
    """End the process after a script that ended without an error; with torch without the end of the interpreter.

    A DistributedDataParallel model keeps gloo's threads alive, also after
    `destroy_process_group`. One that asks for Python's lock while the interpreter ends
    is ended inside C++, which aborts the process.
    """
    distributed = sys.modules.get("torch.distributed")
    if (
        distributed is not None
        and distributed.is_available()
        and distributed.is_initialized()
    ):
        distributed.destroy_process_group()
    # Both functions are private to CPython: they wait for threads, and call what is
    # registered for the end, before the interpreter is destroyed.
    # tests/pytorch/test_scripts.py has scripts that end with a thread and with a
    # function for the end.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if not mpi().Is_finalized():
        try:
            _wait_for_others(ended)
        except mpi().Exception as error:
            if not ulfm.is_failure(error):  # survivors wait for nobody
                raise
        mpi().Finalize()
    if distributed is not None:
        os._exit(0)


def _wait_for_others(ended: "MPI.Intracomm") -> None:
    """Return when the script has ended on all ranks; first say on which it has not, and then end the job.

    Each rank tells all others; one that waits for a message of them cannot.
    """
    timeout = initial_timeout()
    patience = min(_PATIENCE, (timeout or math.inf) / 2)
    began = time.monotonic()
    nothing = np.empty(0, np.uint8)
    others = {*range(ended.size)} - {ended.rank}
    sent = [ended.Isend(nothing, rank) for rank in others]
    due = {rank: ended.Irecv(nothing, rank) for rank in others}
    spoke = False
    while due := {rank: request for rank, request in due.items() if not request.Test()}:
        time.sleep(1e-3)
        waited = time.monotonic() - began
        if waited > patience and not spoke:
            spoke = True
            arrived = {*range(ended.size)} - due.keys()
            then = "the job waits for ever"
            if timeout:
                then = (
                    f"the job ends when rank {min(arrived)} has waited {timeout:.3g} s"
                )
            if min(arrived) == ended.rank:
                print(
                    f"collectives.torch: the script ended {waited:.3g} s ago on {named_ranks(arrived)}, and has not on "
                    f"{named_ranks(due)}, which may wait for a message of the others (fewer batches? DDP has join(); "
                    f"take as many steps of outer_loop and of exchanges on all ranks); {then} ({TIMEOUT})",
                    file=sys.stderr,
                    flush=True,
                )
        if timeout is not None and waited > timeout:
            ended.Abort(1)
    mpi().Request.Waitall(sent)


def set_variables(reserved: socket.socket) -> None:
    """Set the environment variables of this rank; all ranks call it.

    reserved: on rank 0 it is bound to the port, so that no other program is given it
    before torch listens there. Linux allows the second bind if both sockets have
    SO_REUSEADDR, as torch's has, and none of them listens.
    """
    world = mpi().COMM_WORLD
    environment = dict(os.environ)
    # With several ranks the variable can only be that of an earlier job.
    if world.size > 1:
        environment.pop("WORLD_SIZE", None)
    if warning := singleton_warning(world.size, environment):
        sys.exit(warning)
    node = world.Split_type(mpi().COMM_TYPE_SHARED)
    several = node.size > 1
    first_on_node = world.allgather(node.bcast(world.rank))
    node.Free()
    where = None
    if world.rank == 0:
        alone = len(set(first_on_node)) == 1
        address = master_address(
            os.environ, mpi().Get_processor_name(), is_one_node=alone
        )
        port = os.environ.get("MASTER_PORT")
        if not port:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("", 0))
            port = reserved.getsockname()[1]
        where = address, int(port), os.environ.get(TIMEOUT, "600")
    address, port, timeout = world.bcast(where)
    os.environ.setdefault(TIMEOUT, timeout)
    if several:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(torchrun_variables(world.rank, first_on_node, address, port))
