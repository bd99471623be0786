"""The trainings of experiments/results/every_step.json, the most important first."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from losses import LONG_STEPS, SEED, STEPS

# what a training is named by; the last two are those of its model in `MODELS`
KEY = (
    *("model", "method", "optimizer", "rate", "schedule", "seed", "steps"),
    *("ranks", "batch"),
)
Training = tuple[str, str, str, float, str, int, int]  # what `KEY` names, but for those
# ranks, and the windows of a rank's batch; the models are those of experiments/race/gpt.py
MODELS = {"gpt": (4, 4), "manual": (2, 12), "small": (4, 4), "small-manual": (4, 4)}
SCHEDULES = {  # of the rate, and the model that is trained with each
    "linear": "gpt",  # to zero at the last step
    # to a tenth of the rate, after a warm-up of a tenth of the steps
    "cosine": "manual",
    "constant": "gpt",
}
IN_BASIS = "in-basis-two-bit-8"
ADAMW, SIGNS = (1e-3, 2e-3, 4e-3), (1e-3, 2e-3, 4e-3)
# rates by schedule, method and optimiser
TRIED: dict[str, dict[tuple[str, str], tuple[float, ...]]] = {
    "linear": {
        ("dense", "adamw"): (2e-3, 4e-3),
        ("dense", "muon"): (8e-3, 4e-3, 16e-3),
        ("local-few-bits-10", "muon"): (8e-3, 4e-3, 16e-3, 32e-3),
        ("few-bits-4", "muon"): (8e-3, 4e-3, 16e-3),
        ("powersgd-8", "muon"): (8e-3, 4e-3),
        ("local-sparse-10", "muon"): (4e-3, 8e-3),
        ("local-few-bits-10", "adamw"): (2e-3,),
        ("local-few-bits-5", "muon"): (8e-3,),
        ("muloco-30", "muon"): (16e-3,),
        (IN_BASIS, "sgd"): (2e-3, 4e-3),
    },
    "cosine": {
        ("dense", "adamw"): (2e-3, 4e-3, 8e-3, 16e-3),
        ("dense", "muon"): (16e-3, 8e-3, 32e-3),
        ("local-few-bits-10", "muon"): (16e-3, 8e-3, 32e-3),
        ("few-bits-4", "muon"): (16e-3, 8e-3, 32e-3),
        ("powersgd-8", "muon"): (16e-3, 8e-3, 32e-3),
        ("local-sparse-10", "muon"): (8e-3, 16e-3),
        ("few-bits-4", "adamw"): (4e-3, 8e-3),
        ("local-few-bits-10", "adamw"): (2e-3, 4e-3, 8e-3),
        ("local-sparse-10", "adamw"): (2e-3, 4e-3),
        ("powersgd-8", "adamw"): (2e-3, 4e-3, 8e-3),
        (IN_BASIS, "sgd"): SIGNS,
        **{(f"local-few-bits-{every}", "muon"): (16e-3,) for every in (5, 20, 30)},
    },
}
AGAIN = {  # the rate of the second seed: the best for the first
    "linear": {
        ("dense", "adamw"): 2e-3,
        ("dense", "muon"): 8e-3,
        ("local-few-bits-10", "muon"): 16e-3,
    },
    "cosine": {
        ("dense", "adamw"): 8e-3,
        ("dense", "muon"): 16e-3,
        ("local-few-bits-10", "muon"): 16e-3,
    },
}
LONG = {  # the rate of the long trainings
    "linear": {("dense", "adamw"): 2e-3, ("local-few-bits-10", "muon"): 8e-3},
    "cosine": {
        ("dense", "adamw"): 4e-3,
        ("dense", "muon"): 16e-3,
        ("local-few-bits-10", "muon"): 16e-3,
    },
}

OUTER = 0.3, 0.5, 0.7
AT_A_CONSTANT_RATE: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(
        ("dense", "few-bits-4", "local-sparse-10", "topk-0.01", "powersgd-8"), ADAMW
    ),
    **dict.fromkeys(
        (
            "in-basis-8",
            IN_BASIS,
            "in-basis-4",
            "in-basis-8:basis=none",
            "in-basis-8:basis=Cosine",
        ),
        SIGNS,
    ),
    **dict.fromkeys(("local-few-bits-10", "local-in-basis-10"), ADAMW),
    "diloco-10": OUTER,
}
AT_ONE_RATE = {
    2e-3: (
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
        "few-bits-1",
        "local-sparse-2",
    ),
    1e-3: ("local-sparse-5",),
}
LION = 2.5e-4, 5e-4, 1e-3, 2e-3
SECOND_SEED = (
    "dense",
    "in-basis-8",
    IN_BASIS,
    "in-basis-4",
    "few-bits-8",
    "few-bits-4",
    "few-bits-2",
)
THIRD_SEED = "dense", IN_BASIS, "few-bits-4"


def plan() -> list[tuple[Any, ...]]:
    """Return the trainings in their order, each once, with ranks and batch."""
    planned = dict.fromkeys(chain(scheduled(), at_a_constant_rate()))
    return [(*each, *MODELS[each[0]]) for each in planned]


def optimizer_of(method: str, asked: str = "adamw") -> str:
    """Return the optimiser that was asked for; SGD where an exchange returns signs."""
    return "sgd" if method.startswith("in-basis") else asked


def scheduled() -> Iterator[Training]:
    """Yield the trainings with a schedule of the rate."""
    for schedule, model in list(SCHEDULES.items())[:2]:
        for (method, optimizer), rates in TRIED[schedule].items():
            yield from (
                (model, method, optimizer, rate, schedule, SEED, STEPS)
                for rate in rates
            )
        for (method, optimizer), rate in AGAIN[schedule].items():
            yield model, method, optimizer, rate, schedule, SEED + 1, STEPS
        for (method, optimizer), rate in LONG[schedule].items():
            yield model, method, optimizer, rate, schedule, SEED, LONG_STEPS


def at_a_constant_rate() -> Iterator[Training]:
    """Yield the trainings at a constant rate."""

    def at(
        method: str, *rates: float, seed: int = SEED, steps: int = STEPS
    ) -> Iterator[Training]:
        return (
            ("gpt", method, optimizer_of(method), rate, "constant", seed, steps)
            for rate in rates
        )

    for method, rates in AT_A_CONSTANT_RATE.items():
        yield from at(method, *rates)
    for rate, methods in AT_ONE_RATE.items():
        yield from chain.from_iterable(at(method, rate) for method in methods)
    yield from chain.from_iterable(
        at(method, 2e-3, seed=SEED + 1) for method in SECOND_SEED
    )
    yield from chain.from_iterable(
        at(method, 2e-3, seed=SEED + 2) for method in THIRD_SEED
    )
    yield from chain.from_iterable(
        at(method, 2e-3, steps=LONG_STEPS)
        for method in (IN_BASIS, "few-bits-4", "dense")
    )
    others = (5e-4, SEED + 1, STEPS), (5e-4, SEED, LONG_STEPS)
    for rate, seed, steps in [*((rate, SEED, STEPS) for rate in LION), *others]:
        yield "gpt", "dense", "lion", rate, "constant", seed, steps
