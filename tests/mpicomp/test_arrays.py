import sys
import types

import numpy as np
import pytest
from foreign import Deleted, DynamicJaxprTracer, Sharded, SparseTensor

from mpicomp import ErrorFeedback, SparseVector, TopK
from mpicomp.arrays.frameworks import like, to_array, writable_vector
from mpicomp.arrays.memory import address, new_vector
from mpicomp.compressors.selection import Selection


class Foreign:
    """An array of another library: it speaks DLPack and nothing else."""

    def __init__(self, array, device=1):
        self.array, self.device = array, device

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return (self.device, 0)

    @property
    def shape(self):
        return self.array.shape


@pytest.fixture
def library(monkeypatch):
    module = types.ModuleType("foreignlib")
    module.from_dlpack = lambda array: Foreign(np.from_dlpack(array))
    monkeypatch.setitem(sys.modules, "foreignlib", module)
    monkeypatch.setattr(Foreign, "__module__", "foreignlib.core")
    return module


def test_numpy_arrays_pass_as_they_are():
    array = np.arange(3.0)
    assert to_array(array) is array
    assert like(array, np.zeros(1)) is array


def test_a_dlpack_array_comes_in_and_goes_back_without_a_copy(library):
    array = np.arange(4.0)
    assert np.shares_memory(to_array(Foreign(array)), array)
    back = like(array, Foreign(np.zeros(1)))
    assert isinstance(back, Foreign)
    assert np.shares_memory(back.array, array)


def test_the_array_interface_is_enough():
    array = np.arange(4.0)
    other = types.SimpleNamespace(__array_interface__=array.__array_interface__)
    assert np.shares_memory(to_array(other), array)


def test_an_array_on_a_device_of_another_kind_is_refused_with_the_remedy(library):
    with pytest.raises(
        TypeError,
        match=r"Foreign is on a device that is not supported \(DLPack type 4\)",
    ):
        to_array(Foreign(np.arange(4.0), device=4))


