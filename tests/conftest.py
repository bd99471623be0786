"""Settings that all tests share."""

import sys
from pathlib import Path

import pytest
from devices import cupy_for_tests, layers
from hypothesis import settings

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
# whose modules import each other
sys.path += [str(BENCHMARKS), str(BENCHMARKS / "training")]
# a first call compiles: time is no verdict
settings.register_profile("house", deadline=None, print_blob=True)
settings.load_profile("house")


@pytest.fixture(scope="module")
def cupy():
    """Return CuPy, or its stand-in."""
    return cupy_for_tests()


def pytest_terminal_summary(terminalreporter):
    """Name the layer of the device path that did not run."""
    terminalreporter.write_line(layers())
