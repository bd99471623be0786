"""`mpicomp bench exchange`: one step from gradient to result, compared with MPI's dense allreduce in the same run."""

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from collectives import GradientExchange, OuterLoop, gtopk_allreduce, sparse_allreduce
from mpicomp import ErrorFeedback, TopK
from mpicomp_bench.bench.compressors import COMPRESSORS, SETTLING_CALLS
from mpicomp_bench.bench.data import FAMILIES
from mpicomp_bench.bench.suite import Options, Suite
from mpicomp_bench.measuring import Contestant, Row, compare, read_once
from mpicomp_bench.methods import METHODS, construct, method, outer_settings
from mpicomp_bench.options import add_list, share

Shape = tuple[int, ...]

ABOUT = """\
Rows: the selection alone, the selection and the sum of the selected entries, and a whole step of
GradientExchange with error feedback, by what it returns: a SparseVector (sparse=True), a dense
mean in a given array (out=), or in a new one. With --tensors the gradient is that of a model: its
tensors by name, each selected separately, beside one vector of the same length. With --compressors
the rows are whole steps with those, settled, on layers of different scales. With --methods the rows
are whole steps by the methods of `mpicomp explain --train` that write to out=, and a copy:
few-bits-4 is bits=4, in-basis-two-bit-8 coefficients in a basis; of local-few-bits-10 a row is the
exchange after ten steps. All calls are interleaved; a time is that of the slowest rank, from a
common start. The floor is one read of the gradient by all ranks at the same time.
"""

EXAMPLES = """
mpirun -n 4 mpicomp bench exchange --length 1e6 --density 0.01 --repeats 3 --json p4.json
mpirun -n 4 mpicomp bench exchange --methods few-bits-4 in-basis-8 local-few-bits-10
"""
# Methods that are an exchange of this library.
EXCHANGES = [
    name for name, each in METHODS.items() if each.line.startswith("GradientExchange")
]


def gpt_shapes(width: int) -> dict[str, Shape]:
    """Return the shapes of the tensors of a small GPT by name, in the order of the model: 54, with 3.2e6 values."""
    layers = {
        "norm1": (width,),
        "attention.qkv": (3 * width, width),
        "attention.projection": (width, width),
        "norm2": (width,),
        "mlp.expansion": (4 * width, width),
        "mlp.projection": (width, 4 * width),
    }
    shapes: dict[str, Shape] = {
        "token_embedding": (65, width),  # characters
        "position_embedding": (128, width),
    }
    for block in range(4):
        for name, shape in layers.items():
            shapes |= {
                f"block{block}.{name}.weight": shape,
                f"block{block}.{name}.bias": shape[:1],
            }
    head = {
        "norm.weight": (width,),
        "norm.bias": (width,),
        "head.weight": (65, width),
    }
    return {**shapes, **head, "head.bias": (65,)}


# Shapes of the tensors of two models, of 3.2e6 and 25e6 parameters.
TENSORS = {"gpt": gpt_shapes(256), "wide-gpt": gpt_shapes(718)}


def length_of(tensors: str) -> int:
    """Return the number of values of a model, by its name in `TENSORS`."""
    return sum(int(np.prod(shape)) for shape in TENSORS[tensors].values())


def rows(options: Options, comm: Any) -> Iterator[Row]:
    """Yield the comparisons of every density; each rank's gradient is `length` float32."""
    family = "layers" if options.compressors else "normal"
    gradient = FAMILIES[family](np.random.default_rng([1, comm.rank]), options.length)
    dense = {
        "MPI_Allreduce": partial(comm.Allreduce, gradient, np.empty_like(gradient))
    }
    floor = read_once(gradient)
    if options.methods:
        shapes = TENSORS.get(options.model, {"gradient": gradient.shape})
        copy = partial(np.copyto, np.empty_like(gradient), gradient)
        steps = [Contestant("a copy of the gradient", copy)]
        steps += [method_step(comm, gradient, shapes, name) for name in options.methods]
        yield from compare(steps, dense, options.repeats, comm, floor=floor)
        return
    for density in options.density:
        if options.compressors:
            given = (
                tensors_of(gradient, TENSORS[options.model])
                if options.model
                else gradient
            )
            steps = [
                compressed_step(comm, given, density, name)
                for name in options.compressors
            ]
        elif options.model:
            steps = model_steps(comm, gradient, density, TENSORS[options.model])
        else:
            steps = vector_steps(comm, gradient, density)
        named = [step._replace(name=f"{density:g} {step.name}") for step in steps]
        yield from compare(named, dense, options.repeats, comm, floor=floor)


def vector_steps(comm: Any, gradient: Any, density: float) -> list[Contestant]:
    """Return the contestants for one vector: the selection, the sum of the selected entries, and whole steps."""
    select = partial(TopK(density=density).compress, gradient)
    return [
        Contestant("selection alone", select),
        Contestant(
            "selection, sparse_allreduce", lambda: sparse_allreduce(select(), comm)
        ),
        Contestant(
            "selection, gtopk_allreduce", lambda: gtopk_allreduce(select(), comm)
        ),
        *exchanges(comm, gradient, density, sparse_allreduce, "GradientExchange"),
        *exchanges(
            comm, gradient, density, gtopk_allreduce, "GradientExchange by gTop-k"
        ),
    ]


