"""The trainings of docs/results/every_step.json."""

from itertools import product

from losses import SEED, STEPS

SCHEDULES = "constant", "linear"  # of the rate; linear: to zero at the last step

Training = tuple[str, float, str, int, int]  # method, rate, schedule, seed, steps
TRIED = {  # the rates that the main methods try
    "adamw": (1e-3, 2e-3, 4e-3),
    "lion": (2.5e-4, 5e-4, 1e-3, 2e-3),
    **dict.fromkeys(("coefficients", "coefficients:form=two_bit", "coefficients:k=4"), (1e-3, 2e-3, 4e-3)),
    "coefficients:basis=none": (1e-3, 2e-3, 4e-3),
    "coefficients:basis=Cosine": (1e-3, 2e-3, 4e-3),
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
)
SECOND_SEED = {  # the best rate of a method
    "adamw": 2e-3,
    "lion": 5e-4,
    "coefficients": 2e-3,
    "coefficients:form=two_bit": 2e-3,
    "coefficients:k=4": 2e-3,
}
SCHEDULED = product(("adamw", "coefficients:form=two_bit"), (2e-3, 4e-3))


def plan() -> list[Training]:
    """Return the trainings in their order."""
    constant = [(method, rate, SEED) for method, rates in TRIED.items() for rate in rates]
    constant += [(method, 2e-3, SEED) for method in CHANGES]
    constant += [(method, rate, SEED + 1) for method, rate in SECOND_SEED.items()]
    linear = [(method, rate, "linear", SEED, STEPS) for method, rate in SCHEDULED]
    return [(method, rate, "constant", seed, STEPS) for method, rate, seed in constant] + linear
