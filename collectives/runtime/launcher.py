"""What launchers tell the ranks through environment variables: pure functions.

A launcher of another MPI, or torchrun, starts P processes that are each rank 0 of 1:
the warnings detect that.
"""

from collections.abc import Mapping, Sequence

# Variables in which launchers state how many ranks they started, the innermost one
# first: inside a batch job Open MPI's mpirun starts its daemons through srun, and the
# ranks see both.
LAUNCHER_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
PMIX_RANK = "PMIX_RANK"  # PMIx states no number of ranks
# With 1 a rank is to work alone, whatever the launcher says.
ALONE = "MPICOMP_ALONE"
REMEDY = "use the mpirun that belongs to this MPI (under Slurm, the --mpi plugin that it was built for)"


def singleton_warning(size: int, environment: Mapping[str, str]) -> str | None:
    """Return a warning if the launcher started another number of ranks than MPI sees; else None."""
    name = next(
        (name for name in LAUNCHER_SIZES if environment.get(name, "").isdecimal()), None
    )
    if name is None or int(environment[name]) == size:
        return torchrun_warning(size, environment)
    return (
        f"the launcher says {name}={environment[name]}, and MPI sees {size}: {REMEDY}"
    )


def lone_warning(size: int, environment: Mapping[str, str]) -> str | None:
    """Return a warning if this rank is alone, though its launcher started several; None with MPICOMP_ALONE=1."""
    if size > 1 or environment.get(ALONE, "0") not in ("", "0"):
        return None
    wrong = singleton_warning(size, environment)
    if wrong is None and environment.get(PMIX_RANK, "0").strip("0").isdecimal():
        wrong = f"the launcher says {PMIX_RANK}={environment[PMIX_RANK]}, and MPI sees one rank: {REMEDY}"
    return (
        wrong
        and f"this process trains alone: {wrong}; {ALONE}=1 turns this warning off"
    )


def torchrun_warning(size: int, environment: Mapping[str, str]) -> str | None:
    """Return a warning if WORLD_SIZE, which torchrun sets, is not the number of ranks that MPI sees; else None."""
    stated = environment.get("WORLD_SIZE", "")
    if not stated.isdecimal() or int(stated) == size:
        return None
    return (
        f"torchrun says WORLD_SIZE={stated}, and MPI sees {size}: each process would train alone; in place of "
        f"torchrun start with: mpirun -n {stated} python -m collectives.torch train.py (or srun python -m ...); "
        "or unset WORLD_SIZE, if something else has set it"
    )


def master_address(
    environment: Mapping[str, str], host: str, *, is_one_node: bool
) -> str:
    """Return the address at which rank 0 listens for torch; host: its name, which may not resolve on one node."""
    if is_one_node:
        host = "127.0.0.1"
    return environment.get("MASTER_ADDR") or host


def torchrun_variables(
    rank: int, first_on_node: Sequence[int], address: str, port: int
) -> dict[str, str]:
    """Return the environment variables of a rank as torchrun would set them, by name.

    first_on_node: for each rank, the lowest rank on its node. address, port: where rank
    0 will listen for torch's `env://`. TORCHELASTIC_RUN_ID is what Lightning recognises
    torchrun by, before it looks at Slurm's variables.

    >>> torchrun_variables(3, [0, 0, 2, 2], "node7", 29500)["LOCAL_RANK"]
    '1'
    """
    first = first_on_node[rank]
    nodes = sorted(set(first_on_node))
    variables = {
        "RANK": rank,
        "WORLD_SIZE": len(first_on_node),
        "LOCAL_RANK": first_on_node[:rank].count(first),
        "LOCAL_WORLD_SIZE": first_on_node.count(first),
        "GROUP_RANK": nodes.index(first),
        "GROUP_WORLD_SIZE": len(nodes),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": len(first_on_node),
        "ROLE_NAME": "default",
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": f"mpi-{address}-{port}",
    }
    return {name: str(value) for name, value in variables.items()}
