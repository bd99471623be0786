"""The three forms of a gradient: one array, a list of arrays that are one vector, or arrays by name."""

from collections.abc import Collection, Mapping, Set
from itertools import repeat
from operator import is_
from typing import Any

from collectives.exchange.names import canonical
from mpicomp.arrays import ByName
from mpicomp.tensors import ALONE, ARRAY, DICT, LIST, Form


def by_name(gradient: Any) -> tuple[Form, dict[str, Any]]:
    """Return the form of a gradient, and its arrays by name."""
    if isinstance(gradient, Mapping):
        return DICT, dict(gradient)
    if isinstance(gradient, (list, tuple)):
        return LIST, {
            f"item {number} of the list": array for number, array in enumerate(gradient)
        }
    return ARRAY, {ALONE: gradient}


def in_form(form: Form, results: dict[str, Any]) -> Any:
    """Return results by name in a form; a list in their order."""
    if form == DICT:
        return results
    return [*results.values()] if form == LIST else results[ALONE]


def check_same_form(
    form: Form,
    arrays: ByName,
    first: Form,
    names: Set[str],
    registered: Collection[str] = (),
) -> None:
    """Raise TypeError, KeyError or ValueError for gradients of another form or with other names than the first ones.

    registered: all names of the exchange, those that `hold` leaves out too.
    """
    if form != first:
        raise TypeError(
            f"got {form}: expected {first}, as in the first step of this exchange"
        )
    if not arrays.keys() <= names:
        name = min(arrays.keys() - names, key=str)
        if name in registered:
            raise KeyError(
                f"{name!r} is left out, by hold([...]): leave it out of the gradients as well, as in {{name: p.grad "
                "for name, p in model.named_parameters() if p.requires_grad}; hold() without it takes it up again"
            )
        raise KeyError(
            f"{name!r} is none of the tensors of the first step: {_remedy(str(name), names)}"
        )
    if form == LIST and len(arrays) < len(names):
        raise ValueError(
            f"got {len(arrays)} arrays: expected {len(names)}, as in the first step of this exchange"
        )


def _remedy(name: str, names: Collection[str]) -> str:
    other = next(
        (known for known in names if canonical(known) == canonical(name)), None
    )
    if other is None:
        return "use another exchange for it"
    return f"it was registered as {other!r}; take the names of all calls from one model, wrapped or not"


def outs_by_name(
    out: Any, form: Form, arrays: ByName, names: Set[str]
) -> dict[str, Any]:
    """Return the output buffers by name; raises TypeError or ValueError unless their form is that of the gradients.

    names: those of the exchange, of which each needs a gradient or a buffer.
    """
    out_form, outs = by_name(out)
    if out_form != form:
        raise TypeError(
            f"out is {type(out).__name__}: expected {form}, as the gradients are"
        )
    if form == LIST and len(outs) != len(arrays):
        raise ValueError(
            f"out is {len(outs)} arrays: expected a list of {len(arrays)}, as the gradients are"
        )
    if not outs.keys() <= arrays.keys():
        name = min(outs.keys() - arrays.keys(), key=str)
        raise ValueError(
            f"out has {name!r}: expected names of the gradients that are given"
        )
    if any(map(is_, outs.values(), repeat(None))):
        outs = {name: buffer for name, buffer in outs.items() if buffer is not None}
    missing = names - outs.keys() if len(outs) < len(names) else set()
    missing = {name for name in missing if arrays.get(name) is None}
    if missing:
        raise ValueError(
            f"got out= and no gradient of {sorted(missing)[:3]}, whose mean other ranks may change: expected a buffer "
            "for it in out; pass zeros as its gradient, or, if it is frozen, leave it out on all ranks by "
            "exchange.hold([...])"
        )
    return outs
