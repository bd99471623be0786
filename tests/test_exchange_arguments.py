"""The arguments of GradientExchange are refused by its constructor, in the words of the call."""

import re

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
