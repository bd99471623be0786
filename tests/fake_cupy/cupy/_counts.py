"""What was started on the fake device, and what waited for it: the counts that a profiler would show of a real one.

launches          kernels of mpicomp, and operations of CuPy that compute, copy or fill on the device: at least as many
                  kernels or memory operations on a GPU
synchronisations  times that the host waited for the device: a copy to the host, an event, a stream, and operations
                  whose result has a size that the host has to know first, such as flatnonzero
uploads           copies of host memory that is not pinned to the device
"""

from collections import Counter

counts: Counter[str] = Counter()
# of everything that was counted, in order: what a test that fails prints
names: list[str] = []


def count(kind: str, name: str) -> None:
    """Count one of a kind; its name says what it was."""
    counts[kind] += 1
    names.append(f"{kind[:-1]}: {name}")


def clear() -> None:
    """Begin anew."""
    counts.clear()
    names.clear()
