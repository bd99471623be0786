"""The table of training methods: every line evaluates, and names with numbers and settings change it."""

import ast

import numpy as np
import pytest
from descents import NAMES
from mpi4py import MPI

from collectives import GradientExchange, OuterLoop
from mpicomp_bench.methods import METHODS, construct, method, outer_settings

EXCHANGES = [
    name for name, each in METHODS.items() if each.line.startswith("GradientExchange")
]


@pytest.mark.parametrize("name", EXCHANGES)
def test_the_line_of_every_exchange_constructs_it(name):
    assert isinstance(
        construct(name, MPI.COMM_SELF, rate=0.1, momentum=0.9, **NAMES),
        GradientExchange,
    )


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_text_and_arguments_that_exist(name):
    found = METHODS[name]
    assert found.text
    assert not found.number or f"{found.number}=" in found.line + found.outer
    # PyTorch's run in tests/pytorch
    assert name in EXCHANGES or all(ast.unparse(ast.parse(f"hook({found.line})")))


@pytest.mark.parametrize("name", [name for name in EXCHANGES if METHODS[name].outer])
def test_local_steps_take_the_number_behind_the_name(name):
    settings = outer_settings(f"{name}-3")
    assert settings["every"] == 3
    OuterLoop(construct(name, MPI.COMM_SELF), {"all": np.zeros(9000, "f4")}, **settings)


def test_a_number_and_settings_replace_arguments_of_the_line():
    assert method("few-bits-8").line == "GradientExchange(comm, bits=8)"
    changed = method(
        "in-basis-two-bit-2:chunk=64,form=sign,decay=0.9,basis=Cosine"
    ).line
    assert (
        'Quantised(ChunkedTopK(k=2, chunk=64), form="sign"), ErrorFeedback(decay=0.9)'
        in changed
    )
    assert "basis=Cosine(chunk=64)" in changed


@pytest.mark.parametrize(
    "name",
    [
        "sgd",
        "topk-",
        "adacomp-3",
        "dense-2",
        "dense:bits=4",
        "topk:k=3",
        "topk:density",
        "topk:density=(1)",
    ],
)
def test_a_name_or_setting_that_there_is_not_is_an_error(name):
    with pytest.raises(ValueError, match=r"method is .*: expected"):
        method(name)
