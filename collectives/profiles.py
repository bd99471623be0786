"""What a machine can do, as `mpicomp tune` measured it: a file that is believed only as far as it has been checked.

A profile is JSON: a version, a checksum, and the figures. Times are curves, (size, seconds) points joined by straight
lines: a cache or a change of MPI's protocol bends them, which a latency and a bandwidth alone cannot say.
"""

import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

VERSION = 1
VARIABLE = "MPICOMP_PROFILE"
LARGEST_FILE = 1 << 20  # bytes
MOST_POINTS, LONGEST_NAME = 64, 200
SLOWEST, LARGEST = 1e6, 1e18  # seconds; bytes or entries
KERNELS = (
    "validate",
    "merge",
    "accumulate",
    "join",
    "fill",
    "copy",
    "select",
    "pack",
    "unpack",
    "pack_bitmap",
    "unpack_bitmap",
    "pack_coded",
    "unpack_coded",
)


class ProfileError(ValueError):
    """Say that a file is no profile: truncated, changed, of another version, or beyond its limits."""


@dataclass(frozen=True)
class Curve:
    """Seconds by size: straight lines between measured points, and the last one goes on."""

    points: tuple[tuple[float, float], ...]

    @classmethod
    def line(cls, start: float, rate: float) -> "Curve":
        """Return `start` seconds plus one second for `rate` bytes or entries."""
        return cls(((0.0, start), (rate, start + 1.0)))

    @cached_property
    def _sizes(self) -> list[float]:
        return [size for size, _ in self.points]

    def __call__(self, size: float) -> float:
        """Return the seconds that a size takes."""
        if len(self.points) == 1:
            return self.points[0][1]
        place = min(max(1, bisect_right(self._sizes, size)), len(self.points) - 1)
        (low, fast), (high, slow) = self.points[place - 1 : place + 1]
        return max(0.0, fast + (slow - fast) * (size - low) / (high - low)) if size > low else fast

    @property
    def start(self) -> float:
        """Seconds of the smallest size: the latency."""
        return self.points[0][1]

    @property
    def rate(self) -> float:
        """Bytes or entries a second at the largest size: the bandwidth."""
        (low, fast), (high, slow) = self.points[0], self.points[-1]
        return (high - low) / (slow - fast) if slow > fast else math.inf


@dataclass(frozen=True)
class Profile:
    """What one call, one message and one entry cost on a machine.

    host, mpi: a group of hosts and an MPI library, as text. ranks, nodes: what it was measured on. call: seconds of an
    operation beside its rounds. message: seconds of each further message of a step. inside, between: an exchange with a
    partner on the same node, or another one, by bytes; None where there was no such partner. reduce: MPI's own
    Allreduce on `ranks` ranks, by bytes; it may fall. kernels: what a rank computes, by entries, all ranks at once.
    """

    host: str
    mpi: str
    ranks: int
    nodes: int
    call: float
    message: float
    inside: Curve | None
    between: Curve | None
    reduce: Curve
    kernels: Mapping[str, Curve]

    def text(self) -> str:
        """Return the profile as the text of a file."""
        figures = asdict(self)
        for name in ("inside", "between", "reduce"):
            figures[name] = figures[name] and figures[name]["points"]
        figures["kernels"] = {name: curve.points for name, curve in self.kernels.items()}
        whole = {"mpicomp_profile": VERSION, "checksum": checksum(figures), "profile": figures}
        return json.dumps(whole, indent=1) + "\n"


def checksum(figures: Any) -> str:
    """Return the checksum of the figures of a profile: of their JSON without blanks, keys in order."""
    text = json.dumps(figures, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=16).hexdigest()


def parse(text: str) -> Profile:
    """Return the profile that a text holds; raise ProfileError for anything else."""
    try:
        whole = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"it is no JSON, or only a part of it ({error}); run `mpicomp tune` again") from None
    if not isinstance(whole, dict) or set(whole) != {"mpicomp_profile", "checksum", "profile"}:
        raise ProfileError("expected the keys mpicomp_profile, checksum and profile; run `mpicomp tune` again")
    if whole["mpicomp_profile"] != VERSION or isinstance(whole["mpicomp_profile"], bool):
        found = str(whole["mpicomp_profile"])[:40]
        raise ProfileError(f"it is of version {found}, expected {VERSION}; run `mpicomp tune` again")
    figures = whole["profile"]
    try:
        sound = whole["checksum"] == checksum(figures)
    except (ValueError, RecursionError):
        sound = False
    if not sound:
        raise ProfileError("its checksum is that of another text: it was changed or cut; run `mpicomp tune` again")
    return _profile(figures)


