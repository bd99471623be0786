"""The training methods as data, under one name each: a text, and the line of Python that constructs the exchange.

`mpicomp explain --train`, the trainings, the simulation and the race of benchmarks/,
and the tables of the pages take their methods from here. A number behind a name
replaces an argument of the line, and so do settings behind a colon: "topk-0.05",
"in-basis-8:chunk=64,decay=0.99".
"""

import re
from functools import cache, partial
from typing import Any, NamedTuple


class Method(NamedTuple):
    """A method.

    line: an expression of `comm`, and of `rate` and `momentum` of the optimiser, that
    is the GradientExchange; of PyTorch's own hooks the arguments of
    `register_comm_hook`; empty for DistributedDataParallel as it is. number: the
    argument that the number behind the name replaces. outer: of local steps, the
    arguments of the OuterLoop.
    """

    text: str
    line: str = ""
    number: str = ""
    outer: str = ""


METHODS = {
    "dense": Method("dense sums of 32 bits"),
    "fp16": Method("dense sums of 16 bits", "None, default_hooks.fp16_compress_hook"),
    "powersgd": Method(
        "PowerSGD (arXiv 1905.13727), by its rank",
        "powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=2), "
        "powerSGD_hook.powerSGD_hook",
        "matrix_approximation_rank",
    ),
    "few-bits": Method(
        "every value in few bits", "GradientExchange(comm, bits=4)", "bits"
    ),
    "topk": Method(
        "the largest entries", "GradientExchange(comm, TopK(density=0.01))", "density"
    ),
    "in-basis": Method(
        "the largest coefficients of each chunk in a basis, signs of their mean (DeMo, arXiv 2411.19870)",
        "GradientExchange(comm, ChunkedTopK(k=8, chunk=256), ErrorFeedback(decay=0.999), basis=Hadamard(chunk=256), "
        'average="sign")',
        "k",
    ),
    "in-basis-two-bit": Method(
        "the largest coefficients of each chunk in a basis, in two bits, signs of their mean",
        'GradientExchange(comm, Quantised(ChunkedTopK(k=8, chunk=256), form="two_bit"), ErrorFeedback(decay=0.999), '
        'basis=Hadamard(chunk=256), average="sign")',
        "k",
    ),
    "local-dense": Method(
        "local steps, dense",
        "GradientExchange(comm, Dense(), NoFeedback())",
        "every",
        "every=10",
    ),
    "diloco": Method(
        "local steps, dense, with Nesterov momentum (DiLoCo, arXiv 2311.08105)",
        "GradientExchange(comm, Dense(), NoFeedback())",
        "every",
        "every=10, rate=0.3, momentum=0.9, nesterov=True",
    ),
    "local-few-bits": Method(
        "local steps, every value in few bits",
        "GradientExchange(comm, bits=4)",
        "every",
        "every=10",
    ),
    "muloco": Method(
        "local steps, every value in few bits, with Nesterov momentum (MuLoCo, arXiv 2505.23725)",
        "GradientExchange(comm, bits=4)",
        "every",
        "every=30, rate=0.7, momentum=0.6, nesterov=True",
    ),
    "local-sparse": Method(
        "local steps, the largest entries of each chunk in two bits, their mean over contributors (arXiv 2508.15706)",
        'GradientExchange(comm, Quantised(ChunkedTopK(k=128, chunk=4096), form="two_bit"), ErrorFeedback(decay=0.95), '
        'average="contributors")',
        "every",
        "every=10",
    ),
    "topk-allgather": Method(
        "the largest entries, by an allgather",
        "GradientExchange(comm, TopK(density=0.01), collective=sparse_allgather)",
        "density",
    ),
    "gtopk": Method(
        "the largest entries of the sum (gTop-k, arXiv 1901.04359)",
        "GradientExchange(comm, TopK(density=0.01), collective=gtopk_allreduce)",
        "density",
    ),
    "sidco": Method(
        "entries above an estimated threshold (SIDCo, arXiv 2101.10761)",
        'GradientExchange(comm, SIDCo(density=0.01, distribution="exponential", stages=4, adaptation="control"), '
        "collective=sparse_allgather)",
        "density",
    ),
    "adacomp": Method(
        "AdaComp (arXiv 1712.02679), in its bins by the kind of layer",
        "GradientExchange(comm, lambda name, shape: Dense() if len(shape) == 1 else "
        "AdaComp(50 if len(shape) == 4 else 500), collective=sparse_allgather)",
    ),
    "aggregation-aware": Method(
        "entries that other ranks send as well (aggregation-aware selection, ICNCC 2018)",
        'GradientExchange(comm, AggregationAware(density=0.01, metric="support"), '
        "collective=partial(sparse_allreduce, votes=False))",
        "density",
    ),
    "step-ahead": Method(
        "the largest entries, of a gradient ahead by the residual (arXiv 2008.05823)",
        "GradientExchange(comm, TopK(density=0.01), StepAhead(rate, momentum), sparse_allgather)",
        "density",
    ),
}


def add(name: str, text: str, line: str, number: str = "", outer: str = "") -> None:
    """Add a method of one benchmark alone, such as a line that a user gives."""
    METHODS[name] = Method(text, line, number, outer)


# A number, True, False or a word.
_VALUE = re.compile(r"(\d+(\.\d+)?(e-?\d+)?|[^\W\d]\w*)\Z")


def method(name: str) -> Method:
    """Return the method of a name, with its number and settings in the line.

    Raises ValueError for a name or a setting that there is not.

    >>> method("topk-0.05").line
    'GradientExchange(comm, TopK(density=0.05))'
    """
    if name in METHODS:
        return METHODS[name]
    stem, _, given = name.partition(":")
    parts = re.fullmatch(r"(.+?)(?:-(\d+(?:\.\d+)?))?", stem)
    kind, number = parts.groups() if parts else ("", None)
    if kind not in METHODS or (number and not METHODS[kind].number):
        raise ValueError(
            f"method is {name!r}: expected one of {', '.join(METHODS)}, with a number or settings"
        )
    found = METHODS[kind]
    settings = dict(each.partition("=")[::2] for each in given.split(",") if each)
    for key, value in (({found.number: number} if number else {}) | settings).items():
        in_line = rf"\b{re.escape(key)}="
        if not (re.search(in_line, found.line + found.outer) and _VALUE.match(value)):
            raise ValueError(
                f"method is {name!r}: expected settings such as density=0.1, of {found.line or 'none'}"
            )
        old = rf'{in_line}("?)\w[\w.]*'
        new = rf"{key}=\g<1>{value}"
        found = found._replace(
            line=re.sub(old, new, found.line), outer=re.sub(old, new, found.outer)
        )
    return found


def construct(name: str, comm: Any, **names: Any) -> Any:
    """Return what the line of a method constructs; `names` are further names of the line, or replace some."""
    import collectives
    import mpicomp

    known = vars(mpicomp) | vars(collectives)
    return eval(method(name).line, {**known, "partial": partial, "comm": comm, **names})


@cache
def outer_settings(name: str) -> dict[str, Any]:
    """Return the arguments of a method's OuterLoop; none without local steps."""
    found: dict[str, Any] = eval(f"dict({method(name).outer})")
    return found
