"""The arguments of GradientExchange are refused by its constructor, in the words of the call."""

import re
import sys
from functools import partial
from types import ModuleType

import numpy as np
import pytest
from mpi4py import MPI

from collectives import GradientExchange, OuterLoop
from mpicomp import (
    AdaComp,
    AggregationAware,
    Dense,
    ErrorFeedback,
    Hadamard,
    MomentumCorrection,
    Quantised,
    SIDCo,
    TopK,
    WarmUp,
)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, TypeError, "expected a compressor such as TopK(density=0.01), or bits=4"),
        (
            {"compressor": TopK(0.1), "bits": 4},
            ValueError,
            "compressor is TopK(density=0.1), and bits=, or the collective, sends every value",
        ),
        (
            {"compressor": Quantised(TopK(0.1), "sign"), "bits": 8},
            ValueError,
            "compressor is Quantised(",
        ),
        *(
            ({"bits": bits}, ValueError, f"bits is {bits!r}: expected one of [8, 4, 2,")
            for bits in (3, 16, 0, True, 4.0, "4")
        ),
        ({"bits": 4, "log": "step.log"}, TypeError, "log is 'step.log': expected a"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        GradientExchange(MPI.COMM_SELF, **arguments)


def test_all_values_in_few_bits_may_be_said_twice():
    exchange = GradientExchange(MPI.COMM_SELF, Dense(), bits=4)
    assert isinstance(exchange.compressor, Dense)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            partial(TopK, densty=0.1),
            "TopK has no argument 'densty': expected density$",
        ),
        (
            partial(Quantised, TopK(k=1), from_="sign"),
            "Quantised .* expected form$",
        ),
        (partial(Dense, k=3), "Dense has no argument 'k': expected none$"),
        (partial(ErrorFeedback, decy=1), "ErrorFeedback .* expected decay$"),
        (partial(MomentumCorrection, mometum=1), "expected momentum$"),
        (partial(Hadamard, chnk=8), "Hadamard .* expected chunk$"),
        (
            partial(GradientExchange, MPI.COMM_SELF, bit=4),
            "GradientExchange .* expected bits$",
        ),
        (partial(OuterLoop, None, {}, evry=3), "OuterLoop .* expected every$"),
        (
            partial(TopK, 0.1, 0.2),
            r"TopK got 2 arguments by position: expected at most 1 \['density'\]; pass others by name",
        ),
        (partial(ErrorFeedback, 0.9), "ErrorFeedback got 1 arguments by position"),
    ],
)
def test_wrong_arguments_are_told_by_the_name_of_the_class(make, message):
    with pytest.raises(TypeError, match=message):
        make()


class Copied:
    """An array of a library whose from_dlpack copies, as JAX's does of memory that is not aligned."""

    __module__ = "copying"

    def __init__(self, values):
        self.values = values.copy()
        self.dtype = values.dtype
        self.shape = values.shape

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


@pytest.mark.parametrize("settings", [{"bits": 4}, {"compressor": TopK(k=5)}], ids=str)
@pytest.mark.parametrize("form", [lambda one: one, lambda one: {"a": one}])
def test_a_mean_is_complete_before_another_library_copies_it(
    monkeypatch, settings, form
):
    """Else the copy has what the new array's memory held."""
    library = ModuleType("copying")
    library.from_dlpack = Copied
    monkeypatch.setitem(sys.modules, "copying", library)
    exchange = GradientExchange(MPI.COMM_SELF, small=0, **settings)
    for _ in range(2):
        mean = exchange(form(Copied(np.full(3000, 2, np.float32))))
    mean = mean["a"] if isinstance(mean, dict) else mean
    assert np.count_nonzero(mean.values) == (3000 if "bits" in settings else 5)
    assert np.isin(np.round(mean.values), [0, 2, 4]).all()


def tensors_of(library, count):
    """Return `count` matrices by name, of NumPy or PyTorch."""
    arrays = {str(i): np.full((32, 2), i, np.float32) for i in range(count)}
    if library == "numpy":
        return arrays
    torch = pytest.importorskip("torch")
    return {name: torch.tensor(array) for name, array in arrays.items()}


def calls_of_a_step(library, count, settings):
    """Return the functions of the library that the third step of some tensors calls."""
    exchange = GradientExchange(MPI.COMM_SELF, small=0, **settings)
    gradients = tensors_of(library, count)
    called = []

    def note(frame, event, _):
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith(("mpicomp", "collectives")):
            called.append(frame.f_code.co_name)

    for _ in range(2):
        exchange(gradients, out=gradients)
    sys.setprofile(note)
    exchange(gradients, out=gradients)
    sys.setprofile(None)
    return called


