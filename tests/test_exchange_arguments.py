"""The arguments of GradientExchange are refused by its constructor, in the words of the call."""

import re
import sys
from types import ModuleType

import numpy as np
import pytest
from mpi4py import MPI

from collectives import GradientExchange
from mpicomp import Dense, Quantised, TopK


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, TypeError, "expected a compressor such as TopK(density=0.01), or bits=4"),
        (
            {"compressor": TopK(0.1), "bits": 4},
            ValueError,
            "compressor is TopK(density=0.1), and the collective sums all values",
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
    ],
)
def test_a_compressor_or_bits(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        GradientExchange(MPI.COMM_SELF, **arguments)


def test_all_values_in_few_bits_may_be_said_twice():
    exchange = GradientExchange(MPI.COMM_SELF, Dense(), bits=4)
    assert isinstance(exchange.compressor, Dense)


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