def load(path: str | os.PathLike[str]) -> Profile:
    """Return the profile in a file; raise ProfileError, with the name of the file, where there is none."""
    return named(path, read(path))


def read(path: str | os.PathLike[str]) -> str:
    """Return the text of a file of at most 1 MiB; raise ProfileError where that fails."""
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise ProfileError(f"the profile {str(path)!r} has over {LARGEST_FILE} bytes: expected a few thousand")
        return content.decode()
    except OSError as error:
        raise ProfileError(f"the profile {str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ProfileError(f"the profile {str(path)!r} is no text; run `mpicomp tune` again") from None


def named(path: str | os.PathLike[str], text: str) -> Profile:
    """Return the profile that a text from a file holds; an error names the file."""
    try:
        return parse(text)
    except ProfileError as error:
        raise ProfileError(f"the profile {str(path)!r} is refused: {error}") from None


def host_group(host: str) -> str:
    """Return what hosts of one kind are called: the name without domain and number, node for node017.cluster."""
    return re.sub(r"[\d-]+$", "", host.partition(".")[0]) or host


def library_name(version: str) -> str:
    """Return the name and version of an MPI library, from the text that it gives of itself."""
    first = version.strip("\0 \n").splitlines()[0] if version.strip("\0 \n") else "MPI"
    return " ".join(re.sub(r"[:,].*", "", re.sub(r"[\t]+", " ", first.replace("Version:", ""))).split())[:LONGEST_NAME]


def default_path(host: str, mpi: str, ranks: int, nodes: int, environment: Mapping[str, str]) -> Path:
    """Return where the profile of a host group, an MPI library and a number of ranks and nodes is kept by default.

    A relative XDG_CONFIG_HOME counts as none, as the XDG base directory specification asks.
    """
    asked = Path(environment.get("XDG_CONFIG_HOME", ""))
    folder = asked if asked.is_absolute() else Path(environment.get("HOME", "/")) / ".config"
    name = f"{host}-{mpi}-P{ranks}-N{nodes}"
    return folder / "mpicomp" / (re.sub(r"[^\w.-]+", "_", name)[:LONGEST_NAME] + ".json")


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def _profile(figures: Any) -> Profile:
    """Return the profile of figures that were looked at one by one."""
    fields = Profile.__dataclass_fields__
    if not isinstance(figures, dict) or set(figures) != set(fields):
        raise ProfileError(f"expected the figures {', '.join(fields)}; run `mpicomp tune` again")
    if not isinstance(figures["kernels"], dict) or set(figures["kernels"]) != set(KERNELS):
        raise ProfileError(f"expected the kernels {', '.join(KERNELS)}; run `mpicomp tune` again")
    if figures["inside"] is None and figures["between"] is None:
        raise ProfileError("expected a link inside a node or between nodes; run `mpicomp tune` again")
    ranks, nodes = (_whole(name, figures[name]) for name in ("ranks", "nodes"))
    if nodes > ranks:
        raise ProfileError(f"it has {ranks} ranks on {nodes} nodes: expected at most a node a rank")
    inside, between = (None if figures[name] is None else _curve(name, figures[name]) for name in ("inside", "between"))
    return Profile(
        host=_word("host", figures["host"]),
        mpi=_word("mpi", figures["mpi"]),
        ranks=ranks,
        nodes=nodes,
        call=_seconds("call", figures["call"]),
        message=_seconds("message", figures["message"]),
        inside=inside,
        between=between,
        reduce=_curve("reduce", figures["reduce"], falls=True),
        kernels={name: _curve(name, figures["kernels"][name]) for name in KERNELS},
    )


def _word(name: str, value: Any) -> str:
    if not (isinstance(value, str) and 0 < len(value) <= LONGEST_NAME and value.isprintable()):
        raise ProfileError(f"{name} is {str(value)[:40]!r}: expected a name of 1 to {LONGEST_NAME} characters")
    return value


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise ProfileError(f"{name} is {str(value)[:40]}: expected a whole number from 1 to 2^31 - 1")
    return value


def _seconds(name: str, value: Any) -> float:
    return _number(name, value, SLOWEST, "seconds")


def _number(name: str, value: Any, most: float, unit: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ProfileError(f"{name} has {str(value)[:40]} {unit}: expected 0 to {most:g}")
    return float(value)


def _curve(name: str, points: Any, *, falls: bool = False) -> Curve:
    """Return the curve of a list of (size, seconds): sizes increase, and the last seconds are not 0.

    falls: whether seconds may fall, but for the last ones, as the curve goes on behind them.
    """
    if not (isinstance(points, list) and 1 <= len(points) <= MOST_POINTS):
        raise ProfileError(f"{name} is no list of 1 to {MOST_POINTS} points")
    if not all(isinstance(point, list) and len(point) == 2 for point in points):
        raise ProfileError(f"{name} has a point that is not (size, seconds)")
    found = [(_number(name, size, LARGEST, "as a size"), _seconds(name, time)) for size, time in points]
    for place, ((low, fast), (high, slow)) in enumerate(pairwise(found), 2):
        if high <= low or (slow < fast and not (falls and place < len(found))):
            raise ProfileError(
                f"{name} goes from {(low, fast)} to {(high, slow)}: expected a larger size, no less time"
            )
    if not found[-1][1] > 0:
        raise ProfileError(f"{name} takes no time: expected more than 0 seconds")
    curve = Curve(tuple(found))
    if not math.isfinite(curve(LARGEST)):  # two sizes next to each other as floats: so steep that it leaves them
        raise ProfileError(f"{name} rises beyond all bounds between its last two sizes")
    return curve


def rising(points: Sequence[tuple[float, float]]) -> Curve:
    """Return the curve of measured points: noise only adds, so no size takes longer than a larger one."""
    risen: list[tuple[float, float]] = []
    for size, seconds in reversed(points):
        risen.append((float(size), max(1e-9, min(seconds, risen[-1][1] if risen else seconds))))
    return Curve(tuple(reversed(risen)))


def as_measured(points: Sequence[tuple[float, float]]) -> Curve:
    """Return the curve of points that may fall, as MPI takes another algorithm from some size on; not at the end."""
    found = [(float(size), max(1e-9, seconds)) for size, seconds in points]
    last = max(seconds for _, seconds in found[-2:])
    return Curve((*found[:-1], (found[-1][0], last)))


def typical_kernels() -> dict[str, Curve]:
    """Return what one core of a present-day server takes for the kernels: a start, and entries a second."""
    starts_and_rates = {
        "validate": (5e-6, 5e9),
        "merge": (6e-6, 4.5e8),
        "accumulate": (30e-6, 2e8),
        "join": (5e-6, 2e9),
        "fill": (6e-6, 4e9),
        "copy": (3e-7, 1e10),
        "select": (12e-6, 4.5e8),
        "pack": (10e-6, 2e9),
        "unpack": (6e-6, 1e12),
        "pack_bitmap": (11e-6, 7e8),
        "unpack_bitmap": (6e-6, 9e8),
        "pack_coded": (25e-6, 4e8),
        "unpack_coded": (12e-6, 5e8),
    }
    return {name: Curve.line(start, rate) for name, (start, rate) in starts_and_rates.items()}


def network(latency: float, bandwidth: float) -> Profile:
    """Return the profile of typical cores over a network: seconds of a message, and bytes a second each way."""
    exchange = Curve.line(latency + 10e-6, bandwidth)  # 10 us: what this library spends on a message
    inside = Curve.line(12e-6, 5e9)
    reduce = Curve.line(2 * (latency + 1e-6), bandwidth)  # at 2 ranks: 2 rounds, and 2 (P-1)/P of the bytes
    return Profile(
        host="typical",
        mpi="any",
        ranks=2,
        nodes=2,
        call=60e-6,
        message=5e-6,
        inside=inside,
        between=exchange,
        reduce=reduce,
        kernels=typical_kernels(),
    )


NETWORKS = {
    "100mbit": network(100e-6, 11.8e6),
    "1gbit": network(40e-6, 118e6),
    "10gbit": network(20e-6, 1.18e9),
    "hdr": network(1.5e-6, 24e9),
}
