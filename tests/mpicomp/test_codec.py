import struct
from copy import deepcopy

import fuzz_codec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from strategies import DTYPES, sparse_vectors

from mpicomp import CodecError, Quantised, SparseVector, TopK
from mpicomp.codec import (
    HEADER_NBYTES,
    decode,
    decode_few_bits,
    encode,
    encode_few_bits,
    encoded_nbytes,
    plain,
    quick,
    smallest,
)
from mpicomp.codec import few_bits_message as in_a_message
from mpicomp.codec.indices import (
    BITMAP,
    ELIAS_FANO,
    INDEX_FORMATS,
    INT32,
    INT64,
    RANGE,
)
from mpicomp.codec.values import (
    STORED,
    VALUE_FORMATS,
    fits,
    offsets_of,
    runs,
    table_of_runs,
)
from mpicomp.compressors.selection import Selection
from mpicomp.correction import Correction
from mpicomp.few_bits import BITS, coder

HEADER = "<2sBBIqqq32x"  # the fields that a decoder reads, and zeros


def same(back, vector):
    assert (back.length, back.dtype, back.width) == (
        vector.length,
        vector.dtype,
        vector.width,
    )
    assert back.indices.dtype == vector.indices.dtype
    assert back.indices.tobytes() == vector.indices.tobytes()
    assert back.values.tobytes() == vector.values.tobytes()


@given(st.one_of(sparse_vectors(), sparse_vectors(width=0), sparse_vectors(width=3)))
def test_what_is_decoded_is_what_was_encoded_to_the_bit(vector):
    sizes = []
    for coding in (plain(vector), quick(vector), smallest(vector)):
        message = encode(vector, coding=coding)
        sizes.append(message.size)
        assert message.size == encoded_nbytes(vector, coding)
        same(decode(message), vector)
    assert sizes == sorted(sizes, reverse=True)


@st.composite
def positions(draw):
    """Draw a length and increasing positions: of any density, up to the last index, around the bounds of blocks."""
    length = draw(
        st.sampled_from(
            [
                1,
                2,
                63,
                64,
                65,
                65_535,
                65_536,
                65_537,
                2**31 - 1,
                2**31,
                2**40,
                2**63 - 1,
            ]
        )
    )
    near = st.sampled_from(
        [
            0,
            1,
            63,
            64,
            65_535,
            65_536,
            2 * 65_536,
            2**31 - 2,
            2**31 - 1,
            length - 2,
            length - 1,
        ]
    )
    some = draw(st.lists(st.one_of(near, st.integers(0, length - 1)), max_size=40))
    run = range(
        start := draw(st.integers(0, length - 1)),
        min(length, start + draw(st.integers(0, 200))),
    )
    step = draw(st.integers(1, 70_000))
    spread = range(0, min(length, 50 * step), step)
    chosen = draw(st.sampled_from([[], some, run, spread, [*some, *run, *spread]]))
    return length, np.unique(
        np.array([index for index in chosen if 0 <= index < length], np.int64)
    )


@given(positions(), st.sampled_from(range(len(INDEX_FORMATS))), st.sampled_from(DTYPES))
def test_every_index_format_comes_back_to_the_bit(case, form, dtype):
    length, indices = case
    vector = SparseVector(indices, np.arange(indices.size).astype(dtype), length)
    nbytes = INDEX_FORMATS[form].nbytes(vector)
    if nbytes is None or nbytes > 10**6:
        return
    message = encode(vector, (INDEX_FORMATS[form], plain(vector)[1]))
    same(decode(message), vector)
    section = np.full(nbytes, 255, np.uint8)
    INDEX_FORMATS[form].write(vector, section)
    assert section.tobytes() == message[HEADER_NBYTES:][:nbytes].tobytes(), (
        "a part of the section was not written"
    )


