"""The trainings of docs/results/every_step.json, the most important first."""

from collections.abc import Iterator
from itertools import product

from losses import LONG_STEPS, SEED, STEPS

SCHEDULES = "constant", "linear"  # of the rate; linear: to zero at the last step

Training = tuple[str, float, str, int, int]  # method, rate, schedule, seed, steps
RATES = 1e-3, 2e-3, 4e-3
OUTER = 0.3, 0.5, 0.7
IN_BASIS = "coefficients:form=two_bit"
TRIED: dict[str, tuple[float, ...]] = {  # three rates for each method
    "adamw": RATES,
    "lion": (2.5e-4, 5e-4, 1e-3),
    **dict.fromkeys(("coefficients", IN_BASIS, "coefficients:k=4"), RATES),
    **dict.fromkeys(("bits:bits=4", "local:every=10,message=two_bit", "topk:density=0.01", "powersgd:rank=8"), RATES),
}
TRIED_LATER = {
    "diloco:every=10": OUTER,
    "local:every=10,message=bits4": RATES,
    "local:every=10,message=basis": RATES,
    "coefficients:basis=none": RATES,
    "coefficients:basis=Cosine": RATES,
}
SEEDS = {  # the rate of a method for the second seed: the best for the first
    "adamw": 2e-3,
    "lion": 5e-4,
    **dict.fromkeys(("coefficients", IN_BASIS, "coefficients:k=4", "bits:bits=8", "bits:bits=4", "bits:bits=2"), 2e-3),
}
CHANGES = (  # settings that are tried at one rate
    "adamw:beta2=0.95",
    "coefficients:k=4,form=two_bit",
    "coefficients:k=16,form=two_bit",
    "coefficients:k=2,chunk=64",
    "coefficients:k=32,chunk=1024",
    "coefficients:tile=True",
    "coefficients:form=sign",
    "coefficients:form=two_bit,mean=contributors",
    "coefficients:form=two_bit,decay=0.99",
    "coefficients:form=two_bit,decay=0.995",
    "bits:bits=8",
    "bits:bits=2",
)
CHANGES_LATER = (
    "local:every=2,message=two_bit",
    "bits:bits=1",
)
FIRST = (
    ("topk:density=0.01", 2e-3),
    ("bits:bits=8", 2e-3),
    ("local:every=10,message=two_bit", 1e-3),
    ("local:every=5,message=two_bit", 1e-3),
    ("powersgd:rank=8", 2e-3),
    ("powersgd:rank=8", 1e-3),
    ("bits:bits=4", 1e-3),
    ("topk:density=0.01", 1e-3),
)
LONG = IN_BASIS, "bits:bits=4", "adamw", "lion"


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
    yield from ((method, rate, "linear", SEED, STEPS) for method, rate in product(("adamw", IN_BASIS), (2e-3, 4e-3)))
    for method in LONG:
        yield from at(method, SEEDS[method], steps=LONG_STEPS)
    for method, rates in TRIED_LATER.items():
        yield from at(method, *rates)
    for method in CHANGES_LATER:
        yield from at(method, 2e-3)
    for method in "adamw", IN_BASIS, "bits:bits=4":
        yield from at(method, 2e-3, seed=SEED + 2)
    yield from at("lion", 2e-3)  # a fourth rate
