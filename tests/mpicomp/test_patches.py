"""Patches of weights: every bit pattern, versions, tied weights, damage; the kernels compiled and as Python."""

import contextlib

import numpy as np
import pytest
from devices import cupy_for_tests
from test_kernels import mode  # noqa: F401  (a fixture)

from mpicomp import CodecError, Patch, changes, patches
from mpicomp.kernels.host import change_writer, digest, encode_changes
from mpicomp.kernels.host.patches import FORMS

# as their bits: NumPy has no bfloat16
DTYPE = pytest.mark.parametrize("dtype", FORMS, ids=["bfloat16", "float16", "float32"])
NAMED = np.dtype(np.float16), np.dtype(np.float32)


def bits_of(array):
    return array.view(f"u{array.itemsize}")


def random_bits(rng, size, dtype):
    """Return numbers of which every bit is random: also NaN, infinities, subnormals and -0."""
    return np.frombuffer(rng.bytes(size * dtype.itemsize), dtype).copy()


def special_bits(dtype):
    """Return the bit patterns next to those where a format's kind of number changes, on both sides of 0."""
    fraction, _ = FORMS[dtype]
    width = 8 * dtype.itemsize
    turns = [0, 1 << fraction, (1 << width - 1) - (1 << fraction), 1 << width - 1]
    turns += [turn + (1 << width - 1) for turn in turns]
    near = [(turn + step) % (1 << width) for turn in turns for step in range(-2, 3)]
    return np.array(sorted({*near}), f"u{dtype.itemsize}").view(dtype)


def partly(rng, before, after, density):
    """Return `before`, with a share of the values of `after`."""
    return np.where(
        rng.random(before.size) < density, bits_of(after), bits_of(before)
    ).view(before.dtype)


def applied(encoded, before):
    found = [array.copy() for array in before]
    change_writer(encoded.view(np.uint8), found)()
    return found