@given(st.data(), st.sampled_from(range(len(VALUE_FORMATS))))
def test_every_value_format_comes_back_to_the_bit(data, form):
    own, stored, _ = STORED[form]
    short = data.draw(st.sampled_from([np.float16, np.float32]))
    values = data.draw(
        hnp.arrays(
            short,
            st.integers(0, 99),
            elements=hnp.from_dtype(np.dtype(short), allow_nan=False),
        )
    )
    if data.draw(st.booleans()):
        magnitudes = values[: data.draw(st.integers(1, 2))]
        values = np.copysign(np.resize(magnitudes, values.shape), values)
    with np.errstate(over="ignore"):
        values = values.astype(own)
    vector = SparseVector(np.arange(values.size), values, values.size)
    if data.draw(st.booleans()):
        values = np.abs(np.rint(values))  # counts among them
        vector = SparseVector(np.arange(values.size), values, values.size)
    forms = [VALUE_FORMATS[form]] if fits(values, stored) else []
    if values.size:
        forms.append(offsets_of(values))
    for most in 1, 2:
        table = table_of_runs(values, most)
        if table is not None:
            forms.append(runs(values.dtype, most, table))
    for coded in forms:
        same(decode(encode(vector, coding=(INT32, coded))), vector)
    same(decode(encode(vector, coding=smallest(vector))), vector)


def random_support(density, length=1_000_000):
    return np.flatnonzero(np.random.default_rng(3).random(length) < density)


@pytest.mark.parametrize(("density", "bits"), [(0.001, 12.5), (0.01, 9), (0.125, 8.01)])
def test_indices_are_near_their_entropy(density, bits):
    support = random_support(density)
    vector = SparseVector(support, np.empty((support.size, 0), np.float32), 1_000_000)
    assert (
        8 * (encoded_nbytes(vector, smallest(vector)) - HEADER_NBYTES)
        <= bits * support.size
    )


@pytest.mark.parametrize(
    ("values", "nbytes"),
    [
        (np.array([1.5, -2, 3], np.float32), 6),
        (np.array([1.5, -2, 1e30], np.float64).astype(np.float32), 12),
        # bfloat16 numbers, beyond the range of float16
        (np.array([1.5, -2.0, 2.0**100], np.float32), 6),
        (np.array([0.1, 0.2], np.float32), 8),
        (np.array([0.1, 0.2], np.float64), 16),
        (np.array([0.1, 0.2], np.float32).astype(np.float64), 8),
        (np.full(1000, -0.1, np.float64), 128 + 16 + 8),
        (np.resize(np.array([0.1, -0.3, -0.1], np.float32), 1000), 2 * 128 + 24 + 8),
        (np.resize(np.array([0.1, 0, 5e-324]), 100), 800),  # three magnitudes
        (np.resize(np.array([0.1, -5e-324, -0.1]), 100), 2 * 16 + 24 + 8),
        (
            np.full(1000, 0.1, np.float16) * (-1) ** np.arange(1000).astype(np.float16),
            128 + 16 + 8,
        ),
        # three tensors' signs
        (np.repeat(np.array([0.1, 0.7, -0.3], np.float32), 1000), 376 + 3 * 16 + 8),
        (np.repeat(np.array([0.1, 0.7, 0.2, 0.4], np.float32), 1000), 504 + 4 * 16 + 8),
    ],
)
def test_values_take_the_shortest_format_that_loses_nothing(values, nbytes):
    vector = SparseVector(np.arange(values.size), values, values.size)
    assert encoded_nbytes(vector, smallest(vector)) == HEADER_NBYTES + 8 + nbytes
    same(decode(encode(vector, coding=smallest(vector))), vector)


