"""What one rank does to a gradient on a device: the same bits as on the host. Without a GPU it is the stand-in's."""

from types import SimpleNamespace

import numpy as np
import pytest
from cases import FEEDBACKS
from devices import assert_same, back, real_cupy, there
from few_bits_cases import decode as decode_values
from test_every_compressor import EVERY, compress

from collectives.calls.notification import run_or_notify
from collectives.runtime import staging
from collectives.runtime.messages import Arrival
from mpicomp import (
    CodecError,
    ErrorFeedback,
    SparseVector,
    TopK,
)
from mpicomp.arrays.frameworks import like, to_array
from mpicomp.codec import (
    CODECS,
    HEADER_NBYTES,
    decode,
    encode,
    few_bits_message,
    plain,
)
from mpicomp.codec.indices import RANGE
from mpicomp.compressors import quantised
from mpicomp.correction import Correction
from mpicomp.few_bits import coder
from mpicomp.vector import add_up, join, merge, top_k, without_zeros
from mpicomp_bench.network import Network

DTYPES = pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])


SIZES = pytest.mark.parametrize("size", ["ordinary", "subnormal"])


def gradients(dtype=np.float32, size="ordinary", steps=4):
    """Return a gradient for each step; subnormal ones are a few multiples of the smallest number."""
    rng, limits = np.random.default_rng(7), np.finfo(dtype)
    unit = 1.0 if size == "ordinary" else 4 * float(limits.smallest_subnormal)
    drawn = [rng.laplace(size=3000) * 2.0**step for step in range(steps)]
    return [(unit * each).astype(dtype) for each in drawn]


@pytest.mark.parametrize("name", EVERY)
@DTYPES
@SIZES
def test_compressors(cupy, name, dtype, size):
    here, on_it = EVERY[name](0.02), EVERY[name](0.02)
    for dense in gradients(dtype, size):
        expected, vector = compress(here, dense), compress(on_it, cupy.asarray(dense))
        assert_same(vector, expected)
        if hasattr(here, "observe"):
            here.observe(expected)
            on_it.observe(vector)


@pytest.mark.parametrize("name", FEEDBACKS)
@DTYPES
@SIZES
def test_feedback(cupy, name, dtype, size):
    here, on_it, pick = FEEDBACKS[name](), FEEDBACKS[name](), TopK(k=100)
    for gradient in gradients(dtype, size):
        corrected, on_device = (
            here.correct(gradient),
            on_it.correct(cupy.asarray(gradient)),
        )
        assert on_device.add().get().tobytes() == corrected.add().tobytes()
        sent, sent_there = pick.compress(corrected.out), pick.compress(on_device.out)
        rejected = top_k(sent, 60)[1]
        here.prepare_residual(corrected, sent, rejected)()
        on_it.prepare_residual(on_device, sent_there, there(rejected, cupy))()
        for one, other in zip(on_device.parts, corrected.parts, strict=True):
            assert one.get().tobytes() == other.tobytes()
    for key, array in here.state_dict().items():
        # what is saved is the host's
        assert type(on_it.state_dict()[key]) is np.ndarray
        assert on_it.state_dict()[key].tobytes() == array.tobytes()
    if here.residual is not None and name != "step ahead":
        here.rescale(0.7)
        on_it.rescale(0.7)
        assert on_it.residual.get().tobytes() == here.residual.tobytes()
    if name == "step ahead":
        assert (
            on_it.ahead(cupy.asarray(gradient)).get().tobytes()
            == here.ahead(gradient).tobytes()
        )


@pytest.mark.parametrize("name", FEEDBACKS)
def test_what_the_host_saved_goes_on_on_a_device(cupy, name):
    here, on_it, (first, second) = (
        FEEDBACKS[name](),
        FEEDBACKS[name](),
        gradients(steps=2),
    )
    sent = TopK(k=100).compress(first)
    correction = here.correct(first)
    correction.add()
    here.prepare_residual(correction, sent)()
    on_it.load_state_dict(here.state_dict())
    assert (
        on_it.correct(cupy.asarray(second)).add().get().tobytes()
        == here.correct(second).add().tobytes()
    )


@pytest.mark.parametrize("name", FEEDBACKS)
def test_before_the_first_commit_a_gradient_may_be_in_another_memory(cupy, name):
    feedback, (first, second) = FEEDBACKS[name](), gradients(steps=2)
    feedback.correct(cupy.asarray(first))
    corrected = feedback.correct(second).add()
    assert type(corrected) is np.ndarray
    assert corrected.tobytes() == FEEDBACKS[name]().correct(second).add().tobytes()


