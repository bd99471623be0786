"""Settings that all tests share."""

import sys
from pathlib import Path

import pytest
from devices import cupy_for_tests, layers
from hypothesis import settings

TESTS = Path(__file__).parent
BENCHMARKS = TESTS.parent / "benchmarks"
TRAINING = TESTS.parent / "experiments" / "training"
# that call most kernels for all formats: half of all tests
FOR_ALL_FORMATS = [
    *(TESTS / "cuda").glob("test_*.py"),
    *(
        TESTS / "mpicomp" / f"test_{name}.py"
        for name in (
            "kernels",
            "device",
            "every_compressor",
            "compressor_state",
            "few_bits",
            "codec",
        )
    ),
]
# whose modules import each other
sys.path += [str(BENCHMARKS), str(TRAINING)]
# a first call compiles: time is no verdict
settings.register_profile("house", deadline=None, print_blob=True)
settings.load_profile("house")


@pytest.fixture(scope="module")
def cupy():
    """Return CuPy, or its stand-in."""
    return cupy_for_tests()


def pytest_collection_modifyitems(items):
    """Put tests that compile the same kernels beside each other: of two workers one begins with the first half."""
    items.sort(key=lambda item: item.path not in FOR_ALL_FORMATS)


def pytest_terminal_summary(terminalreporter):
    """Name the layer of the device path that did not run."""
    terminalreporter.write_line(layers())