@pytest.mark.parametrize(
    ("dtype", "bits"), [(np.float16, 12), (np.float32, 25), (np.float64, 54)]
)
def test_values_that_were_selected_take_the_bits_by_which_they_differ(dtype, bits):
    """A sign, what they differ by in the fraction, and a bit for the second octave."""
    rng = np.random.default_rng(0)
    values = (
        np.sign(rng.standard_normal(1000)) * (1.6 + 2.3 * rng.random(1000))
    ).astype(dtype)
    vector = SparseVector(np.arange(1000), values, 1000)
    assert (
        encoded_nbytes(vector, smallest(vector))
        == HEADER_NBYTES + 8 + 1000 * (bits // 8) + 128 * (bits % 8) + 16
    )
    same(decode(encode(vector, coding=smallest(vector))), vector)


def test_the_layout_of_offsets_is_the_documented_one():
    # 0x3c00, 0xbd00, 0x3f00, 0xbc00
    values = np.array([1, -1.25, 1.75, -1], np.float16)
    message = encode(
        SparseVector(range(4), values, 4), coding=(RANGE, offsets_of(values))
    ).tobytes()
    # of 0x000, 0x500, 0x300, 0x400: bits 8, 9 and 10
    bytes_and_bits = bytes(8), 0b0110, 0b0100, 0b1010
    assert message == (
        b"MV"
        + bytes([4, RANGE.number | 15 << 3, 0, 0, 0, 0])
        + struct.pack("<qqq32x", 4, 4, 120)
        + struct.pack("<q", 0)
        + struct.pack("<8sQQQ", *bytes_and_bits)
        + struct.pack("<qq", 0x3C00, 10)
    )


def in_runs(values, most=2):
    table = table_of_runs(values, most)
    return RANGE, runs(values.dtype, most, table)


@pytest.mark.parametrize("codec", ["two_bit", "sign", "float16", "bfloat16", None])
@pytest.mark.parametrize(
    "sizes",
    [[1, 3, 10, 4000, 9000], [2] * 40 + [20000], [700] * 30, [5, 30, 50, 64, 200]],
)
def test_the_bytes_do_not_depend_on_the_order_of_the_segments(codec, sizes):
    rng, found = np.random.default_rng(0), set()
    parts = [
        rng.standard_normal(size).astype(np.float32) * 10.0 ** rng.integers(-3, 3)
        for size in sizes
    ]
    for order in (
        range(len(sizes)),
        reversed(range(len(sizes))),
        *(rng.permutation(len(sizes)) for _ in range(8)),
    ):
        given = [parts[place] for place in order]
        compressor = TopK(0.9) if codec is None else Quantised(TopK(0.9), codec)
        bounds = np.cumsum([0, *map(len, given)]).tolist()
        selection = Selection(
            [None] * len(given), bounds, [deepcopy(compressor) for _ in given]
        )
        whole = np.concatenate(given)
        sent = selection.select(Correction([whole], whole))
        found.add(encoded_nbytes(sent, smallest(sent)))
    assert max(found) <= 1.02 * min(found)


def test_the_layout_of_runs_is_the_documented_one():
    # 0x3c00, 0xbd00, 0x3d00, 0xbc00, 0x4000, 0x4200
    values = np.array([1, -1.25, 1.25, -1, 2, 3, 3], np.float16)
    message = encode(
        SparseVector(range(7), values, 7), coding=in_runs(values)
    ).tobytes()
    assert message == (
        b"MV"
        + bytes([4, RANGE.number | 12 << 3, 0, 0, 0, 0])
        + struct.pack("<qqq32x", 7, 7, 144)
        + struct.pack("<q", 0)
        + struct.pack("<QQ", 0b0001010, 0b1100110)
        + struct.pack("<qqq", 0, 0x3C00, 0x3D00)
        + struct.pack("<qqq", 4, 0x4000, 0x4200)
        + struct.pack("<q", 2)
    )


@pytest.mark.parametrize("most", [1, 2])
def test_runs_are_as_long_as_they_can_be(most):
    """Against a loop over the values."""
    rng = np.random.default_rng(5)
    for _ in range(300):
        parts = [
            rng.choice(rng.integers(1, 5, most), rng.integers(1, 9))
            for _ in range(rng.integers(1, 6))
        ]
        values = np.concatenate(parts).astype(np.float32) * rng.choice(
            np.array([-1, 1], np.float32)
        )
        starts, seen = [0], set()
        for place, magnitude in enumerate(np.abs(values).tolist()):
            if magnitude not in seen and len(seen) == most:
                starts.append(place)
                seen = set()
            seen.add(magnitude)
        assert table_of_runs(values, most)[:, 0].tolist() == starts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("place", "number"),
    [
        (0, 1),
        (0, -1),
        (1, -5),
        (2, -(2**63)),
        (2, 0),
        (2, None),
        (3, 0),
        (3, 40),
        (3, -1),
        (4, 0),
        (6, 0),
        (6, -1),
    ],
)
def test_runs_that_lie_are_refused(dtype, place, number):
    values = np.repeat(np.array([1, -2, 1, 3, 4], dtype), 8)
    message = encode(SparseVector(range(40), values, 40), coding=in_runs(values))
    assert decode(message).values.tolist() == values.tolist()
    table = message[-56:].view(np.int64)
    if number is None:  # the bit of the sign
        number = 1 << 8 * values.itemsize - 1 if values.itemsize < 8 else -1
    table[place] = table[5] + 1 if place == 4 else number
    with pytest.raises(CodecError, match=r"runs|value format"):
        decode(message)