@DTYPES
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("density", [0.0, 0.001, 0.05, 0.5, 1.0])
def test_messages(cupy, codec, density, dtype):
    rng = np.random.default_rng(3)
    positions = np.flatnonzero(rng.random(40_000) < density)
    for values in (
        rng.laplace(size=positions.size).astype(dtype),
        np.ones(positions.size, dtype),
    ):
        vector = SparseVector(positions, values, 40_000)
        expected, message = encode(vector, CODECS[codec](vector)), None
        on_it = there(vector, cupy)
        message = encode(on_it, CODECS[codec](on_it))
        assert message.get().tobytes() == expected.tobytes()
        assert_same(decode(message), vector)


def test_few_bits_are_on_the_device_before_their_pinned_memory_is_released(cupy):
    """The pool of pinned memory passes it on at once, whatever the device still copies from it."""
    values, total, expected = (
        np.arange(64, dtype=np.float32),
        cupy.zeros(64, np.float32),
        np.zeros(64, np.float32),
    )
    coded = coder(Correction([values], np.empty_like(values)), 8, 32)(
        few_bits_message(64, 8, 32, values, line=64)
    )
    decode_values(coded, expected)

    def receive(rank, group):
        yield from ()
        group.like, message = total, group.pack(coded)
        arrival = Arrival(None, 0, 0)
        arrival.buffer, arrival.copy = staging.allocate(
            message.size, total, direct=False
        )
        arrival.buffer[:] = message
        staging.copy_in(arrival.buffer, arrival.copy)
        return group._received(arrival)[0]

    def to_the_end(rank, group):
        return run_or_notify(group, receive(rank, group))

    ((received,), _) = Network(1).run(to_the_end)
    decode_values(received, total)
    assert total.get().tobytes() == expected.tobytes()


@pytest.mark.parametrize("first", [9, 2**31 - 1, 2**32, 2**63 - 2, 2**63 - 1])
def test_a_range_that_lies_is_refused(cupy, first):
    vector = SparseVector([4, 5], [1.0, 2.0], 9)
    message = encode(vector, coding=(RANGE, plain(vector)[1]))
    assert decode(cupy.asarray(message)).nnz == 2
    message[HEADER_NBYTES : HEADER_NBYTES + 8] = np.array([first]).view(np.uint8)
    with pytest.raises(CodecError):
        decode(cupy.asarray(message))


def test_vectors(cupy):
    a, b, c = (TopK(k=200).compress(dense) for dense in gradients(steps=3))
    on_it = [there(vector, cupy) for vector in (a, b, c)]
    assert_same(merge(*on_it[:2]), merge(a, b))
    assert_same(add_up(on_it), add_up([a, b, c]))
    assert_same(join([on_it[0].every(1)]), a)
    assert_same(on_it[0].every(3, 1), a.every(3, 1))
    for part, expected in zip(top_k(on_it[1], 30), top_k(b, 30), strict=True):
        assert_same(part, expected)
    assert on_it[2].to_dense().get().tobytes() == c.to_dense().tobytes()
    assert_same(SparseVector.from_dense(cupy.asarray(c.to_dense())), c)
    assert repr(on_it[0]) == repr(a)
    on_it[0].validate()


def test_what_is_wrong_with_a_vector_is_said_as_on_the_host(cupy):
    with pytest.raises(TypeError, match="indices and values are on different devices"):
        SparseVector(np.arange(3), cupy.ones(3, np.float32), 5)
    with pytest.raises(ValueError, match="index 7 is out of range"):
        SparseVector(
            cupy.asarray(np.array([1, 7], np.int32)), cupy.ones(2, np.float32), 5
        )
    repeated = SparseVector(
        cupy.asarray(np.array([1, 1, 3], np.int32)), cupy.ones(3, np.float32), 5
    )
    with pytest.raises(ValueError, match=r"indices\[1\] is 1 and repeats 1"):
        repeated.validate()
    with pytest.raises(
        TypeError, match="got entries on a device: add repeated ones there"
    ):
        SparseVector.from_entries(cupy.arange(3), cupy.ones(3, np.float32), 5)


