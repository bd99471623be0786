"""The functions of this library that a gradient goes through in one step of the exchange.

    mpirun -n 4 python -m mpi4py benchmarks/way_of_a_gradient.py

Traces one steady step (two came before it) of

    exchange = GradientExchange(comm, TopK(density=0.001), ErrorFeedback(), gtopk_allreduce)
    mean = exchange(gradient)

on one array, with sys.setprofile on rank 0, and prints two counts.

1. The way of the gradient: the functions of `mpicomp` and `collectives` between the
   call of the exchange and the call of the collective, and from the collective's result
   to the return; in the order of the calls, with their files. A function counts when
   one of its arguments, `self` included, is an array, a SparseVector, a Correction, a
   Mean, a Step, a state of a bucket in a step (Started, Sum), or a list, tuple or
   dict that holds one. Attributes of arguments are not looked at. Not counted are

   * properties, comprehensions, generator expressions, lambdas, and dunder methods but __init__ and __call__;
   * the leaves: arrays/, vector.py and the kernels, which compute, and call none of the others;
   * the collective itself, the methods of its Request, and the agreement to keep the step (`all_or_none`), with all
     that these call.

   A function that is called several times counts once. A file is entered again when a call goes to it after calls to
   other files; the return to a caller is no entry.

2. All functions of the two packages that the step calls, transport, properties and
   dunder methods included; comprehensions, generator expressions and lambdas are parts
   of the function that has them.

Other threads are not traced: kernels run their pieces on them. Rank 0 may get a message
earlier or later in another run, so the second count varies a little.
"""

import importlib
import inspect
import pkgutil
import sys
from functools import cached_property
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, get_args

import numpy as np
from mpi4py import MPI

import collectives
import mpicomp
from collectives import GradientExchange, Request, gtopk_allreduce, gtopk_iallreduce
from collectives.calls.all_or_none import all_or_none
from collectives.calls.call import Sum
from collectives.calls.collective import Collective
from collectives.exchange.step import Started, Step
from mpicomp import ErrorFeedback, SparseVector, TopK
from mpicomp.correction import Correction
from mpicomp.means import Mean

LENGTH = 1_000_000
ROOTS = {
    Path(package.__file__).parent: package.__name__
    for package in (mpicomp, collectives)
}
CARRIERS = np.ndarray, SparseVector, Step, Started, Sum, Correction, *get_args(Mean)
# the form in which the exchange calls gtopk_allreduce
COLLECTIVE = gtopk_iallreduce.__code__
LEAVES = "mpicomp/arrays/", "mpicomp/vector.py", "mpicomp/kernels/"
TRANSPORT = {
    COLLECTIVE,
    inspect.unwrap(all_or_none).__code__,
    Collective.__call__.__code__,  # the agreement
    *(each.__code__ for _, each in inspect.getmembers(Request, inspect.isfunction)),
}


class Visit(NamedTuple):
    """A call of a function of the library: counted if on the way of the gradient; after: behind the collective."""

    file: str
    function: str
    counted: bool
    after: bool


