"""The experiments by name: the runs of each, as command lines of benchmarks and of `mpicomp bench`.

One rule for the learning rate: a method is trained with each of `RATES` of its task,
from a seed of its own and without the validation part, and takes the rate with the
least loss there. Experiments E3, E4 and E8 are about densities, times and bytes: there
all methods have the rate that a dense training takes.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

RATES = {
    "digits": (0.025, 0.05, 0.1, 0.2),
    "images": (0.0125, 0.025, 0.05),
    "shakespeare": (0.5, 1.0, 2.0),
}
# of E9
OF_LOCAL = {
    "digits": (0.05, 0.1, 0.2),
    "text": (0.2, 0.4, 0.8),
    "images": (0.025, 0.05),
}
OF_EVERY_STEP = OF_LOCAL | {"images": (0.0125, 0.025, 0.05)}  # of E10
TAKEN = {"dense": 0.05, "gtopk": 0.025}  # in 1,000 steps of E6 on images
LONG = 4000  # steps
# what a dense training of 300 steps takes
OF_DENSE = {"digits": 0.1, "images": 0.05, "shakespeare": 1.0}
# of the gTop-k paper, an epoch each; on images 50 steps each
WARM_UP = "0.25", "0.0725", "0.015", "0.004"
METRICS = "support", "quota"
FITS = (  # of E3, and the method that they are compared with
    "sidco",
    "sidco:distribution=pareto",
    "sidco:stages=2",
    "sidco:stages=1,adaptation=published",
    "sidco:distribution=pareto,stages=1,adaptation=published",
    "sampled-topk",
)
BOTH_WAYS = {
    "0.01": ("topk-both-ways", "step-ahead-both-ways"),
    "1.0": ("sign-both-ways", "sign-step-ahead-both-ways"),
}
# of E5, whose methods are these by their density
AVERAGING = "--averaging-period", "20"
CAPTURED = "build/papers/{}.npz"
TIMED = (
    "SIDCo-exponential",
    "SIDCo-pareto",
    "SampledTopK",
    "RedSync",
    "GaussianK",
    "torch.topk",
)
TRAIN = "experiments/training/train.py"
COMPARED = "experiments/papers/compared.py"
# of E7: one machine serves all hosts
LINKS = {4: "500mbit", 8: "250mbit", 16: "125mbit", 32: "62500kbit"}


class Run(NamedTuple):
    """A run. options: of `script`, or of `mpicomp bench`. ranks: of mpirun. rate: of the links, each rank on a host."""

    options: tuple[str, ...]
    ranks: int
    rate: str | None = None
    script: str = ""

    @property
    def command(self) -> str:
        """The command line, as a reader can type it."""
        words = " ".join(
            [
                f"python -m mpi4py {self.script}" if self.script else "mpicomp bench",
                *self.options,
            ]
        )
        if self.rate:
            return f"testbed.py up {self.ranks} {self.rate}; testbed.py run {words}"
        return f"mpirun -n {self.ranks} {words}"


def training(
    ranks: int,
    task: str,
    *options: str,
    steps: int,
    seeds: int,
    rates: tuple[float, ...] = (),
    points: int = 10,
) -> Run:
    """Return a training. rates: to choose from, by default those of the task."""
    rates = rates or RATES[task]
    batch = ("--batch", "16") if task == "shakespeare" else ()
    counts = ("--steps", f"{steps}", "--seeds", f"{seeds}", "--points", f"{points}")
    options = ("--task", task, *options, *counts, *batch, "--rate", *map(str, rates))
    return Run(options, ranks, script=TRAIN)


def e1() -> Iterator[Run]:
    """AdaComp on a convolutional network: the rate of compression by layer, and the accuracy."""
    for steps, method in product((1000, LONG), ("dense", "adacomp")):
        yield training(2, "images", "--methods", method, steps=steps, seeds=3)


def e2() -> Iterator[Run]:
    """AdaComp on a recurrent network."""
    for method in "dense", "adacomp":
        yield training(2, "shakespeare", "--methods", method, steps=1000, seeds=3)


def e3() -> Iterator[Run]:
    """SIDCo's density over its target on three networks in training, steps 51 to 300."""
    for fit, task in product(FITS, RATES):
        for density in "0.01", "0.001":
            options = "--methods", fit, "--density", density
            yield training(
                2, task, *options, steps=300, seeds=3, rates=(OF_DENSE[task],), points=1
            )