def test_values_of_many_magnitudes_are_no_runs_nor_those_of_a_dense_vector():
    dense = np.resize(np.array([0, 3, 0, 2, 0, 5], np.float32), 600)
    assert table_of_runs(dense, 1) is table_of_runs(dense, 2) is None
    assert len(table_of_runs(np.minimum(dense, 1), 2)) == 1
    values = np.arange(1, 3001, dtype=np.float32)
    assert table_of_runs(values, 1) is table_of_runs(values, 2) is None
    assert len(table_of_runs(values[:1024], 1)) == 1024
    assert len(table_of_runs(values[:2048], 2)) == 1024


@pytest.mark.parametrize(
    ("least", "width"), [(-1, 3), (0, -1), (0, 16), (2**62, 64), (0, 2**62)]
)
def test_offsets_that_lie_are_refused(least, width):
    message = encode(
        SparseVector(range(40), np.ones(40, np.float16), 40),
        coding=(RANGE, offsets_of(np.ones(1, np.float16))),
    )
    message[-16:] = np.array([least, width]).view(np.uint8)
    with pytest.raises(CodecError):
        decode(message)


def test_the_layout_is_the_documented_one():
    message = encode(SparseVector([7], np.array([1.5], np.float32), 9)).tobytes()
    assert message == (
        b"MV"
        + bytes([4, 0x08, 0, 0, 0, 0])
        + struct.pack("<qqq32x", 9, 1, 76)
        + struct.pack("<ii", 7, 0)
        + struct.pack("<f", 1.5)
    )


def test_a_range_without_values_is_refused():
    """Eight bytes could claim any number of entries."""
    message = struct.pack(
        HEADER + "q", b"MV", 4, RANGE.number | 1 << 3, 1, 2**62, 2**61, 72, 0
    )
    with pytest.raises(CodecError, match="8 bytes of indices in format 2 do not hold"):
        decode(np.frombuffer(message, np.uint8))


def broken(last_two=(5, 8), **changes):
    """Return a sound message of 3 entries with fields of its header, or the last two indices, replaced."""
    fields = {
        "magic": b"MV",
        "version": 4,
        "index": 0,
        "value": 1,
        "row": 0,
        "length": 9,
        "nnz": 3,
        "nbytes": 92,
    }
    magic, version, index, value, *others = (fields | changes).values()
    body = struct.pack("<3i4x3f", 1, last_two[0], last_two[1], 1, 2, 3)
    return np.frombuffer(
        struct.pack(HEADER, magic, version, index | value << 3, *others) + body,
        np.uint8,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"MX"}, "got magic b'MX', version 4: expected b'MV', 4"),
        ({"version": 1}, "version 1: expected b'MV', 4"),
        ({"index": 5}, "got index format 5"),
        (
            {"index": 1},
            "16 bytes of indices in format 1 do not hold 3 entries for int32",
        ),
        ({"index": 2}, "16 bytes of indices in format 2 do not hold 3 entries"),
        ({"index": 3}, "16 bytes of indices in format 3 do not hold 3 entries"),
        ({"index": 4}, "16 bytes of indices in format 4 do not hold 3 entries"),
        ({"index": 7, "value": 31}, "got index format 7 and value format 31"),
        ({"value": 18}, "value format 18"),
        ({"value": 16}, "value format 16"),
        ({"value": 13}, "value format 13"),
        ({"length": -1}, "for length -1"),
        ({"length": 2}, "got 3 entries for length 2"),
        ({"length": 2**31}, "in format 0 do not hold 3 entries for int64"),
        ({"nnz": -1}, "got -1 entries"),
        ({"nnz": 4}, "the header says 92 bytes for 4 entries"),
        ({"nnz": 1}, "24 bytes of indices in format 0 do not hold 1 entries"),
        (
            {"nnz": 2**62, "length": 2**63 - 1, "index": 1},
            "the header says 92 bytes for 4611686018427387904 entries",
        ),
        ({"last_two": (5, 9)}, "index 9 is out of range"),
        ({"nbytes": 93}, "the header says 93 bytes, the buffer has 92"),
        ({"row": 3}, "the header says 92 bytes for 3 entries"),
        (
            {"row": 2**32 - 1, "nnz": 2**62, "length": 2**63 - 1},
            "the header says 92 bytes for 46",
        ),
        ({"nnz": 5, "nbytes": 108}, "the header says 108 bytes, the buffer has 92"),
    ],
)
def test_a_header_that_lies_is_refused(changes, message):
    assert decode(broken()).nnz == 3
    with pytest.raises(CodecError, match=message):
        decode(broken(**changes))