@pytest.mark.parametrize(
    "settings",
    [
        {"bits": 4},
        {"compressor": TopK(density=0.1)},
        {"compressor": SIDCo(density=0.1)},
        {"compressor": AdaComp(32)},
        {"compressor": AggregationAware(density=0.1)},
    ],
    ids=str,
)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_step_of_numpy_or_torch_calls_no_function_for_each_tensor(library, settings):
    """Those took a tenth of a step of 54 tensors: a kernel leaves little of Python in the cache."""
    few, many = (len(calls_of_a_step(library, count, settings)) for count in (54, 160))
    assert 100 < many < few + 10  # SIDCo's depend on the values


def test_gradients_that_are_the_output_buffers_are_looked_at_once():
    exchange = GradientExchange(MPI.COMM_SELF, bits=4, small=0)
    gradients = tensors_of("numpy", 160)
    exchange(gradients, out=gradients)
    reshaped = []

    def note(_, event, function):
        if event == "c_call" and function.__name__ == "reshape":
            reshaped.append(function)

    sys.setprofile(note)
    exchange(gradients, out=gradients)
    sys.setprofile(None)
    assert 160 <= len(reshaped) < 170


def test_gradients_of_torch_are_taken_as_they_come():
    """Whether or not they are as the first step has described them."""
    torch = pytest.importorskip("torch")
    exchange = GradientExchange(MPI.COMM_SELF, Dense())
    plain = torch.arange(6.0).reshape(3, 2)
    freed, part = torch.ones(6), torch.ones(7)
    inside = part[1:].reshape(3, 2)  # not at the start of its memory
    for tensor in (freed, part):
        tensor.untyped_storage().resize_(0)
    for gradient in (
        plain,
        plain.clone().requires_grad_() * 1,
        plain.t().contiguous().t(),
    ):
        (mean,) = exchange({"a": gradient}).values()
        assert (type(mean), mean.tolist()) == (torch.Tensor, plain.tolist())
    for gradient, message in (
        (plain.bfloat16(), "is bfloat16 of torch: expected float32 of torch"),
        (plain.numpy(), "is float32 of numpy: expected float32 of torch as in the"),
        (plain.t(), r"of shape \(2, 3\): expected float32 of shape \(3, 2\)"),
        (torch.nn.Parameter(plain), "is a parameter, not a gradient"),
        (freed.view(3, 2), "no memory of its own"),
        (inside, "no memory of its own"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            exchange({"a": gradient})
    with pytest.raises(ValueError, match="not C-contiguous"):
        exchange({"a": plain}, out={"a": plain.t().contiguous().t()})


def kinds_of_torch():
    """Return arrays of PyTorch and NumPy that have the same values."""
    torch = pytest.importorskip("torch")
    plain = torch.arange(6.0)
    return {
        "float32 of torch": plain,
        "bfloat16 of torch": plain.bfloat16(),
        "float32 of numpy": plain.numpy(),
        "float32 of copying": Copied(plain.numpy()),
    }


@pytest.mark.parametrize("form", [lambda it: it, lambda it: [it], lambda it: {"a": it}])
def test_a_torch_tensor_stays_one_in_later_steps(form):
    """The kind of the first step, also where the values need no conversion."""
    kinds = kinds_of_torch()
    for kind, first in kinds.items():
        exchange = GradientExchange(MPI.COMM_SELF, Dense(), small=0)
        exchange(form(first))
        for other, later in kinds.items():
            if other == kind:
                exchange(form(later))
                continue
            with pytest.raises(
                ValueError, match=f"is {other}: expected {kind} as in the first step"
            ):
                exchange(form(later))
        assert exchange.steps == 2


def test_errors_of_what_is_left_out_registered_and_not_contiguous_name_the_remedy():
    gradients = {"a": np.ones((2, 3)), "b": np.ones(4)}
    exchange = GradientExchange(MPI.COMM_SELF, TopK(0.5))
    exchange.register(gradients)
    with pytest.raises(RuntimeError, match="expected an exchange for each model"):
        exchange.register(gradients)
    with pytest.raises(ValueError, match="if it is out=, leave that out, and copy"):
        exchange(gradients, out={"a": np.ones((3, 2)).T, "b": np.ones(4)})
    exchange.hold(["a"])
    with pytest.raises(
        KeyError, match=r"'a' is left out, by hold\(.*if p.requires_grad"
    ):
        exchange(gradients)
    del gradients["a"]
    assert exchange(gradients).keys() == {"b"}
    exchange.hold([])
    gradients["a"] = np.ones((2, 3))
    assert exchange(gradients).keys() == {"a", "b"}


def test_warm_up_of_few_bits_names_the_order_that_works():
    with pytest.raises(
        ValueError, match=r"Quantised\(WarmUp\(TopK\(0\.001\)\), form\)"
    ):
        WarmUp(Quantised(TopK(0.1), "sign"))
    assert Quantised(WarmUp(TopK(0.1)), "sign").compress(np.arange(8.0)).nnz
