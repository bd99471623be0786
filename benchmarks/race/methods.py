"""The methods by name: what is exchanged, a dash, and a number of the method, such as local-sparse-10."""

from typing import Any

from collectives import GradientExchange, OuterLoop
from mpicomp import ChunkedTopK, Dense, ErrorFeedback, NoFeedback, Quantised, TopK

LOCAL = ("local-dense", "local-nesterov", "local-sparse", "local-topk")
EVERY_STEP = {"gpt": ("dense", "fp16", "powersgd", "topk"), "characters": ("dense", "topk")}
DENSITY = 0.03  # of local-topk
CHUNKS = {"k": 128, "chunk": 4096}  # of local-sparse: 3.1 %
DECAY = 0.95


def parts(name: str) -> tuple[str, float]:
    """Return the kind of a method, and its number: the density, PowerSGD's rank, or steps between two exchanges."""
    kind, _, number = name.rpartition("-")
    return (kind, float(number)) if kind else (name, 1.0)


def period(name: str) -> int:
    """Return every how many steps a method makes the replicas equal."""
    kind, number = parts(name)
    return int(number) if kind in LOCAL else 1


def known(name: str, model: str) -> bool:
    """Return whether a model has a method."""
    try:
        kind, number = parts(name)
    except ValueError:
        return False
    whole = kind == "topk" or number == int(number)
    return number > 0 and whole and kind in ("alone", *LOCAL, *EVERY_STEP[model])


def exchanging(name: str, model: str, trainer: Any, comm: Any) -> OuterLoop | None:
    """Let a trainer take part in a method; return the outer loop to step after each step, where there is one."""
    kind, number = parts(name)
    if kind in EVERY_STEP[model]:
        trainer.average(kind, number, comm)
    if kind not in LOCAL:
        return None
    momentum = {"rate": 0.7, "momentum": 0.9, "nesterov": True} if kind == "local-nesterov" else {}
    return OuterLoop(outer_exchange(kind, comm), trainer.arrays, every=int(number), **momentum)


def outer_exchange(kind: str, comm: Any) -> GradientExchange:
    """Return the exchange of a kind of local steps."""
    if kind in ("local-dense", "local-nesterov"):
        return GradientExchange(comm, Dense(), NoFeedback())
    compressor = TopK(density=DENSITY) if kind == "local-topk" else Quantised(ChunkedTopK(**CHUNKS), "two_bit")
    return GradientExchange(comm, compressor, ErrorFeedback(decay=DECAY), average="contributors")