def assert_same_bits(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        assert (one.dtype, one.shape, one.tobytes()) == (
            other.dtype,
            other.shape,
            other.tobytes(),
        )


@DTYPE
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("density", [0, 0.1, 1])
def test_random_bits_of_any_size_in_either_mode(mode, dtype, size, density):  # noqa: F811
    rng = np.random.default_rng([size, 3])
    before = [random_bits(rng, size, dtype), random_bits(rng, 70, dtype)]
    after = [
        partly(rng, each, random_bits(rng, each.size, dtype), density)
        for each in before
    ]
    assert_same_bits(applied(encode_changes(before, after), before), after)


@DTYPE
def test_every_change_between_special_numbers_is_exact(mode, dtype):  # noqa: F811
    special = special_bits(dtype)
    before, after = (each.reshape(-1).copy() for each in np.meshgrid(special, special))
    assert_same_bits(applied(encode_changes([before], [after]), [before]), [after])


@DTYPE
@pytest.mark.parametrize("density", [1e-4, 0.01, 0.3, 1])
def test_random_bits_in_large_numbers(dtype, density):
    rng = np.random.default_rng(1)
    before = random_bits(rng, 100_000, dtype)
    after = partly(rng, before, random_bits(rng, before.size, dtype), density)
    encoded = encode_changes([before], [after])
    assert_same_bits(applied(encoded, [before]), [after])
    assert encoded.nbytes < 1.15 * before.nbytes + 1000


def test_arrays_of_all_dtypes_in_any_order():
    rng = np.random.default_rng(2)
    before = [random_bits(rng, size, dtype) for size in (0, 5, 300) for dtype in FORMS]
    after = [
        partly(rng, each, random_bits(rng, each.size, each.dtype), 0.2)
        for each in before
    ]
    assert_same_bits(applied(encode_changes(before, after), before), after)
    assert_same_bits(applied(encode_changes([], []), []), [])


def test_a_digest_changes_with_every_bit_and_place(mode):  # noqa: F811
    array = random_bits(np.random.default_rng(3), 333, np.dtype(np.uint16))
    found = {digest(array), digest(np.roll(array, 1)), digest(np.roll(array, 64))}
    for place in range(array.size):
        for bit in (0, 7, 15) if mode == "compiled" else (place % 16,):
            changed = array.copy()
            changed[place] ^= 1 << bit
            found.add(digest(changed))
    assert len(found) == 3 + (3 if mode == "compiled" else 1) * array.size


def test_the_signs_of_two_weights_change_a_digest():
    array = np.ones(64, np.float16)
    found = set()
    for place in range(1, 64):
        changed = array.copy()
        changed[[0, place]] *= -1
        found.add(digest(changed))
    assert len(found) == 63
    assert digest(array) not in found


@DTYPE
def test_no_words_lead_out_of_range(mode, dtype):  # noqa: F811
    """Whatever the words are: the changes are refused, or the arrays hold other numbers."""
    rng = np.random.default_rng(4)
    before = random_bits(rng, 500, dtype)
    encoded = encode_changes([before], [random_bits(rng, before.size, dtype)])
    for turn in range(300 if mode == "compiled" else 20):
        words = encoded.copy()
        places = rng.integers(words.size, size=1 + turn % 3)
        words[places] = rng.integers(1 << 63, size=places.size) >> rng.integers(64)
        end = rng.integers(words.size + 1) if turn % 2 else None
        room = np.concatenate([before[:10], before, before[:10]])
        with contextlib.suppress(CodecError, AssertionError):
            change_writer(words[:end], [room[10:-10]])()
        assert_same_bits([room[:10], room[-10:]], [before[:10]] * 2)


def weights(seed=0, **more):
    """Return some arrays by name."""
    rng = np.random.default_rng(seed)
    return {
        "matrix": rng.standard_normal((30, 41)).astype(np.float32),
        "bias": rng.standard_normal(7).astype(np.float16),
        "scale": np.array(2.5, np.float32),
        "empty": np.zeros((0, 3), np.float16),
        **more,
    }


def trained(before, rate=1e-4):
    rng = np.random.default_rng(5)
    after = {name: array.copy() for name, array in before.items()}
    for array in after.values():
        array += (rate * rng.standard_normal(array.shape)).astype(array.dtype)
    return after


def copies(arrays):
    return {name: array.copy() for name, array in arrays.items()}


def assert_same(ours, expected):
    assert list(ours) == list(expected)
    assert_same_bits(ours.values(), expected.values())


def test_arrays_by_name_and_one_array():
    before = weights()
    after = trained(before)
    patch = changes(before, after)
    assert patch.nbytes == len(bytes(patch))
    given = copies(before)
    patch.apply(given)
    assert_same(given, after)
    # in another order
    given = dict(reversed(copies(before).items()))
    Patch.from_bytes(bytearray(bytes(patch))).apply(given)
    assert_same(dict(reversed(given.items())), after)
    given = before["matrix"].copy()
    changes(before["matrix"], after["matrix"]).apply(given)
    assert_same_bits([given], [after["matrix"]])


def test_no_array_and_no_change():
    changes({}, {}).apply({})
    before = weights()
    given = copies(before)
    changes(before, before).apply(given)
    assert_same(given, before)


def test_orders_of_axes_and_strides_do_not_matter():
    before = weights()
    after = trained(before)
    patch = changes(before, {**after, "matrix": np.asfortranarray(after["matrix"])})
    assert bytes(patch) == bytes(changes(before, after))
    given = {**copies(before), "matrix": np.asfortranarray(before["matrix"])}
    patch.apply(given)
    np.testing.assert_array_equal(given["matrix"], after["matrix"])
    wide = np.repeat(before["matrix"], 2, axis=1)
    assert bytes(changes({**before, "matrix": wide[:, ::2]}, after)) == bytes(patch)


def test_tied_weights_are_coded_once_and_changed_once():
    tied = np.random.default_rng(6).standard_normal(10_000).astype(np.float32)
    before = weights(embedding=tied, head=tied)
    after = trained(weights(embedding=tied))
    after["head"] = after["embedding"]
    patch = changes(before, after)
    alone = changes(weights(embedding=tied), trained(weights(embedding=tied)))
    assert patch.nbytes < alone.nbytes + 200
    given = copies(before)
    given["head"] = given["embedding"]
    patch.apply(given)
    assert_same(given, after)
    # a rank that does not tie them
    given = copies(before)
    patch.apply(given)
    assert_same(given, after)


def test_arrays_that_share_memory_and_change_differently_are_refused():
    before = weights(a=np.ones(8, np.float32), b=np.ones(8, np.float32))
    after = copies(before)
    after["a"][3] = 2
    patch = changes(before, after)
    given = copies(before)
    given["a"] = given["b"]
    was = copies(given)
    with pytest.raises(ValueError, match="share memory"):
        patch.apply(given)
    assert_same(given, was)


def test_other_weights_are_refused_and_nothing_is_written():
    before = weights()
    patch = changes(before, trained(before))
    newer = trained(before)
    for given, fault in (
        (
            newer,
            r"'bias' is [0-9a-f]{16} float16 \(7,\): expected [0-9a-f]{16} float16",
        ),
        (weights(1), r"'bias' is .*: expected .* which the patch is for"),
        (
            {**copies(before), "more": np.ones(2, np.float32)},
            "'more' is .* expected none",
        ),
        ({"matrix": before["matrix"].copy()}, "'bias' is missing: expected .* float16"),
        (
            {**copies(before), "bias": np.ones(7, np.float32)},
            r"'bias' is .* float32 \(7,\)",
        ),
        (
            {**copies(before), "bias": np.ones(8, np.float16)},
            r"'bias' is .* float16 \(8,\)",
        ),
    ):
        was = copies(given)
        with pytest.raises(ValueError, match=fault):
            patch.apply(given)
        assert_same(given, was)
    with pytest.raises(
        ValueError, match=r"'bias' is float16 \(8,\): expected float16 \(7,\)"
    ):
        changes(before, {**before, "bias": np.ones(8, np.float16)})


def test_what_cannot_be_written_or_is_no_array_of_weights():
    before = weights()
    patch = changes(before, trained(before))
    given = copies(before)
    given["scale"].flags.writeable = False
    with pytest.raises(ValueError, match=r"the array 'scale': .*read-only"):
        patch.apply(given)
    assert_same(given, before)
    for bad, error in (
        (np.ones(3), "float64: expected float32"),
        (np.ones(3, int), "values are int64"),
        ([1.0], "expected an array"),
    ):
        with pytest.raises(TypeError, match=f"the array 'bad': .*{error}"):
            changes({"bad": bad}, {"bad": bad})


def test_bytes_that_were_cut_or_changed_are_refused():
    sent = bytes(changes(weights(), trained(weights())))
    for size in (*range(40), *range(40, len(sent), 97), len(sent) - 1):
        with pytest.raises(CodecError):
            Patch.from_bytes(sent[:size])
    rng = np.random.default_rng(7)
    for place in (*range(16), *rng.integers(len(sent), size=300).tolist()):
        torn = bytearray(sent)
        torn[place] ^= 1 << rng.integers(8)
        with pytest.raises(CodecError):
            Patch.from_bytes(torn)


@pytest.mark.parametrize("calls", range(4))
def test_out_of_memory_nothing_is_written(monkeypatch, calls):
    before = weights()
    patch = changes(before, trained(before))
    given = copies(before)
    left = [calls]

    def on_host(array):
        if not left[0]:
            raise MemoryError
        left[0] -= 1
        return array

    with monkeypatch.context() as context:
        context.setattr(patches, "_on_host", on_host)
        with pytest.raises(MemoryError):
            patch.apply(given)
    assert_same(given, before)
    patch.apply(given)
    assert_same(given, trained(before))


def bfloat16(values):
    """Return the bits of float32 values rounded to bfloat16, ties to even."""
    bits = values.view(np.uint32)
    return (bits + (0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@pytest.mark.parametrize(("rate", "most"), [(1e-6, 1.0), (3e-6, 0.9), (1e-5, 0.75)])
def test_bytes_of_a_change(rate, most):
    """In a simulation of a step of AdamW: the positions alone have an entropy of 0.79, 0.63 and 0.45 bytes."""
    rng = np.random.default_rng(8)
    masters = rng.standard_normal(1_000_000, np.float32) * np.float32(0.02)
    steps = rate * np.clip(rng.standard_normal(masters.size, np.float32), -3, 3)
    before = bfloat16(masters)
    after = bfloat16(masters + steps.astype(np.float32))
    encoded = encode_changes([before], [after])
    assert encoded.nbytes / np.count_nonzero(before != after) < most


@pytest.mark.parametrize("dtype", NAMED, ids=str)
def test_weights_on_a_device_are_changed_through_the_host(dtype):
    cupy = cupy_for_tests()
    before = {name: array.astype(dtype) for name, array in weights().items()}
    after = trained(before)
    patch = changes(
        {name: cupy.asarray(array) for name, array in before.items()},
        {name: cupy.asarray(array) for name, array in after.items()},
    )
    assert bytes(patch) == bytes(changes(before, after))
    given = {name: cupy.asarray(array) for name, array in before.items()}
    patch.apply(given)
    assert_same({name: array.get() for name, array in given.items()}, after)
    with pytest.raises(ValueError, match="which the patch is for"):
        patch.apply(given)
    assert_same({name: array.get() for name, array in given.items()}, after)
