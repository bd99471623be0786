"""How kernels are compiled: by Numba, at the first call, and kept in a folder for the next process.

A kernel that Python calls is declared with `jit`. One that only kernels call has no
machine code of its own, and no files: Numba writes LLVM's code, which is linked into
that of the kernels. With `inner` LLVM optimises it there, and with `single` in each
place that calls it; with `loop` also before that, for loops that it vectorises only
alone. A version for other types costs as much again: a position that begins with 0
is an ``np.int64(0)``.

Kernels hold no references to arrays (`_nrt`), so they allocate nothing and return no
arrays; and a division by zero is not an error.

Whatever fails in reading or writing the files (a torn file, a full or read-only file
system, files of another program) costs the time to compile, and one warning.
"""

import copy
import functools
import gc
import os
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

from numba import config, njit, types
from numba.core import caching, typing
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import CPUDispatcher

from mpicomp.errors import warn

VARIABLE = "NUMBA_CACHE_DIR"

# Passes for closures, contexts, comprehensions, array expressions, functions that are
# inlined by Numba, reference counts and listings with types.
_NEEDLESS = {
    "AnnotateTypes",
    "IRLegalization",
    "NoPythonSupportedFeatureValidation",
    "WithLifting",
    "InlineClosureLikes",
    "RewriteSemanticConstants",
    "RewriteDynamicRaises",
    "MakeFunctionToJitFunction",
    "InlineInlinables",
    "FindLiterallyCalls",
    "LiteralUnroll",
    "LiteralPropagationSubPipelinePass",
    "InlineOverloads",
    "NopythonRewrites",
    "DumpParforDiagnostics",
}
_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}


def jit(function: Any) -> Any:
    """Return a kernel, compiled at its first use and cached on disk; not cached, with a warning, without a folder."""
    kernel = njit(_nrt=False, pipeline_class=_Kernel, **_OPTIONS)(function)
    try:
        kernel._cache = _Files(function)
    except RuntimeError:  # The installation is read-only, and there is no home folder.
        _warn("finds no writable folder for compiled kernels")
    return kernel


def _linked(function: Any, *, passes: int, forceinline: bool = False) -> Any:
    kernel = njit(
        _nrt=False,
        no_cpython_wrapper=True,
        forceinline=forceinline,
        pipeline_class=type("_Part", (_Kernel,), {"passes": passes}),
        **_OPTIONS,
    )(function)
    if isinstance(kernel, CPUDispatcher):  # With NUMBA_DISABLE_JIT it is a function.
        kernel.__class__ = _Linked
    return kernel


# A kernel that only kernels call.
inner = functools.partial(_linked, passes=0)
# A kernel that becomes a part of each place of a kernel that calls it.
single = functools.partial(_linked, passes=1, forceinline=True)
# A kernel that only kernels call, which LLVM optimises alone first.
loop = functools.partial(_linked, passes=2)


class _Linked(CPUDispatcher):  # type: ignore[misc]
    """A kernel without machine code of its own: if Python calls it, the Python function runs."""

    def __call__(self, *given: Any) -> Any:
        """Return what the function of Python does."""
        return self.py_func(*given)


class _Typing(typing.Context):  # type: ignore[misc]
    """Numba's typing context with a cache of the signatures of calls, which each pass looks up again."""

    def resolve_function_type(self, function: Any, given: Any, named: Any) -> Any:
        """Return the signature of a call; None without one."""
        # The key changes when a library adds overloads to the function.
        call = self._lookup_global(function) or function, *given
        if named or not all(isinstance(each, types.Type) for each in given):
            return super().resolve_function_type(function, given, named)
        signature = self.signatures.get(call)
        if signature is None:
            signature = super().resolve_function_type(function, given, named)
            self.signatures[call] = signature
        return signature


@functools.cache
def _known(context: Any, target: Any) -> tuple[_Typing, Any]:
    """Return a typing context and sizes of types, both cached, for all kernels, as overloads belong to a context."""
    own = copy.copy(context)
    own.__class__ = _Typing
    own.signatures = {}
    return own, functools.cache(target.get_abi_sizeof)


class _Kernel(Compiler):  # type: ignore[misc]
    """Numba's compiler without the passes that change no kernel."""

    passes: int | None = None  # of the library

    def __init__(self, context: Any, target: Any, *settings: Any) -> None:
        known, size = _known(context, target)
        super().__init__(known, target, *settings)
        # The constructor has refreshed the context. Numba would do so again at each
        # look-up that first finds no implementation, as for an array.
        own = {"refresh": lambda: None, "get_abi_sizeof": size}
        self.state.targetctx = self.state.targetctx.subtarget(**own)

    def compile_extra(self, function: Any) -> Any:
        """Compile without looking for garbage meanwhile; Numba lets one thread compile at a time."""
        is_on = gc.isenabled()
        gc.disable()
        try:
            return super().compile_extra(function)
        finally:
            if is_on:
                gc.enable()

    def define_pipelines(self) -> Any:
        """Return the passes; the last one takes the library that is given."""
        state = self.state
        name = state.func_id.func_qualname
        state.library = _Library(state.targetctx.codegen(), name, self.passes)
        state.library.enable_object_caching()
        (passes,) = super().define_pipelines()
        # Each pass runs once: after the first pruning of branches nothing is inlined
        # that could be pruned.
        once = dict(passes.passes)
        passes.passes = [
            (each, once[each]) for each in once if each.__name__ not in _NEEDLESS
        ]
        passes.finalize()
        return [passes]


