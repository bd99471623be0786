"""The number of threads of a kernel, and the division of a vector among them; any number gives the same bits.

Compiled kernels release the global interpreter lock, so Python threads run them in
parallel.
"""

import contextlib
import ctypes
import math
import os
import pathlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial
from typing import Any, TypeVar

from mpicomp.errors import warn

VARIABLE = "MPICOMP_THREADS"

Result = TypeVar("Result")

# Values per thread, at least: with fewer, starting a thread costs more than it saves.
_LEAST = 1 << 20
# Values that are a multiple of a cache line in bytes, for every dtype.
_LINE = 64
# Threads of the pool, at most; it starts one only if none is idle.
_MOST = 256

_current_core: Callable[[], int] | None = getattr(
    ctypes.CDLL(None), "sched_getcpu", None
)

_ranks = 1
_pool: ThreadPoolExecutor | None = None
_making = threading.Lock()  # several threads may run kernels
_workers: list[int] = []  # native identifiers of the threads of the pool
# The core that is excluded from their affinity, and the mask that it was removed from.
_kept_off: Any = None


def count() -> int:
    """Return the number of threads that a kernel may use: MPICOMP_THREADS, else this rank's share of the cores.

    That is the cores in the affinity mask of the calling thread, at most the CPU quota
    of the container, divided by the ranks given to `share`, and at least 1. Raises
    ValueError if MPICOMP_THREADS is not an integer >= 1.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        cores = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):
            cores = len(os.sched_getaffinity(0))
        return max(1, int(min(cores, quota())) // _ranks)
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError(
            f"the environment variable {VARIABLE} is {text!r}: expected an integer >= 1; unset it to use this rank's "
            "cores"
        )
    return number


@cache
def quota(system: pathlib.Path = pathlib.Path("/")) -> float:
    """Return the number of cores whose time the cgroups (version 2) of this process may use; infinity for all."""
    most = math.inf
    named = system / "proc/self/cgroup"
    top = system / "sys/fs/cgroup"
    lines: list[str] = []
    if named.exists():
        lines = named.read_text().splitlines()
    for line in lines:
        # In a container the name may be that outside of it: then only the top folder
        # exists.
        inner = top / line.rpartition(":")[2].lstrip("/")
        for folder in (inner, *inner.parents):
            with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                time, period = (folder / "cpu.max").read_text().split()
                most = min(most, int(time) / int(period))
    return most


def share(ranks: int) -> None:
    """Set the number of ranks, at least 1 with this one, that share this process's cores; the largest number counts."""
    global _ranks
    _ranks = max(_ranks, ranks)


def in_pieces(
    work: Callable[[int, int], Result],
    size: int,
    threads: int | None = None,
    *,
    step: int = _LINE,
) -> list[Result]:
    """Return ``work(start, end)`` for each of the consecutive pieces of ``[0, size)``, one per thread, in order.

    threads: the most pieces; None for `count`. There are fewer if one would have less
    than about a million values. step: the length of every piece but the last is a
    multiple of it. The calling thread runs the first piece.
    """
    pieces = 1 if size < 2 * _LEAST else number_of_pieces(size, threads)
    if pieces < 2:
        return [work(0, size)]
    length = -(-size // (pieces * step)) * step
    starts = range(length, size, length)
    pool = _ready_pool()
    others = [partial(work, start, min(start + length, size)) for start in starts]
    started = [_started(pool, other) for other in others]
    try:
        own = work(0, min(length, size))
    finally:
        # They write to the caller's arrays, also if a piece has raised.
        wait([future for future in started if not future.cancelled()])
    results = [own]
    for other, future in zip(others, started, strict=True):
        if future.cancelled():
            results.append(other())
        else:
            results.append(future.result())
    return results


def number_of_pieces(size: int, threads: int | None = None) -> int:
    """Return the most pieces that `in_pieces` makes of a size."""
    pieces = size // _LEAST
    if pieces < 2:
        return 1
    if threads is None:
        threads = count()
    return min(pieces, threads)


def _started(pool: ThreadPoolExecutor, work: Callable[[], Result]) -> "Future[Result]":
    """Return the future of work that a thread of the pool does; cancelled if none can be started.

    The work then stays in the queue of the pool, where another thread could do it as
    well.
    """
    done = Future[Result]()

    def run() -> None:
        if done.set_running_or_notify_cancel():
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

    try:
        pool.submit(run)
    except RuntimeError as error:
        if done.cancel():
            warn(
                f"{error}: this rank computes on fewer threads; raise the limit of processes (ulimit -u, or that of "
                f"the container), or set {VARIABLE}=1",
                depth=2,
            )
    return done


def _ready_pool() -> ThreadPoolExecutor:
    """Return the pool, made at the first use: starting threads for each call would take 0.1 ms."""
    global _pool
    with _making:
        if _pool is None:
            _pool = ThreadPoolExecutor(_MOST, "mpicomp", _register)
        _keep_off_this_core()
        return _pool


def _register() -> None:
    global _kept_off
    _workers.append(threading.get_native_id())
    _kept_off = None


def _keep_off_this_core() -> None:
    """Exclude the core of the calling thread from the affinity of the workers, if it is not the only one.

    On a virtual machine the scheduler treats a halted core as busy, and starts a worker
    on the core that wakes it: the worker then waits for the caller's piece until a
    timer tick, a few milliseconds later, migrates it.
    """
    global _kept_off
    if _current_core is None or not hasattr(os, "sched_setaffinity"):
        return
    core = _current_core()
    mask = os.sched_getaffinity(0)
    if _kept_off == (core, mask):
        return
    for worker in _workers:
        # The system may refuse: then the affinity stays as it is.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(worker, mask - {core} or mask)
    _kept_off = core, mask


def _forget_pool() -> None:
    """Drop the pool in a forked child, which does not inherit the threads of its parent."""
    global _pool, _kept_off, _making
    _pool = None
    _making = threading.Lock()
    _kept_off = None
    _workers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)