def test_the_quick_coding_goes_by_the_true_count():
    values = np.ones(1000, np.float32)
    run = SparseVector(np.arange(5000, 6000), values, 10**6)
    assert quick(run)[0] == RANGE
    assert encoded_nbytes(run, quick(run)) == HEADER_NBYTES + 8 + 4000
    dense = SparseVector(np.arange(5000, 9000, 4), values, 10**6)
    assert quick(dense)[0] == BITMAP
    assert encoded_nbytes(dense, quick(dense)) == HEADER_NBYTES + 16 + 8 * 63 + 4000
    spread = SparseVector(np.arange(0, 10**6, 1000), values, 10**6)
    assert (
        encoded_nbytes(spread, quick(spread))
        == encoded_nbytes(spread)
        == HEADER_NBYTES + 4000 + 4000
    )


@pytest.mark.parametrize(
    ("span", "form"), [(7872, BITMAP), (7873, INT32), (12_000, INT32)]
)
def test_the_quick_coding_is_a_bitmap_up_to_a_quarter_of_the_plain_indices(span, form):
    vector = SparseVector([*range(999), span - 1], np.ones(1000), 10**6)
    assert quick(vector)[0] == form


def test_the_smallest_coding_goes_by_the_true_count():
    def form_of(indices, length):
        vector = SparseVector(indices, np.ones(len(indices), np.float32), length)
        return smallest(vector)[0]

    assert form_of(range(5000, 6000), 10**6) == RANGE
    assert form_of(range(5000, 13000, 2), 10**6) == BITMAP
    assert form_of(random_support(0.01), 10**6) == ELIAS_FANO
    # plain: what EF spares is less than its head
    assert form_of([0, 5, 2**40, 2**62], 2**63 - 1) == INT64
    close = np.sort(np.random.default_rng(1).choice(70_000, 200, replace=False)) + (
        1 << 30
    )
    assert form_of(close, 2**31 - 1) == ELIAS_FANO
    # no values, so no range
    assert smallest(SparseVector(range(50), np.empty((50, 0)), 50))[0] == BITMAP


def of_section(form, section, nnz, length):
    """Return a message of float64 whose section of indices has these 64-bit words."""
    body = struct.pack(f"<{len(section)}q{nnz}d", *section, *range(nnz))
    header = struct.pack(
        HEADER, b"MV", 4, form.number | 2 << 3, 0, length, nnz, 64 + len(body)
    )
    return np.frombuffer(header + body, np.uint8)


@pytest.mark.parametrize(
    ("form", "section", "nnz", "length"),
    [
        # 2^32 beyond the end of its span
        (ELIAS_FANO, (0, 2**31 - 1, 2**30 - 2, 0, 0b100000), 1, 2**31 - 1),
        (RANGE, (2**31 - 1,), 1, 2**31 - 1),
        (RANGE, (2**32,), 1, 9),
        (RANGE, (2**63 - 1,), 1, 2**63 - 1),
        (RANGE, (-1,), 2, 9),
        (RANGE, (2**63 - 2,), 2, 9),
        (RANGE, (8,), 2, 9),  # the last index is 9, the length too
        (BITMAP, (0, 64, 0b1011), 2, 9),  # three bits for two entries
        (BITMAP, (0, 2, 0b101), 2, 9),  # a bit beyond the span
        (BITMAP, (0, 10**9, 0b11), 2, 9),
        (BITMAP, (0, -5, 0b11), 2, 9),
        (BITMAP, (-3, 64, 0b11), 2, 9),
        (BITMAP, (2**62, 2**62 + 5, 0b11), 2, 9),
        (BITMAP, (8, 64, 0b11), 2, 9),
        (BITMAP, (0, 1, 0b11), 2, 9),
        (ELIAS_FANO, (0, 8, 0, 0), 2, 9),  # no high bits
        (ELIAS_FANO, (0, 8, 0, 0, 0b11), 2, 9),  # does not end at the end of its span
        (ELIAS_FANO, (0, 8, 0, 0, 0b1011), 2, 9),  # three ones for two entries
        (ELIAS_FANO, (0, 8, 0, 0, 0b1), 2, 9),
        (ELIAS_FANO, (0, 1, 0, 0, 0b11), 2, 9),
        (ELIAS_FANO, (2**62, 2**62 + 5, 0, 0, 0b11), 2, 9),
    ],
)
def test_a_section_of_indices_that_lies_is_refused(form, section, nnz, length):
    with pytest.raises(CodecError):
        decode(of_section(form, section, nnz, length))