class _Library(JITCodeLibrary):  # type: ignore[misc]
    """The code of a kernel.

    passes: of LLVM over what is linked into others: 0, 1 for those over functions, 2
    for all. Without machine code it needs no globals. None: Python calls it.
    """

    def __init__(self, codegen: Any, name: str, passes: int | None) -> None:
        super().__init__(codegen, name)
        self._is_part = passes is not None
        self._passes = 2 if passes is None else passes

    @property
    def codegen(self) -> Any:
        """The owner of the globals."""
        return _NO_GLOBALS if self._is_part else super().codegen

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout
        # A second run of the passes over a wrapper changes no kernel.
        if self._passes > 0 and module.name != "wrapper":
            super()._optimize_functions(module)

    def _optimize_final_module(self) -> None:
        if self._passes > 1:
            super()._optimize_final_module()

    def _finalize_final_module(self) -> None:
        self._finalized = True
        if not self._is_part:
            super()._finalize_final_module()

    def get_pointer_to_function(self, name: str) -> int:
        """Return the address of a function; 0 for what has no machine code."""
        return 0 if self._is_part else super().get_pointer_to_function(name)


_NO_GLOBALS = SimpleNamespace(set_env=lambda name, environment: None)


class _Overloads(caching.IndexDataCacheFile):  # type: ignore[misc]
    """A file for each signature, named by it.

    Numba numbers the files, and an index says which signature has which number: of two
    processes that compile at the same time one may write the index, and the other the file
    of that number, which then is called with values of other types.
    """

    def save(self, key: Any, data: Any) -> None:
        """Write a kernel, and which source it is of."""
        self._save_data(self._name_of(key), (self._source_stamp, data))

    def load(self, key: Any) -> Any:
        """Return a kernel; None if there is none, or one of another source."""
        try:
            stamp, data = self._load_data(self._name_of(key))
        except FileNotFoundError:
            return None
        return data if stamp == self._source_stamp else None

    def _name_of(self, key: Any) -> str:
        text = f"{self._version} {key!r}".encode()
        name: str = self._data_name(int(sha256(text).hexdigest()[:16], 16))
        return name


class _Files(caching.FunctionCache):  # type: ignore[misc]
    """The files of a kernel. A failure is a warning, and the kernel is compiled."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        source = self._impl.locator.get_source_stamp()
        self._cache_file = _Overloads(
            self._cache_path, self._impl.filename_base, source
        )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the kernel for a signature; None if there is none, or if it cannot be read."""
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # whatever unpickling raises
            _warn(f"cannot read {self.cache_path} ({error!r})")
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write a kernel; a torn file is replaced."""
        try:
            super().save_overload(sig, data)
        except Exception as error:
            _warn(f"cannot write {self.cache_path} ({error!r})")


class _GivenFolder(caching._SourceFileBackedLocatorMixin, caching._CacheLocator):  # type: ignore[misc]
    """The folder NUMBA_CACHE_DIR, even if it is read-only: kernels are read from it."""

    def __init__(self, function: Any, file: str) -> None:
        self._py_file = file
        self._lineno = function.__code__.co_firstlineno
        self._folder: str = os.path.join(
            config.CACHE_DIR, self.get_suitable_cache_subpath(file)
        )

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> Any:
        """Return the folder, made if it is missing; None if there can be none."""
        return super().from_function(py_func, py_file) if config.CACHE_DIR else None

    def ensure_cache_path(self) -> None:
        """Make the folder. Numba also writes a file, for each kernel at its import."""
        os.makedirs(self._folder, exist_ok=True)

    def get_cache_path(self) -> str:
        """Return the folder."""
        return self._folder


_Files._impl_class = type(
    "Results",
    (caching.CompileResultCacheImpl,),
    {
        "_locator_classes": (
            _GivenFolder,
            *caching.CompileResultCacheImpl._locator_classes,
        )
    },
)

# Problems of this process, of which the first is shown.
problems: list[str] = []


def _warn(problem: str) -> None:
    problems.append(problem)
    if len(problems) == 1:
        warn(
            f"Numba {problem}, so each process compiles kernels, which takes seconds: set {VARIABLE} to a "
            "writable folder, such as /tmp/numba",
            depth=3,
        )
