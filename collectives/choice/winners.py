"""The table of winners that `mpicomp tune` measures: its file, and the agreement of all ranks on it.

The file is JSON: a version, a checksum, and the table. The table contains the host group and the MPI library as text,
the numbers of ranks and nodes, and "winners" with a list of points for each collective: length, density, bits of a
value, and the fastest algorithm.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collectives.choice import Choice
from collectives.choice.formulas import FORMULAS
from collectives.choice.links import NETWORKS, asked_links, measured
from collectives.choice.predictions import ON_NODES
from mpicomp.errors import ProfileError

if TYPE_CHECKING:
    from mpi4py import MPI

VARIABLE, VERSION, LARGEST_FILE = "MPICOMP_PROFILE", 2, 1 << 20  # bytes


def agreed_choice(comm: "MPI.Intracomm", nodes: Sequence[int], crowding: float = 1.0) -> Choice:
    """Return the choice for a communicator, from rank 0's table, if there is one. Collective, blocks.

    The links between nodes are measured, unless MPICOMP_NETWORK is set on rank 0.
    nodes: the first rank of each rank's node. crowding: see `Choice`. Raises on all ranks: ProfileError if rank 0's
    file is not a valid table, ValueError for a bad MPICOMP_NETWORK there.
    """
    asked: Any = None
    try:
        asked = (found(len(nodes), len(set(nodes))), asked_links()) if comm.rank == 0 else None
    except ValueError as error:
        asked = error
    asked = comm.bcast(asked)
    if isinstance(asked, Exception):
        raise asked
    table, links = asked
    if links is None and len(set(nodes)) > 1:
        links = measured(comm, nodes)
    return Choice(table, links or NETWORKS["1gbit"], crowding)


def found(ranks: int, nodes: int) -> dict[str, Any] | None:
    """Return the table that MPICOMP_PROFILE names, or that at the default path; None if there is none.

    Raises ProfileError for a file that is not a valid table.
    """
    asked = os.environ.get(VARIABLE, "")
    path = asked or str(default_path(ranks, nodes))
    if asked == "none" or not (asked or os.path.exists(path)):
        return None
    try:
        return load(path)
    except ProfileError as error:
        why = f"{VARIABLE} names it; unset that" if asked else f"it exists; delete it, or set {VARIABLE}=none,"
        raise ProfileError(f"{error}. Rank 0 read it because {why} to do without") from None


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the table in a file of at most 1 MiB; raise ProfileError that names any other file."""
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise ProfileError(f"it has over {LARGEST_FILE} bytes")
        return parse(content.decode())
    except OSError as error:
        raise ProfileError(f"the profile {str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ProfileError(f"the profile {str(path)!r} is refused: {error}; run `mpicomp tune` again") from None


def parse(text: str) -> dict[str, Any]:
    """Return the table in a text; raise ProfileError if it is not valid."""
    try:
        whole = json.loads(text)
        version, table = whole["mpicomp_profile"], whole["table"]
        if version != VERSION:
            raise ProfileError(f"it is of version {str(version)[:40]}, expected {VERSION}")
        if whole["checksum"] != checksum(table):
            raise ProfileError("checksum mismatch: the file was edited or truncated")
        for collective, place in [(name, place) for name, places in table["winners"].items() for place in places]:
            length, density, bits, algorithm = place
            known = (*FORMULAS[collective], *ON_NODES[collective])
            if not (1 <= length < 2**63 and 0 < density <= 1 and 0 <= bits < 2**20 and algorithm in known):
                raise ProfileError(f"it has a place {str(place)[:80]}: expected length, density, bits and algorithm")
        return {name: table[name] for name in ("host", "mpi", "ranks", "nodes", "winners")}
    except ProfileError:
        raise
    except (LookupError, TypeError, AttributeError, RecursionError, ValueError) as error:
        raise ProfileError(f"it is not a table of winners ({type(error).__name__}: {error})") from None


def text_of(table: Mapping[str, Any]) -> str:
    """Return a table as the text of a file."""
    return json.dumps({"mpicomp_profile": VERSION, "checksum": checksum(table), "table": table}, indent=1) + "\n"


def checksum(table: Any) -> str:
    """Return the checksum of a table's JSON without blanks, with sorted keys."""
    text = json.dumps(table, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=16).hexdigest()


def default_path(ranks: int, nodes: int) -> Path:
    """Return the default path of the table for this host group, MPI library and number of ranks and nodes.

    A relative XDG_CONFIG_HOME is ignored, as the XDG base directory specification requires.
    """
    asked = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    folder = asked if asked.is_absolute() else Path(os.environ.get("HOME", "/")) / ".config"
    name = "-".join([*host_and_library(), f"P{ranks}", f"N{nodes}"])
    return folder / "mpicomp" / (re.sub(r"[^\w.-]+", "_", name)[:200] + ".json")


def host_and_library() -> tuple[str, str]:
    """Return the name of the host group ("node" for node017.cluster), and the MPI library with its version."""
    from mpi4py import MPI

    host = MPI.Get_processor_name()
    library = (MPI.Get_library_version().strip("\0 \n").splitlines() or ["MPI"])[0].replace("Version:", "")
    return re.sub(r"[\d-]+$", "", host.partition(".")[0]) or host, " ".join(re.sub(r"[:,].*", "", library).split())