@pytest.mark.parametrize("dtype", DTYPES)
def test_offsets_are_narrower_than_their_dtype(dtype):
    """The planes of 40 zeros have the size that the width asks for: with the sign it leaves the dtype by a bit."""
    bits = 8 * np.dtype(dtype).itemsize
    for width in (bits - 1, bits):
        octets, rest = divmod(width + 1, 8)
        body = struct.pack(f"<q{40 * octets + 8 * rest}xqq", 0, 0, width)
        formats = RANGE.number | (15 + DTYPES.index(dtype)) << 3
        message = (
            struct.pack(HEADER, b"MV", 4, formats, 0, 40, 40, 64 + len(body)) + body
        )
        if width < bits:
            assert decode(np.frombuffer(message, np.uint8)).values.tolist() == [0] * 40
        else:
            with pytest.raises(CodecError, match="value format"):
                decode(np.frombuffer(message, np.uint8))


@pytest.mark.parametrize("size", range(92))
def test_a_truncated_message_is_refused(size):
    with pytest.raises(CodecError):
        decode(broken()[:size])


def test_mutated_messages_decode_or_raise_codec_error():
    """Thousands of sound messages with bits turned, ends cut off, fields replaced; the script runs millions."""
    counts = fuzz_codec.run(4_000, seed=0)
    assert counts["refused"] > 2000
    assert counts["decoded"] > 200


def few_bits_message(values, bits=4, block=32):
    code = coder(Correction([values], np.empty_like(values)), bits, block)
    coded = code(in_a_message(values.size, bits, block, values))
    message = encode_few_bits(coded)
    padded = code(in_a_message(values.size, bits, block, values, line=64))
    assert encode_few_bits(padded).tobytes() == message.tobytes() + bytes(
        -message.size % 64
    )
    return message, coded


@given(
    st.integers(0, 200),
    st.sampled_from(DTYPES[1:]),
    st.sampled_from(BITS),
    st.sampled_from([32, 64]),
)
def test_values_in_few_bits_come_back(size, dtype, bits, block):
    message, coded = few_bits_message(
        np.random.default_rng(size).standard_normal(size).astype(dtype), bits, block
    )
    back = decode_few_bits(message)
    assert (back.size, back.bits, back.block, back.dtype) == (
        size,
        bits,
        block,
        dtype,
    )
    assert (back.codes.tobytes(), back.scales.tobytes()) == (
        coded.codes.tobytes(),
        coded.scales.tobytes(),
    )


def test_the_layout_of_few_bits_is_the_documented_one():
    values = np.zeros(33, np.float32)
    values[[0, 1, 16, 32]] = 7, -3, 2, 14
    message, _ = few_bits_message(values)
    assert message.tobytes() == (
        b"MV"
        + bytes([4, 1, 32, 0, 0, 0])
        + struct.pack("<qqq", 33, 33, 64 + 8 + 32)
        + bytes(16)
        + bytes([3, *[0] * 15])
        + struct.pack("<HHxxxx", 0x3F80, 0x4000)  # 1 and 2
        + bytes([0xAF, 0x85, *[0x88] * 14])  # 7 and 2, -3 and 0
        + bytes([0x8F, *[0x88] * 15])
    )
    values = np.zeros(32, np.float32)
    values[[0, 8]] = -5, 5
    for bits, codes in (2, [0b1011, *[0] * 7]), (1, [0b1, 0, 0, 0]):
        assert few_bits_message(values, bits)[0][72:].tolist() == codes


@pytest.mark.parametrize(
    ("at", "number"),
    [
        (3, 4),
        (3, 5),
        (3, 12),
        (3, 255),
        (4, 0),
        (4, 31),
        (4, 48),
        (4, 1 << 17),
        (8, -1),
        (8, 34),
        (16, 34),
        (24, 70),
        (48, 0),
    ],
)
def test_few_bits_that_lie_are_refused(at, number):
    message, _ = few_bits_message(np.ones(33, np.float32))
    assert decode_few_bits(message).size == 33
    nbytes = {3: 1, 4: 4, 48: 1}.get(at, 8)
    message[at : at + nbytes] = np.array([number], np.int64).view(np.uint8)[:nbytes]
    with pytest.raises(CodecError):
        decode_few_bits(message)