def test_another_librarys_array_on_the_device(cupy, monkeypatch):
    if real_cupy():
        pytest.skip("the stand-in has a library of its own for this")

    class Tensor:
        __module__ = "otherlib"
        requires_grad = False

        def __init__(self, array):
            self._fake = array

        def __dlpack_device__(self):
            return 2, 0

        @property
        def __cuda_array_interface__(self):
            pytest.fail("this protocol waits for no stream")

    import sys

    monkeypatch.setitem(sys.modules, "otherlib", SimpleNamespace(from_dlpack=Tensor))
    tensor = Tensor(cupy.arange(4, dtype=np.float32))
    assert to_array(tensor) is tensor._fake
    returned = like(cupy.ones(4, np.float32), tensor)
    assert isinstance(returned, Tensor)
    assert_same(
        TopK(k=2).compress(tensor), TopK(k=2).compress(np.arange(4, dtype=np.float32))
    )
    assert back(TopK(k=1).compress(tensor)).indices.tolist() == [3]


@pytest.mark.parametrize("form", ["float16", "bfloat16", "sign", "two_bit"])
@DTYPES
@SIZES
def test_quantised_values(cupy, form, dtype, size):
    vector = TopK(k=300).compress(gradients(dtype, size)[0])
    found = quantised.quantise(there(vector, cupy), form)
    assert_same(found, quantised.quantise(vector, form))


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("scale", [1, -1, 0.3])
@DTYPES
@SIZES
def test_vectors_are_added_to_arrays(cupy, width, scale, dtype, size):
    values = gradients(dtype, size)[0][:300]
    shape = (300,) if width is None else (100, width)
    vector = SparseVector(np.arange(shape[0]), values.reshape(shape), shape[0])
    for kind in (dtype, np.float32, np.float64):
        expected = gradients(kind, size)[1][:300].reshape(shape)
        array = cupy.asarray(expected)
        there(vector, cupy).add_to(array, scale)
        vector.add_to(expected, scale)
        assert array.get().tobytes() == expected.tobytes()


@pytest.mark.parametrize("codec", CODECS)
def test_a_message_of_the_host_is_decoded_to_its_bits(cupy, codec):
    """Values of float64 that fit float32, or the upper half of one, are sent so; subnormal ones as well."""
    for least in (np.finfo(np.float32).smallest_subnormal, np.float32(2.0**-133)):
        values = np.arange(1, 90) * float(least)
        vector = SparseVector(np.arange(89), values, 1000)
        message = encode(vector, CODECS[codec](vector))
        assert_same(decode(cupy.asarray(message)), vector)


@DTYPES
def test_subnormal_numbers_are_not_lost(cupy, dtype):
    """CuPy's own kernels take those of float32 for zero: so the bits are looked at, and sums are kernels of ours."""
    least = np.finfo(dtype).smallest_subnormal
    for small in (
        np.array([1, -1, 3, 1, -1, 1, 1, 1] * 6, dtype) * least,
        np.full(48, -least),
    ):
        dense = np.where(np.arange(48) % 5 == 0, 0, small).astype(dtype)
        here, on_it = (
            SparseVector.from_dense(dense),
            SparseVector.from_dense(cupy.asarray(dense)),
        )
        assert_same(on_it, here)
        assert_same(without_zeros(on_it), here)
        for codec in CODECS:
            message = encode(on_it, CODECS[codec](on_it))
            assert (
                message.get().tobytes() == encode(here, CODECS[codec](here)).tobytes()
            )
            assert_same(decode(message), here)
        assert_same(merge(on_it, on_it), merge(here, here))
        feedback = ErrorFeedback()
        nothing = SparseVector.empty(48, dtype, like=on_it.values)
        correction = feedback.correct(cupy.asarray(dense))
        correction.add()
        feedback.prepare_residual(correction, nothing)()
        assert (
            feedback.correct(cupy.asarray(dense)).add().get().tobytes()
            == (dense + dense).tobytes()
        )


def test_an_array_on_another_device_than_the_current_one_is_refused(cupy, monkeypatch):
    array = cupy.zeros(3, np.float32)
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 1)
    with pytest.raises(
        ValueError,
        match=r"on device 0, and the current one is 1: call cupy.cuda.Device\(0\).use\(\)",
    ):
        to_array(array)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64])
def test_indices_of_another_dtype_on_a_device(cupy, dtype):
    indices = cupy.asarray(np.array([1, 200], dtype))
    for length in (1000, 2**40):
        assert SparseVector(indices, cupy.ones(2), length).indices.tolist() == [1, 200]
    with pytest.raises(ValueError, match="index 200 is out of range"):
        SparseVector(indices, cupy.ones(2), 200 if dtype != np.int32 else 150)
