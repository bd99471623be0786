"""The trainings of docs/results/every_step.json."""

from losses import SEED

Training = tuple[str, float, int]  # method, rate, seed
CHANGES = (  # of the settings of coefficients, at one rate
    "basis=Cosine",
    "k=4,form=two_bit",
    "k=16,form=two_bit",
    "k=2,chunk=64",
    "k=32,chunk=1024",
    "tile=True",
    "form=sign",
    "form=two_bit,mean=contributors",
    "form=two_bit,decay=0.99",
    "form=two_bit,decay=0.995",
)
SECOND_SEED = {  # the best rate of a method
    "adamw": 2e-3,
    "lion": 5e-4,
    "coefficients": 2e-3,
    "coefficients:form=two_bit": 2e-3,
    "coefficients:k=4": 2e-3,
}


def plan() -> list[Training]:
    """Return the trainings of the committed file: three rates or more of the main methods, then what changes them."""
    tried = {
        "adamw": (1e-3, 2e-3, 4e-3),
        "lion": (2.5e-4, 5e-4, 1e-3, 2e-3),
        **dict.fromkeys(("coefficients", "coefficients:form=two_bit", "coefficients:k=4"), (1e-3, 2e-3, 4e-3)),
        "coefficients:basis=none": (1e-3, 2e-3),
        **{f"coefficients:{settings}": (2e-3,) for settings in CHANGES},
        "adamw:beta2=0.95": (2e-3,),
    }
    first = [(method, rate, SEED) for method, rates in tried.items() for rate in rates]
    return first + [(method, rate, 1) for method, rate in SECOND_SEED.items()]
