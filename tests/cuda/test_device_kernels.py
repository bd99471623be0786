"""The kernels of a device against the host's: on a GPU where there is one, else emulated, under every schedule."""

import importlib

import comparisons
import numpy as np
import pytest
from devices import cupy_for_tests, real_cupy
from emulator import SCHEDULES, VARIABLE

from collectives.cli.bench import device_kernels


@pytest.fixture
def cupy():
    return cupy_for_tests()


@pytest.fixture
def device(cupy):
    return importlib.import_module("mpicomp.kernels.device")


@pytest.fixture(params=["on the device"] if real_cupy() else SCHEDULES)
def schedule(request, monkeypatch):
    monkeypatch.setenv(VARIABLE, request.param)
    return request.param


@pytest.mark.parametrize("comparison", comparisons.ALL, ids=lambda each: each.__name__)
def test_the_bits_are_those_of_the_host(cupy, device, schedule, comparison):
    comparison(device, cupy)


def test_a_sample_serves_ordinary_data(cupy, device, monkeypatch):
    monkeypatch.setattr(device.selection, "_by_digits", None)
    values = np.random.default_rng(0).laplace(size=100_000).astype(np.float32)
    for k in (1, 100, 10_000):
        comparisons.compare(device, cupy, "largest", values, k)


def test_the_names_are_those_of_the_host(device):
    host = importlib.import_module("mpicomp.kernels.host")
    assert set(device.__all__) == set(host.__all__)
    assert all(hasattr(device, name) for name in host.__all__)


def test_errors_are_those_of_the_host(cupy, device):
    with pytest.raises(ValueError, match="expected a number >= 0"):
        device.above(cupy.asarray(np.ones(3)), -1)
    values = np.ones((4, 5), np.float32)
    values[2, 3] = np.nan
    with pytest.raises(ValueError, match=r"values\[2, 3\] is nan: expected finite values"):
        device.raise_not_finite(cupy.asarray(values))
    device.raise_not_finite(cupy.asarray(values[:2]))
    with pytest.raises(ValueError, match="expected a contiguous one"):
        device.top_k(cupy.asarray(values.reshape(-1))[::2], 1)


def test_the_benchmark_of_a_gpu_runs(cupy, monkeypatch):
    monkeypatch.setattr(device_kernels, "argpartition", lambda values, k: cupy.argsort(values)[-k:])
    rows = list(device_kernels.rows(30_000, 1))
    assert {row.name.split()[0] for row in rows} >= {"top_k", "survey", "merge", "accumulate", "scatter_add", "gather"}
    assert all(row.floor for row in rows if row.name.startswith("top_k"))
