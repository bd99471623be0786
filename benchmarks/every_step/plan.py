"""The trainings of docs/results/every_step.json, the most important first."""

from collections.abc import Iterator
from itertools import product

from losses import LONG_STEPS, SEED, STEPS

SCHEDULES = "constant", "linear"  # of the rate; linear: to zero at the last step

Training = tuple[str, float, str, int, int]  # method, rate, schedule, seed, steps
RATES = 1e-3, 2e-3, 4e-3
OUTER = 0.3, 0.5, 0.7
IN_BASIS = "in-basis-two-bit-8"
TRIED: dict[str, tuple[float, ...]] = {  # three rates for each method
    "dense": RATES,
    "lion": (2.5e-4, 5e-4, 1e-3),
    **dict.fromkeys(("in-basis-8", IN_BASIS, "in-basis-4"), RATES),
    **dict.fromkeys(("few-bits-4", "local-sparse-10", "topk-0.01", "powersgd-8"), RATES),
}
TRIED_LATER = {
    "diloco-10": OUTER,
    "local-few-bits-10": RATES,
    "local-in-basis-10": RATES,
    "in-basis-8:basis=none": RATES,
    "in-basis-8:basis=Cosine": RATES,
}
SEEDS = {  # the rate of a method for the second seed: the best for the first
    "dense": 2e-3,
    "lion": 5e-4,
    **dict.fromkeys(("in-basis-8", IN_BASIS, "in-basis-4", "few-bits-8", "few-bits-4", "few-bits-2"), 2e-3),
}
CHANGES = (  # settings that are tried at one rate
    "dense:beta2=0.95",
    "in-basis-two-bit-4",
    "in-basis-two-bit-16",
    "in-basis-2:chunk=64",
    "in-basis-32:chunk=1024",
    "in-basis-8:tile=True",
    "in-basis-two-bit-8:form=sign",
    "in-basis-two-bit-8:mean=contributors",
    "in-basis-two-bit-8:decay=0.99",
    "in-basis-two-bit-8:decay=0.995",
    "few-bits-8",
    "few-bits-2",
)
CHANGES_LATER = (
    "local-sparse-2",
    "few-bits-1",
)
FIRST = (
    ("topk-0.01", 2e-3),
    ("few-bits-8", 2e-3),
    ("local-sparse-10", 1e-3),
    ("local-sparse-5", 1e-3),
    ("powersgd-8", 2e-3),
    ("powersgd-8", 1e-3),
    ("few-bits-4", 1e-3),
    ("topk-0.01", 1e-3),
)
LONG = IN_BASIS, "few-bits-4", "dense", "lion"


def plan() -> list[Training]:
    """Return the trainings in their order, each once."""
    return list(dict.fromkeys(trainings()))


def trainings() -> Iterator[Training]:
    """Yield the trainings in their order; some come twice."""

    def at(method: str, *rates: float, seed: int = SEED, steps: int = STEPS) -> Iterator[Training]:
        return ((method, rate, "constant", seed, steps) for rate in rates)

    for method, rate in FIRST:
        yield from at(method, rate)
    for method in CHANGES:
        yield from at(method, 2e-3)
    for method, rates in TRIED.items():
        yield from at(method, *rates)
    for method, rate in SEEDS.items():
        yield from at(method, rate, seed=SEED + 1)
    yield from ((method, rate, "linear", SEED, STEPS) for method, rate in product(("dense", IN_BASIS), (2e-3, 4e-3)))
    for method in LONG:
        yield from at(method, SEEDS[method], steps=LONG_STEPS)
    for method, rates in TRIED_LATER.items():
        yield from at(method, *rates)
    for method in CHANGES_LATER:
        yield from at(method, 2e-3)
    for method in "dense", IN_BASIS, "few-bits-4":
        yield from at(method, 2e-3, seed=SEED + 2)
    yield from at("lion", 2e-3)  # a fourth rate
