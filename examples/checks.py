"""How the examples say what they have checked: a line for each claim, and the exit status of the process."""


def verdict(checks, comm):
    """Print on rank 0 whether each claim holds on all ranks, and return the exit status: 1 if one does not.

    checks: whether it holds, by claim, in the same order on all ranks.
    """
    everywhere = comm.allgather([bool(holds) for holds in checks.values()])
    held = [all(holds) for holds in zip(*everywhere, strict=True)]
    if comm.rank == 0:
        for claim, holds in zip(checks, held, strict=True):
            print(f"check: {claim}: {'ok' if holds else 'FAILED'}")
    return 0 if all(held) else 1
