import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from strategies import sparse_vectors

from mpicomp import CodecError, SparseVector
from mpicomp.codec import BITMAP, HEADER_NBYTES, RANGE, decode, encode, encoded_nbytes, smallest_format


@given(st.one_of(sparse_vectors(), sparse_vectors(width=0), sparse_vectors(width=3)), st.booleans())
def test_what_is_decoded_is_what_was_encoded_to_the_bit(vector, compact):
    form = smallest_format(vector) if compact else None
    message = encode(vector, form=form)
    assert message.size == encoded_nbytes(vector, form) <= encoded_nbytes(vector)
    back = decode(message)
    assert (back.length, back.dtype, back.width) == (vector.length, vector.dtype, vector.width)
    assert back.indices.dtype == vector.indices.dtype
    assert back.indices.tobytes() == vector.indices.tobytes()
    assert back.values.tobytes() == vector.values.tobytes()


def test_the_layout_is_the_documented_one():
    message = encode(SparseVector([7], np.array([1.5], np.float32), 9)).tobytes()
    assert message == (
        b"MV"
        + bytes([1, 0x10, 0, 0, 0, 0])
        + struct.pack("<qqq", 9, 1, 44)
        + struct.pack("<ii", 7, 0)
        + struct.pack("<f", 1.5)
    )


def test_64_bit_indices_and_bytes_behind_the_message():
    vector = SparseVector([2**40, 2**62], np.array([1, 2], np.float16), 2**63 - 1)
    room = np.full(200, 255, np.uint8)
    message = encode(vector, room)
    assert message.size == HEADER_NBYTES + 16 + 4
    assert decode(room).indices.tolist() == [2**40, 2**62]
    with pytest.raises(ValueError, match="out has 10 bytes: expected at least 52"):
        encode(vector, np.empty(10, np.uint8))


def broken(last_two=(5, 8), **changes):
    """Return a sound message of 3 entries with fields of its header, or the last two indices, replaced."""
    fields = {"magic": b"MV", "version": 1, "index": 0, "value": 1, "row": 0, "length": 9, "nnz": 3, "nbytes": 60}
    magic, version, index, value, *others = (fields | changes).values()
    body = struct.pack("<3i4x3f", 1, last_two[0], last_two[1], 1, 2, 3)
    return np.frombuffer(struct.pack("<2sBBIqqq", magic, version, index | value << 4, *others) + body, np.uint8)


def test_the_sound_one_is_sound():
    assert decode(broken()).nnz == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"MX"}, "got magic b'MX', version 1: expected b'MV', version 1"),
        ({"version": 2}, "version 2: expected b'MV', version 1"),
        ({"index": 4}, "got index format 4"),
        ({"index": 1}, "16 bytes of indices in format 1 do not hold 3 entries with int32 indices"),
        ({"index": 2}, "16 bytes of indices in format 2 do not hold 3 entries"),
        ({"index": 3}, "16 bytes of indices in format 3 do not hold 3 entries"),
        ({"value": 3}, "value format 3"),
        ({"length": -1}, "for length -1"),
        ({"length": 2}, "got 3 entries for length 2"),
        ({"length": 2**31}, "in format 0 do not hold 3 entries with int64 indices"),
        ({"nnz": -1}, "got -1 entries"),
        ({"nnz": 4}, "the header says 60 bytes for 4 entries"),
        ({"nnz": 1}, "24 bytes of indices in format 0 do not hold 1 entries"),
        ({"nnz": 2**62, "length": 2**63 - 1, "index": 1}, "the header says 60 bytes for 4611686018427387904 entries"),
        ({"last_two": (5, 9)}, "index 9 is out of range"),
        ({"nbytes": 61}, "the header says 61 bytes for 3 entries, and 60 bytes are there"),
        ({"row": 3}, "the header says 60 bytes for 3 entries"),
        ({"row": 2**32 - 1, "nnz": 2**62, "length": 2**63 - 1}, "the header says 60 bytes for 46"),
        ({"nnz": 5, "nbytes": 76}, "the header says 76 bytes for 5 entries, and 60 bytes are there"),
    ],
)
def test_a_header_that_lies_is_refused(changes, message):
    with pytest.raises(CodecError, match=message):
        decode(broken(**changes))


def test_the_smallest_format_goes_by_the_true_count():
    values = np.ones(1000, np.float32)
    run = SparseVector(np.arange(5000, 6000), values, 10**6)
    assert smallest_format(run) == RANGE
    assert encoded_nbytes(run, RANGE) == 32 + 8 + 4000
    dense = SparseVector(np.arange(5000, 13000, 8), values, 10**6)
    assert smallest_format(dense) == BITMAP
    assert encoded_nbytes(dense, BITMAP) == 32 + 16 + 8 * 125 + 4000
    spread = SparseVector(np.arange(0, 10**6, 1000), values, 10**6)
    assert encoded_nbytes(spread, smallest_format(spread)) == encoded_nbytes(spread) == 32 + 4000 + 4000


@pytest.mark.parametrize(
    ("form", "section", "nnz"),
    [
        (RANGE, (-1,), 2),
        (RANGE, (2**63 - 2,), 2),
        (RANGE, (8,), 2),  # the last index is 9, the length too
        (BITMAP, (0, 64, 0b1011), 2),  # three bits for two entries
        (BITMAP, (0, 2, 0b101), 2),  # a bit beyond the span
        (BITMAP, (0, 10**9, 0b11), 2),
        (BITMAP, (0, -5, 0b11), 2),
        (BITMAP, (-3, 64, 0b11), 2),
        (BITMAP, (2**62, 2**62 + 5, 0b11), 2),
        (BITMAP, (8, 64, 0b11), 2),
    ],
)
def test_a_range_or_bitmap_that_lies_is_refused(form, section, nnz):
    body = struct.pack(f"<{len(section)}q{nnz}d", *section, *range(nnz))
    header = struct.pack("<2sBBIqqq", b"MV", 1, form | 2 << 4, 0, 9, nnz, 32 + len(body))
    with pytest.raises(CodecError):
        decode(np.frombuffer(header + body, np.uint8))


@pytest.mark.parametrize("size", range(60))
def test_a_truncated_message_is_refused(size):
    with pytest.raises(CodecError):
        decode(broken()[:size])


@settings(max_examples=300)
@given(hnp.arrays(np.uint8, st.integers(0, 100)), st.booleans())
def test_any_bytes_decode_or_raise_codec_error(noise, with_magic):
    message = noise.copy()
    if with_magic and message.size >= 3:
        message[:3] = list(b"MV\x01")
    try:
        vector = decode(message)
    except CodecError:
        return
    assert vector.values.nbytes + HEADER_NBYTES <= message.size
    assert vector.nnz <= 8 * message.size
