"""Settings that all tests share."""

import sys
from pathlib import Path

from devices import layers
from hypothesis import settings

sys.path.append(str(Path(__file__).parent.parent / "benchmarks" / "training"))  # its modules import each other
settings.register_profile("house", deadline=None, print_blob=True)  # a first call compiles: time is no verdict
settings.load_profile("house")


def pytest_terminal_summary(terminalreporter):
    """Name the layer of the device path that did not run."""
    terminalreporter.write_line(layers())
