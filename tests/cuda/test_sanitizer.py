"""The emulated kernels under AddressSanitizer: nothing outside of an array is read or written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from devices import real_cupy
from emulator import VARIABLE, compiler

SCRIPT = Path(__file__).with_name("sanitized.py")


def sanitized(schedule, *replacement):
    """Run the comparisons in a process of their own, of a source in which a piece is replaced."""
    found = subprocess.run(
        [compiler(), "-print-file-name=libasan.so"],
        capture_output=True,
        text=True,
        check=True,
    )
    library = Path(found.stdout.strip())
    if not library.is_absolute():
        pytest.skip("the compiler has no AddressSanitizer")
    options = {
        "LD_PRELOAD": str(library),
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",
    }
    command = [sys.executable, str(SCRIPT), *replacement]
    environment = os.environ | options | {VARIABLE: schedule}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=environment,
    )


@pytest.mark.slow
@pytest.mark.skipif(
    real_cupy() is not None, reason="nothing is emulated where there is a GPU"
)
class TestSanitized:
    def test_nothing_outside_of_an_array_is_touched(self):
        done = sanitized("round_robin")
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout == "all is well\n"

    def test_a_place_too_many_is_found(self):
        done = sanitized(
            "round_robin", "number < size ? own[place]", "number <= size ? own[place]"
        )
        assert done.returncode != 0
        assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