def test_an_array_on_a_cuda_device_needs_cupy(library, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(
        TypeError,
        match=r"foreignlib.core.Foreign is on a device, which needs CuPy: install cupy-cuda",
    ):
        to_array(Foreign(np.arange(4.0), device=2))


@pytest.mark.parametrize("kind", [3, 11])
def test_pinned_memory_is_main_memory(library, kind, monkeypatch):
    array = Foreign(np.arange(4.0), device=kind)
    # NumPy itself wants the capsule to say so, too
    monkeypatch.setattr(np, "from_dlpack", lambda it: it.array)
    assert to_array(array).tolist() == [0, 1, 2, 3]


def test_a_dtype_that_numpy_cannot_take_is_a_type_error(library):
    class Odd(Foreign):
        dtype = "bfloat16"

        def __dlpack__(self, **options):
            raise BufferError("no such dtype")

    with pytest.raises(
        TypeError,
        match=r"NumPy cannot read .* of bfloat16: convert it to float32 \(no such dtype\)",
    ):
        to_array(Odd(np.arange(4.0)))


def test_a_library_without_from_dlpack_gets_numpy_back(library):
    del library.from_dlpack
    array = np.arange(3.0)
    assert like(array, Foreign(array)) is array


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_another_byte_order_is_refused_with_a_remedy_that_loses_nothing(dtype):
    swapped = np.ones(3, np.dtype(dtype).newbyteorder("S"))
    with pytest.raises(TypeError, match=rf"astype\(np.{dtype}\) has the byte order"):
        SparseVector.from_dense(swapped)


def test_masked_arrays_are_refused_and_matrices_become_arrays():
    with pytest.raises(TypeError, match="got a masked array: expected a plain one"):
        to_array(np.ma.masked_array([1.0, 2.0], [False, True]))
    assert type(to_array(np.asmatrix([[1.0, 2.0]]))) is np.ndarray


def test_a_sparse_vector_where_an_array_is_wanted():
    with pytest.raises(
        TypeError,
        match=r"got mpicomp.vector.SparseVector: expected an array \(use its to_dense\(\)\)",
    ):
        to_array(SparseVector.empty(3))


@pytest.mark.parametrize("what", [[1.0], 3.0, None, "text"])
def test_what_is_no_array_is_refused(what):
    with pytest.raises(
        TypeError,
        match=r"expected an array \(NumPy, CuPy, or one that supports DLPack\)",
    ):
        to_array(what)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_new_vector_begins_at_a_cache_line(dtype):
    for size in (1, 15, 1000, 100_003):
        vector = new_vector(np, size, dtype)
        assert (vector.shape, vector.dtype, vector.any(), address(vector) % 64) == (
            (size,),
            dtype,
            False,
            0,
        )


def test_residuals_begin_at_a_cache_line_also_when_they_were_loaded():
    one, other = ErrorFeedback(), ErrorFeedback()
    for feedback in (one, other):
        for step in range(3):
            gradient = np.arange(step, step + 1003, dtype=np.float32)
            selection = Selection([None], [0, gradient.size], [TopK(k=9)])
            correction = feedback.correct(gradient)
            sent = selection.select(correction)
            assert address(correction.out) % 64 == 0
            feedback.prepare_residual(correction, sent)()
        other.load_state_dict(one.state_dict())


def test_a_tensor_of_another_layout_is_taken(library):
    tensor = Foreign(np.arange(3.0))
    tensor.layout = "torch.strided"
    assert to_array(tensor).tolist() == [0, 1, 2]


def test_torch_tensors_in_host_memory_are_converted_by_their_own_method(monkeypatch):
    """A step of 54 tensors converts 108: DLPack's protocol takes five times as long."""
    torch = pytest.importorskip("torch")
    tensor = torch.arange(3.0, requires_grad=True)
    odd = torch.ones(2, dtype=torch.float8_e4m3fn), torch.ones(2) * 1j
    for name in ("__dlpack__", "__dlpack_device__"):
        monkeypatch.setattr(torch.Tensor, name, None)
    array = to_array(tensor)
    assert array.tolist() == [0, 1, 2]
    assert (address(array), array.flags.writeable) == (tensor.data_ptr(), True)
    for bad in (odd[0], odd[1].conj()):
        with pytest.raises(TypeError, match="NumPy cannot read"):
            to_array(bad)


@pytest.mark.parametrize(
    "call",
    [
        to_array,
        writable_vector,
        TopK(k=2).compress,
        lambda it: SparseVector([0, 1], it, 9),
    ],
)
def test_torch_tensors_without_memory_of_their_own_are_refused(call):
    """Each as a DTensor or a parameter of FSDP may be: NumPy would read a null pointer, or make new memory."""
    torch = pytest.importorskip("torch")
    from torch.testing._internal.two_tensor import TwoTensor

    freed, wrapper, found = torch.ones(2), TwoTensor(torch.ones(2), torch.ones(2)), []
    freed.untyped_storage().resize_(0)
    torch.func.grad(lambda it: found.append(it) or it.sum())(torch.ones(2))
    for tensor in (
        wrapper,
        torch.nn.Parameter(wrapper),
        wrapper[:],
        freed,
        torch.ones(2, device="meta"),
        *found,
    ):
        with pytest.raises(
            TypeError,
            match=r"no memory of its own: expected a plain tensor; .* tensor.to_local\(\)",
        ):
            call(tensor)
    with pytest.raises(TypeError, match=r"pass tensor.resolve_neg\(\)"):
        call(torch.tensor([1 + 2j, 3 + 4j]).conj().imag)


@pytest.mark.parametrize(
    ("array", "error", "message"),
    [
        (DynamicJaxprTracer(), TypeError, "call outside of jit, grad, vmap and scan"),
        (Deleted(), ValueError, "JAX has deleted, .*donated"),
        (Sharded(), TypeError, "pass a copy in one memory, as of jax.device_get"),
        (SparseTensor(), TypeError, r"dense array; .*SparseVector\(t.indices\(\)\[0\]"),
    ],
)
def test_arrays_of_jax_and_torch_without_values_are_refused(array, error, message):
    """Of stand-ins, which test_jax.py compares with the real ones."""
    with pytest.raises(error, match=message):
        to_array(array)
