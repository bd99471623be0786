"""The CUDA source compiles for the oldest and the newest GPUs it is for, and no kernel spills registers."""

import importlib
import re
from collections import defaultdict

import pytest
from compilers import available, instructions, nvrtc_libraries, spills
from devices import cupy_for_tests, has_cupy_wheel

RARE = pytest.mark.skipif(not has_cupy_wheel(), reason="takes long: make test-cupy")


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    ["sm_90", *(pytest.param(each, marks=RARE) for each in ("sm_80", "sm_100"))],
)
@pytest.mark.skipif(
    not available(), reason="neither nvcc nor the wheel nvidia-cuda-nvrtc is installed"
)
def test_no_kernel_spills_registers(architecture):
    cupy_for_tests()
    source = importlib.import_module("mpicomp.kernels.device.compiling").source()
    for compile_source in available():
        found = spills(compile_source(source, architecture))
        assert len(found) > 80
        assert {name for name, count in found.items() if count} == set()


@pytest.mark.skipif(
    not nvrtc_libraries(), reason="the wheel nvidia-cuda-nvrtc is not installed"
)
@pytest.mark.slow
def test_no_instruction_takes_a_subnormal_number_for_zero():
    """Most halves below 2^-14 are added up as subnormal floats times 2^112: with .ftz they would be lost."""
    cupy_for_tests()
    source = importlib.import_module("mpicomp.kernels.device.compiling").source()
    text = instructions(source)
    assert text.count(".entry") > 80
    assert [line for line in text.splitlines() if ".ftz" in line] == []
    careless = 'extern "C" __global__ void add(float* a, float* b) { *a += *b; }'
    assert ".ftz" in instructions(careless), (
        "as CuPy compiles, an operator of float does"
    )


@pytest.mark.skipif(
    not nvrtc_libraries(), reason="the wheel nvidia-cuda-nvrtc is not installed"
)
@pytest.mark.slow
def test_every_kernel_is_in_the_module_in_which_it_is_looked_for():
    cupy_for_tests()
    compiling = importlib.import_module("mpicomp.kernels.device.compiling")
    modules = defaultdict(set)
    for name in entries(compiling.source()):
        modules[compiling.module_of(name)].add(name)
    assert len(modules) > 20
    for (file, itemsize, index_itemsize), names in modules.items():
        sizes = (
            f"#define ITEMSIZE {itemsize}\n#define INDEX_ITEMSIZE {index_itemsize}\n"
        )
        found = entries(sizes + compiling.source(kernels_of=file))
        assert names <= found
        assert len(found) < 40


def entries(source):
    """Return the names of the kernels of CUDA source."""
    return set(re.findall(r"\.entry (\w+)", instructions(source)))


def test_spills_are_seen():
    log = (
        "ptxas info    : Compiling entry function 'one' for 'sm_80'\nptxas info    : Function properties for one\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Compiling entry function 'two' for 'sm_80'\nptxas info    : Function properties for two\n"
        "    8 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
    )
    assert spills(log) == {"one": 0, "two": 12}


def test_what_would_differ_from_the_host_is_not_in_the_source():
    cupy_for_tests()
    compiling = importlib.import_module("mpicomp.kernels.device.compiling")
    assert "--fmad=false" in compiling.OPTIONS
    assert not re.search(
        r"use_fast_math|__fmul|fmaf?\(|__expf|__logf|rsqrt", compiling.source()
    )
