"""Are the parts of an exchange what they should be: errors in the caller's words, before any message."""

from collections.abc import Mapping
from functools import partial
from numbers import Integral
from typing import Any

from mpicomp.exchange.bucket import Collective
from mpicomp.exchange.layout import Station


def check_part(name: str, part: Any, attributes: tuple[str, ...], expected: str) -> None:
    """Raise TypeError unless `part` is an object with these attributes."""
    if isinstance(part, type):
        raise TypeError(f"{name} is the class {part.__name__}: expected an object, {expected}")
    known = dir(type(part))  # a property may raise: that of a null communicator does, and its first use says it better
    if not all(attribute in known or hasattr(part, attribute) for attribute in attributes):
        raise TypeError(f"{name} is {part!r}: expected {expected}")


def check_pair(compressor: Any, feedback: Any, dense: Collective | None) -> None:
    """Raise TypeError unless these can work together."""
    check_part("compressor", compressor, ("compress",), "a compressor such as TopK(density=0.01)")
    check_part("feedback", feedback, ("correct", "keep", "result"), "ErrorFeedback() or NoFeedback()")
    if getattr(feedback, "averaging_period", None) and dense is None:
        raise TypeError(f"{type(feedback).__name__} averages residuals: give dense=dense_allreduce")


def check_collective(collective: Any) -> None:
    """Raise TypeError unless this may be a collective that gives every rank the sum."""
    check_part("collective", collective, ("__call__",), "a collective such as gtopk_allreduce")
    call = collective
    while isinstance(call, partial):
        call = call.func
    if not getattr(call, "sums_everywhere", True):
        raise TypeError(
            f"collective is {call.__name__}, which does not give every rank the sum of all: expected gtopk_allreduce, "
            "sparse_allreduce or sparse_allgather"
        )


def check_sizes(**sizes: Any) -> None:
    """Raise TypeError or ValueError unless these are integers of at least 0."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, Integral):
            raise TypeError(f"{name} is {size!r}: expected an integer")
        if size < 0:
            raise ValueError(f"{name} is {size}: expected at least 0")


def check_outs(outs: Any, arrays: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError unless these are arrays for results, by the names of gradients."""
    if not isinstance(outs, Mapping):
        raise TypeError(f"out is {type(outs).__name__}: expected a dict by name, as the gradients are")
    if unknown := [name for name in outs if name not in arrays]:
        raise ValueError(f"out has {unknown[0]!r}: expected names of the gradients that are handed over")


def each_its_own(stations: list[Station]) -> list[Station]:
    """Return the stations; ValueError where two vectors share a feedback."""
    feedbacks = [pipeline.feedback for station in stations for pipeline in station.bucket.pipelines]
    if len({id(feedback) for feedback in feedbacks}) < len(feedbacks):
        raise ValueError("choose returned one feedback for two tensors: expected an object of its own for each")
    return stations
