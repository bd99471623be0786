"""Compile CUDA source to machine code without a GPU, by nvcc or by NVRTC, and say what the assembler told."""

import ctypes
import re
import shutil
import subprocess
import tempfile
from functools import cache, partial
from importlib import metadata
from pathlib import Path

ADDED_BY_CUPY = "-ftz=true"  # behind all that it is given: cupy/cuda/compiler.py
OPTIONS = ["--std=c++17", "--fmad=false", ADDED_BY_CUPY]


def nvcc(source, architecture):
    """Return what the assembler tells of a source compiled by nvcc."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.cu"
        path.write_text(source)
        command = [
            "nvcc",
            "-cubin",
            f"-arch={architecture}",
            *OPTIONS,
            "-Werror",
            "all-warnings",
            "-Xptxas",
            "-v",
        ]
        command += ["-o", str(path.with_suffix(".cubin")), str(path)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False
        )
    assert done.returncode == 0, done.stderr
    return done.stderr


def nvrtc(library, source, architecture):
    """Return what the assembler tells of a source compiled by NVRTC, which is what CuPy compiles with."""
    return log_and_cubin(library, source, architecture)[0]


def instructions(source):
    """Return the source as PTX, by NVRTC."""
    return _by_nvrtc(nvrtc_libraries()[0], source, "sm_80")[1].decode()


def log_and_cubin(library, source, architecture):
    """Return what the assembler tells of a source compiled by NVRTC, and the machine code."""
    log, _, cubin = _by_nvrtc(library, source, architecture)
    return log, cubin


@cache
def _by_nvrtc(path, source, architecture):
    """Return the log, the PTX and the machine code of a source."""
    options = [*OPTIONS, f"--gpu-architecture={architecture}", "--ptxas-options=-v"]
    library, program = ctypes.CDLL(str(path)), ctypes.c_void_p()
    assert (
        library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None
        )
        == 0
    )
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    error = library.nvrtcCompileProgram(program, len(options), given)
    log = _bytes(program, library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog)
    assert error == 0, log.decode()
    return (
        log.decode(),
        _bytes(program, library.nvrtcGetPTXSize, library.nvrtcGetPTX),
        _bytes(program, library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN),
    )


def _bytes(program, ask_size, ask):
    size = ctypes.c_size_t()
    assert ask_size(program, ctypes.byref(size)) == 0
    found = ctypes.create_string_buffer(size.value)
    assert ask(program, found) == 0
    return found.raw


def nvrtc_libraries():
    """Return the paths of NVRTC in the wheels of it that are installed."""
    found = []
    for name in (
        "nvidia-cuda-nvrtc",
        "nvidia-cuda-nvrtc-cu13",
        "nvidia-cuda-nvrtc-cu12",
    ):
        try:
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            continue
        found += [
            Path(file.locate())
            for file in files
            if re.fullmatch(r"libnvrtc\.so\.\d+", file.name)
        ]
    return found


def available():
    """Return the compilers that are here: nvcc, and every NVRTC, which is what CuPy compiles with."""
    own = [nvcc] if shutil.which("nvcc") else []
    return own + [partial(nvrtc, library) for library in nvrtc_libraries()]


def spills(log):
    """Return for each kernel how many bytes of registers are spilled, from what the assembler tells."""
    found = {}
    for name, rest in re.findall(
        r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry|\Z)", log, re.DOTALL
    ):
        stores, loads = re.search(
            r"(\d+) bytes spill stores, (\d+) bytes spill loads", rest
        ).groups()
        found[name] = int(stores) + int(loads)
    return found
