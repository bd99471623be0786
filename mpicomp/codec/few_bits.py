"""Messages with consecutive values of a dense vector in few bits (`mpicomp.few_bits`): the kind 3.

docs/contributing/wire_format.md describes them.
"""

from mpicomp.arrays import Buffer, Dtype
from mpicomp.codec.indices import padded
from mpicomp.errors import CodecError
from mpicomp.few_bits import BITS, BLOCKS, SCALES, FewBits
from mpicomp.vector import MAX_LENGTH

_FORMS: dict[int, tuple[int, Dtype]] = {
    number | is_double << 3: (bits or 8 * dtype.itemsize, dtype)
    for is_double, dtype in enumerate(SCALES)
    for number, bits in enumerate((*BITS, 0))
}
_NUMBERS = {form: number for number, form in _FORMS.items()}


def form_of(coded: FewBits) -> int:
    """Return the number of bits and dtype in a header."""
    return _NUMBERS[coded.bits, coded.dtype]


def read(payload: Buffer, form: int, block: int, size: int, entries: int) -> FewBits:
    """Return the values in a payload, as views; CodecError if the fields of the header do not fit it."""
    if form not in _FORMS:
        raise CodecError(f"got {form} for the bits of a value: expected a known number")
    if block not in BLOCKS:
        raise CodecError(f"got blocks of {block} values: expected one of {BLOCKS}")
    bits, dtype = _FORMS[form]
    if not 0 <= size <= MAX_LENGTH or entries != size:
        raise CodecError(f"got {entries} of {size} values: expected all of them")
    if payload.size != nbytes_of(size, bits, block, dtype):
        raise CodecError(
            f"{payload.size} bytes do not hold {size} values of {bits} bits in blocks of {block}"
        )
    return view_of_payload(None, payload, size, bits, block, dtype)


def nbytes_of(size: int, bits: int, block: int, dtype: Dtype) -> int:
    """Return the bytes after the header."""
    codes, scales = _nbytes(size, bits, block, dtype)
    return padded(scales) + codes


def view_of_payload(
    message: Buffer | None,
    payload: Buffer,
    size: int,
    bits: int,
    block: int,
    dtype: Dtype,
) -> FewBits:
    """Return the values in a payload, as views; with zeros for its padding where `message` is to be sent."""
    _, scales = _nbytes(size, bits, block, dtype)
    if message is not None:
        payload[scales : padded(scales)] = 0
    return FewBits(
        payload[padded(scales) :],
        payload[:scales].view(SCALES[dtype]),
        size,
        bits,
        block,
        message,
    )


def _nbytes(size: int, bits: int, block: int, dtype: Dtype) -> tuple[int, int]:
    if bits not in BITS:
        return size * dtype.itemsize, 0
    blocks = -(-size // block)
    scales = 2 if bits == 2 else 1
    return blocks * (block * bits // 8), blocks * scales * SCALES[dtype].itemsize
