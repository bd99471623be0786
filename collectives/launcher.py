"""Check that the launcher started as many ranks as MPI sees: pure functions of the environment.

A launcher of another MPI, or torchrun, starts P processes that are each rank 0 of 1: the job runs P times, and
succeeds.
"""

from collections.abc import Mapping

# Where launchers say how many ranks they started, the innermost one first: inside a batch job Open MPI's mpirun starts
# its daemons through srun, and the ranks see both.
LAUNCHER_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def singleton_warning(size: int, environment: Mapping[str, str]) -> str | None:
    """Return a warning if the launcher started another number of ranks than MPI sees; else None."""
    name = next((name for name in LAUNCHER_SIZES if environment.get(name, "").isdigit()), None)
    if name is None or int(environment[name]) == size:
        return torchrun_warning(size, environment)
    return (
        f"the launcher says {name}={environment[name]}, and MPI sees {size}: "
        "use the mpirun that belongs to this MPI (under Slurm, the --mpi plugin that it was built for)"
    )


def torchrun_warning(size: int, environment: Mapping[str, str]) -> str | None:
    """Return a warning if WORLD_SIZE, which torchrun sets, is not the number of ranks that MPI sees; else None."""
    stated = environment.get("WORLD_SIZE", "")
    if not stated.isdigit() or int(stated) == size:
        return None
    return (
        f"torchrun says WORLD_SIZE={stated}, and MPI sees {size}: each process would train alone; start with "
        f"mpirun -n {stated} or srun in place of torchrun (or unset WORLD_SIZE, if something else has set it)"
    )
