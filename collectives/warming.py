"""Compile the kernels once on each node, before the ranks need them."""

import sys
from collections.abc import Sequence
from typing import Any

from numpy.typing import DTypeLike

from collectives.collective import link_of
from collectives.runtime.engine import wait_for
from collectives.runtime.messages import Sending

NOTICE = "mpicomp: compiling kernels, once on each node; Numba's cache keeps them"


def warm_up(comm: Any, dtypes: Sequence[DTypeLike] = ("float32",), *, long: bool = False) -> int:
    """Compile the kernels, or load them from Numba's cache: on one rank of each node first, then on the others.

    Without this call all ranks compile kernels at their first use, at the same time. Numba's cache is beside the
    installed package, or in NUMBA_CACHE_DIR: use a local directory of the node if the package is on a network file
    system. Rank 0 reports compilation on stderr, and its progress if that is a terminal.

    comm: an mpi4py intracommunicator; all of its ranks call. dtypes: of the values. long: also for vectors longer than
    2^31 - 1. Returns the number of kernels compiled on this rank: 0 with a warm cache.
    """
    link = link_of(comm, "warm_up")
    first = link.nodes[link.rank] == link.rank
    compiled = _run(dtypes, long, say=link.rank == 0) if first else 0
    wait_for(Sending(link.comm.Ibarrier()), "called warm_up")
    return compiled if first else _run(dtypes, long, say=False)


def _run(dtypes: Sequence[DTypeLike], long: bool, *, say: bool) -> int:
    from mpicomp.kernels.host import warming  # here, so that Numba is loaded by those who compute

    compiled, shown, terminal = 0, False, sys.stderr.isatty()
    for dtype in dtypes:
        for index_dtype in ("int32", "int64") if long else ("int32",):
            step = None
            for step in warming.warm_up(dtype, index_dtype):
                if say and step.compiled and (terminal or not shown):
                    far = f"\r{NOTICE} ({dtype} {step.done}/{step.total})"
                    sys.stderr.write(far if terminal else f"{NOTICE}\n")
                    shown = True
            compiled += step.compiled if step else 0
    if shown and terminal:
        sys.stderr.write("\n")
    return compiled
