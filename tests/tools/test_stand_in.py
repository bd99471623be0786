"""The stand-in for CuPy is as strict as CuPy, and counts what a step starts on the device and waits for."""

import ast
import inspect
import json
import subprocess
import sys
import threading
from pathlib import Path

import cupy_signatures
import numpy as np
import pytest
from devices import counted, has_cupy_wheel, real_cupy

from mpicomp import AdaComp, AggregationAware, ChunkedTopK, Quantised, SIDCo, TopK
from mpicomp.correction import Correction
from mpicomp.kernels import Summands

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(
    real_cupy() is not None, reason="there is a GPU, and no stand-in"
)


@pytest.mark.skipif(
    not has_cupy_wheel(), reason="no wheel of CuPy is installed: make test-cupy"
)
def test_the_signatures_are_those_of_the_wheel():
    command = [sys.executable, str(TESTS / "cupy_signatures.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" 0 differ\n")


def test_all_that_the_stand_in_answers_to_is_compared(cupy):
    names = json.loads(cupy_signatures.FILE.read_text())
    assert sorted(cupy.surface()) == sorted(names)
    assert [name for name, parameters in names.items() if parameters is None] == []


def test_the_stand_in_has_the_parameters_of_cupy_in_their_places(cupy):
    names = json.loads(cupy_signatures.FILE.read_text())
    for name, owner in (
        ("Stream", cupy.cuda.Stream),
        ("Event", cupy.cuda.Event),
        ("Device", cupy.cuda.Device),
    ):
        ours = list(inspect.signature(owner).parameters)
        theirs = [
            each.strip("= ") for each in names[f"cuda.{name}"].strip("()").split(",")
        ]
        assert ours == theirs[: len(ours)], name


def test_what_cupy_does_not_take_is_refused(cupy):
    array = cupy.ones(3, np.float32)
    for call in (
        lambda: np.max(array, initial=0),
        lambda: cupy.unpackbits(array.view(np.uint8), count=3),
        lambda: np.add(array, array, where=array > 0),
        lambda: array.astype(np.float64, subok=True, unsafe=True),
        lambda: cupy.asarray(array, like=array),
    ):
        with pytest.raises(TypeError, match="CuPy's"):
            call()
    with pytest.raises(TypeError, match="the stand-in for CuPy has no nextafter"):
        np.nextafter(array, array)


# Launches, and synchronisations, of one call on 100,000 float32 values.
MOST = {
    "top-k": (TopK(0.01), 5, 1),
    "chunks": (ChunkedTopK(64, 4096), 2, 1),
    "AdaComp": (AdaComp(50), 4, 1),
    "aggregation-aware": (AggregationAware(0.01), 14, 3),
    "chunks, two bits": (Quantised(ChunkedTopK(64, 4096), "two_bit"), 5, 2),
    **{
        f"SIDCo {fit}": (SIDCo(0.01, fit), 6, 1)
        for fit in ("exponential", "pareto", "gamma")
    },
}


@pytest.mark.parametrize("name", MOST)
def test_a_compressor_starts_and_waits_for_few_things(cupy, name):
    compressor, launches, synchronisations = MOST[name]
    for seed in range(2):  # the first call compiles, and SIDCo adapts
        gradient = cupy.asarray(
            np.random.default_rng(seed).laplace(size=100_000).astype(np.float32)
        )
        with counted(cupy) as found:
            vector = compressor.compress(gradient, gradient=gradient)
        compressor.observe(vector)
    assert found.launches <= launches, found
    assert found.synchronisations <= synchronisations, found


@pytest.mark.parametrize("tensors", [1, 54, 160])
def test_aggregation_takes_as_many_launches_for_any_number_of_tensors(cupy, tensors):
    bounds = np.linspace(0, 100_000, tensors + 1).astype(int).tolist()
    compressor = AggregationAware(0.01)
    for seed in range(2):
        drawn = np.random.default_rng(seed).laplace(size=100_000)
        given = cupy.asarray(drawn.astype(np.float32))
        with counted(cupy) as found:
            vector = compressor.select(Correction([given], given), bounds)
        compressor.observe(vector)
    assert found.launches <= 14, found
    assert found.synchronisations <= 4, found


def test_a_selection_takes_five_launches_and_waits_once(cupy):
    from mpicomp.kernels import device

    rows = [0, 100_000], [1000], [100_000], [1000]
    a, b = (
        cupy.asarray(
            np.random.default_rng(seed).laplace(size=100_000).astype(np.float32)
        )
        for seed in (0, 1)
    )
    for select in (
        lambda: device.largest(a, 1000),
        lambda: device.largest_in_segments(
            cupy.empty_like(a), *rows, summands=Summands(b, 1.0, [a])
        ),
    ):
        with counted(cupy) as found:
            select()
        assert (found.launches, found.synchronisations) == (5, 1), found


def test_a_thread_has_memory_of_its_own_for_the_arguments_of_a_kernel(
    cupy, monkeypatch
):
    """The driver reads it without Python's lock."""
    from mpicomp.kernels import device

    places = []

    def launch_kernel(*args):
        places.append(args[-2])

    monkeypatch.setattr(device.compiling.driver, "launchKernel", launch_kernel)
    a = cupy.ones(9, np.float32)
    for _ in range(2):
        device.add(a, a, a)
    other = threading.Thread(target=device.add, args=(a, a, a))
    other.start()
    other.join()
    assert places[0] == places[1] != places[2]


@pytest.mark.parametrize(
    "path", sorted(TESTS.glob("mpi/test_*.py")), ids=lambda path: path.stem
)
def test_a_test_under_mpi_decides_before_its_body_whether_it_is_skipped(path):
    """Ranks outside of its group do not enter the body, so they would not skip it: a marker or a fixture decides."""
    tests = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    bodies = {test.name: ast.Module(test.body, []) for test in tests}
    skipping = [
        name
        for name, body in bodies.items()
        for node in ast.walk(body)
        if isinstance(node, ast.Attribute) and node.attr in ("skip", "importorskip")
    ]
    assert not skipping


def test_subnormal_numbers_are_flushed_as_by_cupy(cupy):
    least = np.finfo(np.float32).smallest_subnormal
    array = cupy.asarray(np.array([least, -least, 1], np.float32))
    zeros = np.array([0, -0.0, 1], np.float32)
    assert np.abs(array).get().tolist() == [0, 0, 1]
    assert (array * 1).get().tobytes() == zeros.tobytes()
    assert array.copy().get().tolist() == [least, -least, 1]
    assert array.astype(np.float64).get().tolist() == [0, 0, 1]
    assert (array != 0).get().tolist() == [False, False, True]
    assert int((array.astype(np.float16) != 0).sum()) == 1
    wide = cupy.asarray(np.array([least], np.float64))
    assert (wide * 0.5).get().tolist() == [least * 0.5]
    assert wide.astype(np.float32).get().tolist() == [0]