def e4() -> Iterator[Run]:
    """SIDCo's overhead on captured gradients, and the time to a loss over slow links."""
    for task in RATES:
        captured = (
            "--methods",
            "topk-allgather",
            "--density",
            "0.001",
            "--capture",
            CAPTURED.format(task),
        )
        yield training(
            2,
            task,
            *captured,
            "--capture-steps",
            "300",
            steps=300,
            seeds=1,
            rates=(OF_DENSE[task],),
            points=1,
        )
        for length in "1e6", "25e6":
            timed = (
                "--length",
                length,
                "--densities",
                "0.001",
                "0.01",
                "--compressors",
                *TIMED,
            )
            yield Run(("--captured", CAPTURED.format(task), *timed), 1, script=COMPARED)
    methods = (
        "--methods",
        "dense",
        "topk-allgather",
        "dgc",
        "sidco",
        "--density",
        "0.01",
    )
    for rate in "25mbit", "100mbit":
        yield training(
            8,
            "images",
            *methods,
            steps=400,
            seeds=1,
            rates=(OF_DENSE["images"],),
            points=20,
        )._replace(rate=rate)


def e5() -> Iterator[Run]:
    """Step-ahead against error feedback and no compression, both ways; the loss on the training part by step."""
    for task, seeds in ("digits", 5), ("images", 2):
        yield training(4, task, "--methods", "dense", steps=300, seeds=seeds, points=12)
        for density, names in BOTH_WAYS.items():
            for name, averaging in (
                (names[0], ()),
                (names[1], ()),
                (names[1], AVERAGING),
            ):
                options = "--methods", name, "--density", density, *averaging
                yield training(4, task, *options, steps=300, seeds=seeds, points=12)


def e6() -> Iterator[Run]:
    """gTop-k at 0.1 % with and without warm-up, and dense."""
    for task, seeds, stage in (
        ("digits", 3, ()),
        ("images", 2, ("--warm-up-steps", "50")),
    ):
        yield training(4, task, "--methods", "dense", steps=1000, seeds=seeds)
        for warm_up in (), ("--warm-up", *WARM_UP, *stage):
            yield training(
                4,
                task,
                "--methods",
                "gtopk",
                "--density",
                "0.001",
                *warm_up,
                steps=1000,
                seeds=seeds,
            )
    yield training(
        4, "images", "--methods", "dense", steps=LONG, seeds=2, rates=(TAKEN["dense"],)
    )
    for warm_up in (), ("--warm-up", *WARM_UP, *stage):
        method = "--methods", "gtopk", "--density", "0.001", *warm_up
        yield training(
            4, "images", *method, steps=LONG, seeds=2, rates=(TAKEN["gtopk"],)
        )


def e7() -> Iterator[Run]:
    """gTop-k against Top-k by an allgather and against a dense sum, by the number of hosts."""
    sizes = (
        "--lengths",
        "15e6",
        "25.6e6",
        "--densities",
        "0.001",
        "--dense-repeats",
        "1",
        "--repeats",
        "3",
    )
    for ranks, rate in LINKS.items():
        yield Run(
            ("gtopk", *sizes, "--algorithms", "tree", "recursive_doubling", "exact"),
            ranks,
            rate,
        )


def e8() -> Iterator[Run]:
    """Aggregation-aware selection: the size of the sum, the bytes of the busiest rank, and the loss."""
    selections = ["topk", *(f"aggregation-aware:metric={metric}" for metric in METRICS)]
    for (task, ranks, seeds), selection in product(
        (("digits", 4, 3), ("digits", 16, 2), ("images", 4, 2)), selections
    ):
        options = "--methods", selection, "--density", "0.01"
        yield training(
            ranks, task, *options, steps=300, seeds=seeds, rates=(OF_DENSE[task],)
        )


def e9() -> Iterator[Run]:
    """Local steps: dense exchanges, and 3.1 and 1.6 % of each chunk in two bits, averaged in two ways."""
    for task, rates in OF_LOCAL.items():
        common = (
            "--task",
            task,
            "--every",
            "5",
            "15",
            "30",
            "--seeds",
            "3",
            "--points",
            "1",
            "--rate",
            *map(str, rates),
        )
        yield Run((*common, "--methods", "dense", "local-dense"), 4, script=TRAIN)
        for density in "0.031", "0.016":
            yield Run(
                (
                    *common,
                    "--methods",
                    "local-sparse",
                    "local-sparse-mean",
                    "--density",
                    density,
                ),
                4,
                script=TRAIN,
            )


def e10() -> Iterator[Run]:
    """An exchange in every step: few bits of every value, and 3.1 % of the coefficients in a basis with signs."""
    for task, rates in OF_EVERY_STEP.items():
        common = (
            "--task",
            task,
            "--seeds",
            "3",
            "--points",
            "1",
            "--rate",
            *map(str, rates),
            "--density",
            "0.031",
        )
        for methods in (
            ("dense", "few-bits-8", "few-bits-4", "few-bits-2"),
            ("in-basis", "in-basis-two-bit"),
        ):
            yield Run((*common, "--methods", *methods), 4, script=TRAIN)


EXPERIMENTS = {
    "E1": e1, "E2": e2, "E3": e3, "E4": e4, "E5": e5, "E6": e6, "E7": e7, "E8": e8, "E9": e9, "E10": e10,
}  # fmt: skip
