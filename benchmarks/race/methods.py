"""The methods by name: what is exchanged, a dash, and a number of the method, such as local-sparse-10."""

import re
from typing import Any, NamedTuple

from collectives import GradientExchange, OuterLoop
from mpicomp import ChunkedTopK, Dense, ErrorFeedback, Hadamard, NoFeedback, Quantised, TopK

LOCAL = ("local-dense", "local-nesterov", "local-sparse", "local-topk", "local-few-bits")
OURS_OF_GPT = ("topk", "in-basis", "in-basis-two-bit", "few-bits")  # a `GradientExchange` in every step
EVERY_STEP = {"gpt": ("dense", "lion", "fp16", "powersgd", *OURS_OF_GPT), "characters": ("dense", "topk")}
NAME = re.compile(r"([a-z].*?)(?:-([0-9.]+))?(-two-bit)?")  # kind, number, and how coefficients are sent
BITS = 8, 4, 2, 1  # of few-bits
DENSITY = 0.03  # of local-topk
CHUNKS = {"k": 128, "chunk": 4096}  # of local-sparse: 3.1 %
DECAY = 0.95
IN_BASIS = 256  # the chunk of in-basis, and of its basis
BITS_OF_LOCAL = 4  # of local-few-bits
DILOCO = {"rate": 0.3, "momentum": 0.9, "nesterov": True}  # of local-nesterov: the best of three outer rates


class Rate(NamedTuple):
    """A learning rate, and how many were tried in the simulation of benchmarks/every_step before it was taken."""

    learning_rate: float
    trials: int = 1


GIVEN = Rate(1e-3)  # of the other kinds
RATES = {  # of kinds of methods of the GPT
    **dict.fromkeys(("dense", "fp16", "in-basis", "in-basis-two-bit"), Rate(2e-3, 3)),
    "few-bits": Rate(2e-3, 3),
    **dict.fromkeys(("topk", "powersgd"), Rate(2e-3, 3)),
    "lion": Rate(5e-4, 4),
    **dict.fromkeys(("local-sparse", "local-dense", "local-topk", "local-nesterov"), Rate(1e-3, 3)),
    "local-few-bits": Rate(2e-3, 3),
}
TUNED = {  # the trainings of benchmarks/every_step from which rates are
    "dense": "adamw",
    "in-basis": "coefficients",
    "in-basis-two-bit": "coefficients:form=two_bit",
    "few-bits": "bits:bits=4",
    "topk": "topk:density=0.01",
    "lion": "lion",
    "local-sparse": "local:every=10,message=two_bit",
    "local-few-bits": "local:every=10,message=bits4",
    "powersgd": "powersgd:rank=8",
}
RATE_OF_CHARACTERS = Rate(0.1)


def rate_of(name: str, model: str) -> Rate:
    """Return the learning rate of a method."""
    return RATES.get(parts(name)[0], GIVEN) if model == "gpt" else RATE_OF_CHARACTERS


def parts(name: str) -> tuple[str, float]:
    """Return the kind of a method, and its number.

    That is the density, PowerSGD's rank, the bits of a value, the coefficients of a chunk, or steps between exchanges.
    """
    found = NAME.fullmatch(name)
    kind, number, form = found.groups() if found else (name, None, None)
    return kind + (form or ""), float(number or 1)


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
    can_be = number in BITS if kind == "few-bits" else number > 0
    return can_be and whole and kind in ("alone", *LOCAL, *EVERY_STEP[model])


def exchanging(name: str, model: str, trainer: Any, comm: Any) -> OuterLoop | None:
    """Let a trainer take part in a method; return the outer loop to step after each step, where there is one."""
    kind, number = parts(name)
    trainer.optimise(kind, rate_of(name, model).learning_rate)
    if kind in EVERY_STEP[model]:
        trainer.average(kind, number, comm)
    if kind not in LOCAL:
        return None
    momentum: Any = DILOCO if kind == "local-nesterov" else {}
    return OuterLoop(outer_exchange(kind, comm), trainer.arrays, every=int(number), **momentum)


def every_exchange(kind: str, value: float, comm: Any) -> GradientExchange:
    """Return the exchange in every step of a kind of `OURS_OF_GPT`."""
    if kind == "topk":
        return GradientExchange(comm, TopK(density=value))
    if kind == "few-bits":
        return GradientExchange(comm, bits=int(value))
    largest = ChunkedTopK(k=int(value), chunk=IN_BASIS)
    compressor = largest if kind == "in-basis" else Quantised(largest, "two_bit")
    feedback, basis = ErrorFeedback(decay=0.999), Hadamard(chunk=IN_BASIS)
    return GradientExchange(comm, compressor, feedback, basis=basis, average="sign")


def outer_exchange(kind: str, comm: Any) -> GradientExchange:
    """Return the exchange of a kind of local steps."""
    if kind in ("local-dense", "local-nesterov"):
        return GradientExchange(comm, Dense(), NoFeedback())
    if kind == "local-few-bits":
        return GradientExchange(comm, bits=BITS_OF_LOCAL)
    compressor = TopK(density=DENSITY) if kind == "local-topk" else Quantised(ChunkedTopK(**CHUNKS), "two_bit")
    return GradientExchange(comm, compressor, ErrorFeedback(decay=DECAY), average="contributors")