def exchanges(
    comm: Any, gradient: Any, density: float, collective: Any, name: str
) -> list[Contestant]:
    """Return steps of `GradientExchange` on one vector, by `name` and result; each has its own residual.

    The gradient is copied to the array of a residual in place before each turn,
    untimed.
    """
    in_place, sparse, out, dense = (
        GradientExchange(
            comm, TopK(density=density), ErrorFeedback(in_place=first), collective
        )
        for first in (True, False, False, False)
    )
    own = gradient.copy()
    refill = partial(np.copyto, src=gradient)
    first = f"{name} residual in place, sparse mean"
    return [
        Contestant(
            first, partial(in_place, own, sparse=True), before=partial(refill, own)
        ),
        Contestant(f"{name}, sparse mean", partial(sparse, gradient, sparse=True)),
        Contestant(
            f"{name}, mean in out=", partial(out, gradient, out=np.empty_like(gradient))
        ),
        Contestant(f"{name}, new dense mean", partial(dense, gradient)),
    ]


def model_steps(
    comm: Any, gradient: Any, density: float, shapes: dict[str, Shape]
) -> list[Contestant]:
    """Return steps of `GradientExchange` on a model's tensors by name, and on one vector of the same length."""
    tensors = tensors_of(gradient, shapes)
    buffers = tensors_of(np.empty_like(gradient), shapes)
    sparse, out, dense = (
        GradientExchange(comm, TopK(density=density)) for _ in range(3)
    )
    name = f"{len(shapes)} tensors"
    return [
        Contestant(f"{name}, sparse means", partial(sparse, tensors, sparse=True)),
        Contestant(f"{name}, means in out=", partial(out, tensors, out=buffers)),
        Contestant(f"{name}, new dense means", partial(dense, tensors)),
        *exchanges(comm, gradient, density, sparse_allreduce, "one vector"),
        local_round(
            comm,
            tensors_of(gradient.copy(), shapes),
            f"local-sparse-1:k={max(1, round(4096 * density))}",
            f"{name}, a round of OuterLoop",
        ),
    ]


def tensors_of(vector: Any, shapes: dict[str, Shape]) -> dict[str, Any]:
    """Return the consecutive parts of a vector by name."""
    ends = np.cumsum([0, *(np.prod(shape) for shape in shapes.values())]).tolist()
    parts = zip(shapes.items(), pairwise(ends), strict=True)
    return {
        name: vector[first:end].reshape(shape) for (name, shape), (first, end) in parts
    }


def compressed_step(comm: Any, gradient: Any, density: float, name: str) -> Contestant:
    """Return a whole step of a vector, or of tensors by name, with a compressor whose state has settled."""
    new = partial(COMPRESSORS[name], density)
    exchange = GradientExchange(
        comm, (lambda *tensor: new()) if isinstance(gradient, dict) else new()
    )
    step = partial(exchange, gradient, sparse=True)
    for _ in range(SETTLING_CALLS):
        step()
    return Contestant(f"{name}, sparse mean", step, before=step)


def method_step(
    comm: Any, gradient: Any, shapes: dict[str, Shape], name: str
) -> Contestant:
    """Return a whole step of a model's tensors by a method, or a round of its local steps."""
    if outer_settings(name):
        parameters = tensors_of(gradient.copy(), shapes)
        return local_round(comm, parameters, name, f"{name}, a round")
    exchange = construct(name, comm, rate=0.1, momentum=0.9)
    buffers = tensors_of(np.empty_like(gradient), shapes)
    step = partial(exchange, tensors_of(gradient, shapes), out=buffers)
    return Contestant(name, step)


def local_round(
    comm: Any, parameters: dict[str, Any], method: str, name: str
) -> Contestant:
    """Return a round of local steps, each after an untimed step of training."""
    for array in parameters.values():
        comm.Bcast(array)
    settings = outer_settings(method) | {"every": 1}
    outer = OuterLoop(construct(method, comm), parameters, **settings)
    rng = np.random.default_rng([2, comm.rank])
    noise = {
        each: rng.standard_normal(array.shape, np.float32)
        for each, array in parameters.items()
    }

    def train() -> None:
        for each, array in parameters.items():
            np.add(array, noise[each], out=array)

    return Contestant(name, outer.step, before=train)


def exchange_name(text: str) -> str:
    """Return the name of a method that is an exchange of this library."""
    try:
        is_one = method(text).line.startswith("GradientExchange")
    except ValueError:
        is_one = False
    if not is_one:
        raise argparse.ArgumentTypeError(
            f"got {text!r}: expected one of {', '.join(EXCHANGES)}, with a number as in few-bits-4 or local-few-bits-10"
        )
    return text


def add_options(parser: Any) -> None:
    """Add the options of the suite."""
    shown = ", ".join(
        f"{name} ({len(shapes)} of {length_of(name):g} values)"
        for name, shapes in TENSORS.items()
    )
    add_list(
        parser,
        "--density",
        [0.001, 0.01],
        "fractions of entries each rank contributes ",
        type=share,
    )
    add_list(
        parser,
        "--compressors",
        [],
        "compare whole steps with: ",
        choices=list(COMPRESSORS),
    )
    about = "compare whole steps by methods, such as few-bits-4 or local-few-bits-10 "
    add_list(parser, "--methods", [], about, type=exchange_name)
    about = f"tensors of a model: {shown} (one vector of --length)"
    parser.add_argument("--tensors", dest="model", choices=list(TENSORS), help=about)


def complete(options: Options, comm: Any) -> None:
    """Set the length to that of the model."""
    if options.model:
        options.length = length_of(options.model)


SUITE = Suite(
    help="selection, collective and whole steps, against MPI's dense allreduce",
    about=ABOUT,
    examples=EXAMPLES,
    add_options=add_options,
    rows=rows,
    length=25_000_000,
    refuse=complete,
)