class Tracer:
    """Records the calls of this thread; to be given to sys.setprofile."""

    def __init__(self) -> None:
        self.visits: list[Visit] = []
        self._files: dict[str, str | None] = {}
        self._accessors = accessors()
        # that were seen: a generator that goes on is no new call
        self._frames: dict[int, FrameType] = {}
        # the outermost frame whose calls are not looked into
        self._hidden: FrameType | None = None
        self._after = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """See sys.setprofile."""
        if event == "return" and frame is self._hidden:
            self._hidden = None
        if event != "call" or id(frame) in self._frames:
            return
        self._frames[id(frame)] = frame
        code, file = frame.f_code, self._file(frame.f_code)
        if file is None or code.co_name in (
            "<lambda>",
            "<listcomp>",
            "<setcomp>",
            "<dictcomp>",
            "<genexpr>",
            "<module>",
        ):
            return
        self._after |= code is COLLECTIVE
        counted = (
            self._hidden is None
            and code not in TRANSPORT
            and not file.startswith(LEAVES)
            and self._is_function(code)
            and carries(frame)
        )
        self.visits.append(
            Visit(
                file, getattr(code, "co_qualname", code.co_name), counted, self._after
            )
        )
        if self._hidden is None and (
            code in TRANSPORT or file.startswith("mpicomp/kernels/")
        ):
            self._hidden = frame

    def _file(self, code: CodeType) -> str | None:
        """Return the file of a function of the library, by its package; None for any other function."""
        if code.co_filename not in self._files:
            path = Path(code.co_filename)
            found = [
                f"{name}/{path.relative_to(root)}"
                for root, name in ROOTS.items()
                if root in path.parents
            ]
            self._files[code.co_filename] = found[0] if found else None
        return self._files[code.co_filename]

    def _is_function(self, code: CodeType) -> bool:
        dunder = code.co_name.startswith("__") and code.co_name not in (
            "__init__",
            "__call__",
        )
        return code not in self._accessors and not dunder


def accessors() -> set[CodeType]:
    """Return the code of every property of the library."""
    found = set()
    for package in (mpicomp, collectives):
        for each in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if each.name in sys.modules:
                for _, kind in inspect.getmembers(
                    importlib.import_module(each.name), inspect.isclass
                ):
                    for member in vars(kind).values():
                        getter = member.fget if isinstance(member, property) else None
                        getter = (
                            member.func
                            if isinstance(member, cached_property)
                            else getter
                        )
                        found |= (
                            {getter.__code__} if hasattr(getter, "__code__") else set()
                        )
    return found


def carries(frame: FrameType) -> bool:
    """Return whether an argument of a call is, or directly holds, something that is made of the gradient."""
    code = frame.f_code
    stars = bool(code.co_flags & inspect.CO_VARARGS) + bool(
        code.co_flags & inspect.CO_VARKEYWORDS
    )
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + stars]:
        given = frame.f_locals.get(name)
        held = (
            given.values()
            if type(given) is dict
            else given
            if type(given) in (list, tuple)
            else ()
        )
        if isinstance(given, CARRIERS) or any(
            isinstance(each, CARRIERS) for each in held
        ):
            return True
    return False


def report(visits: list[Visit]) -> str:
    """Return the way of the gradient, and both counts, as text."""
    way = [visit for visit in visits if visit.counted]
    lines, width = [], max(len(visit.file) for visit in way)
    for after in (False, True):
        lines.append(
            "from the collective's result to the return"
            if after
            else "from the gradient to the collective"
        )
        part = [(visit.file, visit.function) for visit in way if visit.after == after]
        for file, function in dict.fromkeys(part):
            calls = part.count((file, function))
            lines.append(
                f"  {file:{width}}  {function}{f'  ({calls} calls)' if calls > 1 else ''}"
            )
    files = [file for file, _ in groupby(visit.file for visit in way)]
    functions, all_functions = ({visit[:2] for visit in each} for each in (way, visits))
    again = len(files) - len(set(files))
    lines.append(
        f"the way of the gradient: {len(functions)} functions in {len(set(files))} files; {again} times a file"
    )
    lines[-1] += " is entered again"
    all_files = {file for file, _ in all_functions}
    lines.append(
        f"all functions of the library, transport included: {len(all_functions)} in {len(all_files)} files"
    )
    return "\n".join(lines)


def main() -> None:
    """Trace a step, and print the report."""
    comm = MPI.COMM_WORLD
    exchange = GradientExchange(
        comm, TopK(density=0.001), ErrorFeedback(), gtopk_allreduce
    )
    gradient, tracer = (
        np.random.default_rng(comm.rank).standard_normal(LENGTH, np.float32),
        Tracer(),
    )
    for _ in range(2):
        exchange(gradient)
    comm.Barrier()
    sys.setprofile(tracer if comm.rank == 0 else None)
    exchange(gradient)
    sys.setprofile(None)
    if comm.rank == 0:
        print(report(tracer.visits))


if __name__ == "__main__":
    main()
