"""The files of compiled kernels: damaged, full, read-only, of another program."""

import errno
import importlib
import operator
import os
import pathlib
import pickle
import subprocess
import sys
import warnings
from functools import partial

import numpy as np
import pytest
from numba import config
from numba.core import caching
from numba.core.types.functions import BaseFunction
from numba.extending import overload

from mpicomp.kernels.host import compiled, few_bits, merging

SOURCE = """
def next_after(number):
    return number + 1
"""


@pytest.fixture
def declared(tmp_path, monkeypatch):
    """Return a function that declares a kernel as a new process would; its files are in a folder of the test."""
    name = f"kernel_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "problems", [])
    return lambda: compiled.jit(importlib.import_module(name).next_after)


def warned(kernel):
    """Return the warnings of two calls, of two signatures, whose results are right."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert kernel(1) == 2
        assert kernel(1.5) == 2.5
    return [str(warning.message) for warning in caught]


def files(kernel, suffix):
    return sorted(pathlib.Path(kernel.stats.cache_path).glob(f"*.{suffix}"))


def sparse_writer():
    return merging.sparse_writer(np.array([1], np.int32), np.ones(1), [np.zeros(4)])


def decoder(bits):
    codes = np.zeros(32 * bits, np.uint8)
    return few_bits.decoder([(codes, np.zeros(2, "u2"))], bits, 256, [np.ones(9, "f4")])


@pytest.mark.parametrize(
    ("module", "name", "make"),
    [
        (merging, "_write_parts", sparse_writer),
        (few_bits, "_dequantise", partial(decoder, 4)),
        (few_bits, "_dequantise", partial(decoder, 2)),
    ],
)
def test_what_writes_a_mean_is_compiled_when_it_is_made(
    monkeypatch, module, name, make
):
    """After the ranks have agreed: in memory that has ended, or with few frames left, the compiler would fail."""
    kernel = compiled.jit(getattr(module, name).py_func)
    monkeypatch.setattr(module, name, kernel)
    write = make()
    known = [*kernel.signatures]
    write()
    assert known == kernel.signatures
    assert len(known) == 1


WITHOUT_JIT = """
import numpy as np
from mpicomp import ChunkedTopK, Hadamard, Quantised
values = np.arange(512, dtype=np.float32)
coefficients = np.empty_like(values)
Hadamard(chunk=256).forward(values, coefficients)
sent = Quantised(ChunkedTopK(k=8, chunk=256), "two_bit").compress(coefficients)
print(sent.indices.tolist(), sent.values.tolist())
"""


def test_without_the_compiler_kernels_are_functions_of_python(capsys):
    """For debuggers, and measurements of coverage."""
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    command = [sys.executable, "-c", WITHOUT_JIT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    exec(WITHOUT_JIT, {})
    assert done.stdout == capsys.readouterr().out


DAMAGES = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "garbage": lambda data: bytes(range(256)) * 9,
    "another pickle": lambda data: pickle.dumps([1, 2, 3]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_replaced_with_one_warning(declared, damage):
    assert warned(declared()) == []
    assert len(files(declared(), "nbc")) == 2
    for file in files(declared(), "nbc"):
        file.write_bytes(DAMAGES[damage](file.read_bytes()))
    (message,) = warned(declared())
    assert "NUMBA_CACHE_DIR" in message
    assert str(declared().stats.cache_path) in message
    after = declared()
    assert warned(after) == []
    assert len(after.stats.cache_hits) == 2


def test_files_of_processes_that_compile_at_the_same_time_are_not_mixed_up(
    declared, monkeypatch, tmp_path
):
    """Each has looked for files before the other wrote one, and was the last to write some of them."""
    folder = None
    for number, argument in enumerate((1, 1.5)):
        monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / f"cache{number}"))
        kernel = declared()
        assert kernel(argument) == argument + 1
        found = pathlib.Path(kernel.stats.cache_path)
        for file in found.glob("*.nbi") if folder else ():
            (folder / file.name).write_bytes(file.read_bytes())
        folder = folder or found
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "cache0"))
    assert warned(declared()) == []


def test_kernels_of_another_source_are_compiled_anew(declared, monkeypatch):
    assert warned(declared()) == []
    monkeypatch.setattr(
        caching._SourceFileBackedLocatorMixin, "get_source_stamp", lambda self: "new"
    )
    changed = declared()
    assert warned(changed) == []
    assert not changed.stats.cache_hits
    assert len(files(changed, "nbc")) == 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_folder_that_cannot_be_written_costs_one_warning(declared, monkeypatch, code):
    def refused(self, path):
        raise OSError(code, "refused")

    with monkeypatch.context() as patch:
        patch.setattr(caching.IndexDataCacheFile, "_open_for_write", refused)
        (message,) = warned(declared())
    assert "cannot write" in message
    assert "NUMBA_CACHE_DIR" in message
    assert files(declared(), "nb?") == []


def test_kernels_are_read_from_a_folder_that_cannot_be_written(declared, monkeypatch):
    """That all nodes read, and one wrote."""
    assert warned(declared()) == []

    def refused(*given, **named):
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(caching.IndexDataCacheFile, "_open_for_write", refused)
    monkeypatch.setattr(caching.tempfile, "TemporaryFile", refused)
    kernel = declared()
    assert warned(kernel) == []
    assert len(kernel.stats.cache_hits) == 2


def test_a_damaged_file_in_a_folder_that_cannot_be_written_costs_one_warning(
    declared, monkeypatch
):
    assert warned(declared()) == []

    def refused(self, path):
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(caching.IndexDataCacheFile, "_open_for_write", refused)
    for file in files(declared(), "nbc"):
        file.write_bytes(b"")
    assert len(warned(declared())) == 1


@pytest.mark.parametrize("declare", [compiled.inner, compiled.single, compiled.loop])
def test_only_what_python_calls_has_machine_code(declare):
    part = declare(lambda number: number + 1)
    kernel = compiled.njit(lambda number: part(part(number)))
    assert kernel(1) == 3
    (signature,) = part.signatures
    name = part.overloads[signature].fndesc.llvm_func_name
    assert not part.overloads[signature].library.get_pointer_to_function(name)
    assert part(1.5) == 2.5
    assert part.signatures == [signature]


def test_numba_looks_once_for_what_a_kernel_calls(declared, monkeypatch):
    kernel = declared()
    kernel(1)  # loads Numba's declarations
    sought, look = [], BaseFunction.get_call_type

    def counting(self, context, given, named):
        sought.append((self, given))
        return look(self, context, given, named)

    monkeypatch.setattr(BaseFunction, "get_call_type", counting)
    assert kernel(1.5) == 2.5
    assert len(sought) == len(set(sought)) > 0


def test_a_kernel_is_compiled_after_a_library_added_to_what_it_calls(declared):
    assert declared()(1) == 2

    @overload(operator.add)
    def of_texts(one, other):
        return None

    assert declared()(1.5) == 2.5
