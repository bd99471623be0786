"""Settings that all tests share."""

from devices import layers
from hypothesis import settings

settings.register_profile("house", deadline=None, print_blob=True)  # a first call compiles: time is no verdict
settings.load_profile("house")


def pytest_terminal_summary(terminalreporter):
    """Name the layer of the device path that did not run."""
    terminalreporter.write_line(layers())
