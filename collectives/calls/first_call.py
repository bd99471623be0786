"""The first call on a communicator, which makes its link: collective, as all ranks duplicate it and agree on settings.

Notices of a deadline in this call are the only messages that the library sends on the
caller's own communicator, with the highest tag: MPI does not tell which ranks a
barrier waits for.
"""

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.calls import checking
from collectives.faults import ulfm
from collectives.faults.interrupts import defer_interrupt
from collectives.faults.state import Faults, differing
from collectives.planning import links
from collectives.runtime import cuda_aware, progress, waiting
from collectives.runtime.engine import end_with_mpi, of_process
from collectives.runtime.launcher import lone_warning, torchrun_warning
from collectives.runtime.link import (
    BARRIER,
    LINK,
    Link,
    attached,
    faults_of,
    key_of,
    link_if_any,
)
from collectives.runtime.messages import Sending
from mpicomp import threads
from mpicomp.settings import to_choice

if TYPE_CHECKING:
    from mpi4py import MPI

# Variables that must be the same on all ranks, with the values that unset ones have.
SETTINGS = {
    checking.VARIABLE: "0",
    cuda_aware.VARIABLE: "0",
    links.VARIABLE: "",
    waiting.TIMEOUT: "",
    waiting.VARIABLE: "auto",
}


def link_of(comm: Any, operation: str = "an operation") -> Link:
    """Return the link of a communicator; the first call makes it, and is collective.

    operation: of the caller, for the text of errors. Raises the errors of
    `check_communicator`; ValueError on all ranks for a bad environment variable on one;
    RuntimeError under torchrun, whose processes MPI does not connect, and on a network
    without matched probes; CollectiveTimeoutError if a rank is absent at the timeout,
    as do all later calls then.
    """
    return link_if_any(comm) or _make_link(comm, operation)


@defer_interrupt
def _make_link(comm: Any, operation: str) -> Link:
    from mpi4py import MPI

    if wrong := torchrun_warning(MPI.COMM_WORLD.size, os.environ):
        raise RuntimeError(wrong)
    if wrong := lone_warning(MPI.COMM_WORLD.size, os.environ):
        ulfm.warn_once(wrong)
    engine = of_process()
    engine.check_thread()
    end_with_mpi()
    faults = faults_of(comm)
    # First calls on two communicators in different orders deadlock, so the error names
    # the remedy.
    order = (
        "which blocks: make first calls on communicators in the same order on all ranks"
    )
    waits = f"{operation}, the first call on the communicator ({order}),", 0, set[int]()
    if faults.finished:
        raise engine.error_of(faults, waits)
    duplicate = comm  # until there is one
    try:
        with engine:
            # A duplication that not all ranks begin would block later ones on other
            # communicators. After an interrupt the next call waits for the same
            # barrier, as other ranks are in it.
            request = attached(comm, BARRIER, comm.Ibarrier)
            engine.wait_for_ranks(Sending(request), faults, waits)
            comm.Delete_attr(key_of(BARRIER))
        # All ranks of `comm` are in this function now, so none waits for a reply of
        # this rank elsewhere, and blocking calls are safe.
        duplicate = comm.Dup()
        link = attached(comm, LINK, lambda: _made(duplicate))
        engine.know(link.faults)
        return link
    except MPI.Exception as error:
        if not ulfm.is_failure(error, comm):
            raise
        # Other ranks may wait on `comm` or on its duplicate, which `on_death` revokes.
        ulfm.revoke(comm)
        doing = "the first call on a communicator was interrupted"
        dead = Faults(comm.rank, comm.size, duplicate)
        raise ulfm.on_death(dead, doing) from None


def _made(duplicate: "MPI.Intracomm") -> Link:
    """Return a new link with a duplicate of the communicator; if that fails, the duplicate is freed."""
    _keep_pages()
    if wrong := missing_probes(duplicate):
        duplicate.Free()
        raise RuntimeError(wrong)
    try:
        _compare_settings(duplicate)
        nodes = _first_ranks(duplicate)
        ulfm.warn_of_detector(nodes, duplicate.rank)
        backs_off, sharers, crowding = waiting.agree_on_waiting(duplicate, nodes)
        threads.share(sharers)
        direct = cuda_aware.is_direct(duplicate)
        choice = links.agreed_links(duplicate, nodes, crowding)
    except ValueError:
        # All ranks raise this error, as what they were to agree on is wrong.
        duplicate.Free()
        raise
    return Link(
        duplicate,
        nodes,
        choice,
        backs_off=backs_off,
        direct=direct,
        checked=checking.is_enabled(),
        on_free=of_process().freed,
    )


def missing_probes(comm: "MPI.Intracomm") -> str | None:
    """Return an error with its remedy if MPI has no matched probes on this network, the same on all ranks; else None.

    Collective, blocks; no rank may have sent a message on `comm` yet.
    """
    from mpi4py import MPI

    wrong = None
    try:
        comm.Improbe((comm.rank + 1) % comm.size, 0)
    except MPI.Exception as error:
        if ulfm.is_failure(error):
            raise
        wrong = (
            f"MPI has no matched probes on this network (rank {comm.rank}: {error}): take another transport, with Open "
            "MPI by mpirun --mca pml ob1 (or ucx), with MPICH and Intel MPI by FI_PROVIDER=tcp"
        )
    return next(filter(None, comm.allgather(wrong)), None)


def _first_ranks(comm: "MPI.Intracomm") -> tuple[int, ...]:
    """Return, for each rank, the first rank on its node (that shares its memory)."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    first = node.bcast(comm.rank)
    node.Free()
    return tuple(comm.allgather(first))


def _compare_settings(comm: "MPI.Intracomm") -> None:
    """Raise ValueError on all ranks if their settings in the environment differ, or one is bad. Collective, blocks."""
    mine = {name: os.environ.get(name) or off for name, off in SETTINGS.items()}
    mine[threads.VARIABLE] = ""
    try:
        threads.count()
        progress.check_setting()
    except ValueError as error:
        # Later calls would raise this error on this rank alone.
        mine[threads.VARIABLE] = f"rank {comm.rank}: {error}"
    everywhere = comm.allgather(mine)
    for settings in everywhere:
        if wrong := settings[threads.VARIABLE]:
            raise ValueError(wrong)
    for name, off in SETTINGS.items():
        values = [settings[name] for settings in everywhere]
        shown = ["not set" if value == off else value for value in values]
        if who := differing(enumerate(shown)):
            raise ValueError(
                f"the environment variable {name} must be the same on all ranks, got {who}: export it to all "
                f"(mpirun -x {name}; srun --export=ALL; MPICH: mpiexec -genvlist {name})"
            )
    check = checking.VARIABLE
    to_choice(f"the environment variable {check}", mine[check], ("0", "1"))


def _keep_pages() -> None:
    """Have malloc keep the pages of freed message buffers, up to 64 MiB.

    glibc raises its mmap and trim thresholds by the largest block freed so far
    (mallopt(3)). Touching newly mapped pages took a quarter of the time of an exchange
    of 250,000 entries.
    """
    # The array is never touched, so it takes no memory.
    np.empty((32 << 20) - (1 << 16), np.uint8)
