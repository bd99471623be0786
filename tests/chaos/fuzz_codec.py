"""Feed the decoder with broken messages:  python tests/chaos/fuzz_codec.py [how many] [seed]

Sound messages in every format, with bits turned, bytes and fields of the header
replaced, ends cut off or put on; and noise. Whatever comes, `decode` returns a vector
no larger than its message can hold, or raises CodecError; and the process may not
allocate 2 GiB.
"""

import pathlib
import resource
import sys
from collections import Counter

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))

from few_bits_cases import decode as decode_values

from mpicomp import CodecError, SparseVector
from mpicomp.codec import (
    FEW_BITS,
    HEADER_NBYTES,
    KIND_AT,
    decode,
    decode_few_bits,
    encode,
    encode_few_bits,
    few_bits_message,
    plain,
)
from mpicomp.codec.indices import INDEX_FORMATS
from mpicomp.codec.values import (
    STORED,
    VALUE_FORMATS,
    fits,
    offsets_of,
    runs,
    table_of_runs,
)
from mpicomp.correction import Correction
from mpicomp.few_bits import BITS, coder

FIELDS = (
    (0, 1),
    (1, 1),
    (2, 1),
    (3, 1),
    (4, 4),
    (8, 8),
    (16, 8),
    (24, 8),
    (64, 8),
    (72, 8),
    (-16, 8),
    (-8, 8),
)
NASTY = np.array(
    [0, 1, 2, 63, 64, 2**16, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -1, -(2**63)], np.int64
)


def sound_message(rng):
    """Return a message in a random format that fits a random vector."""
    length = int(rng.choice([1, 70, 1000, 70_000, 2**31 + 5, 2**62]))
    count = int(rng.integers(0, min(length, 60) + 1))
    indices = (
        np.unique(rng.integers(0, length, count))
        if rng.random() < 0.5
        else np.arange(count)
    )
    width = rng.choice([None, 0, 3])
    magnitudes = np.array(
        [1.5, rng.choice([1.5, 3.25])], rng.choice(["f2", "f4", "f8"])
    )
    values = rng.choice(
        magnitudes, indices.size if width is None else (indices.size, width)
    )
    vector = SparseVector(indices, values, length)
    own = [
        form
        for form, (dtype, stored, _) in zip(VALUE_FORMATS, STORED, strict=True)
        if dtype == vector.dtype and fits(values.ravel(), stored)
    ]
    flat = values.ravel()
    for most in 1, 2:
        table = table_of_runs(flat, most)
        if table is not None:
            own.append(runs(flat.dtype, most, table))
    if flat.size:
        own.append(offsets_of(flat))
    sizes = [form.nbytes(vector) for form in INDEX_FORMATS]
    small = [
        number for number, size in enumerate(sizes) if size is not None and size < 4096
    ]
    form = INDEX_FORMATS[rng.choice(small or [plain(vector)[0].number])]
    coding = form, own[rng.integers(len(own))]
    return encode(vector, coding=coding).copy()


def sound_few_bits(rng):
    """Return a message with a random dense vector in few bits."""
    values = rng.standard_normal(int(rng.integers(0, 200))).astype(
        rng.choice(["f4", "f8"])
    )
    bits, block = int(rng.choice(BITS)), 1 << int(rng.integers(5, 8))
    room = few_bits_message(values.size, bits, block, values)
    return encode_few_bits(
        coder(Correction([values], values.copy()), bits, block)(room)
    )


def mutate(message, rng):
    """Return a message with one to three faults."""
    for _ in range(rng.integers(1, 4)):
        kind = rng.integers(5)
        if kind == 0 and message.size:
            message[rng.integers(message.size)] ^= np.uint8(1 << rng.integers(8))
        elif kind == 1 and message.size >= HEADER_NBYTES + 16:
            at, nbytes = FIELDS[rng.integers(len(FIELDS))]
            nasty = (
                NASTY[rng.integers(NASTY.size)]
                if rng.random() < 0.5
                else rng.integers(-(2**63), 2**63 - 1)
            )
            at %= message.size  # runs, and offsets, say at the end what they are
            message[at : at + nbytes] = np.array([nasty], np.int64).view(np.uint8)[
                :nbytes
            ]
        elif kind == 2:
            message = message[: rng.integers(message.size + 1)].copy()
        elif kind == 3:
            message = np.concatenate(
                [message, rng.integers(0, 256, rng.integers(1, 40), np.uint8)]
            )
        elif message.size > HEADER_NBYTES:
            start = int(rng.integers(HEADER_NBYTES, message.size))
            message[start:] = rng.integers(0, 256, message.size - start, np.uint8)
    return message


def decodes_or_raises(message):
    """Decode a message that ends at the end of its buffer, and check what comes out; return what happened."""
    try:
        if message.size >= HEADER_NBYTES and message[KIND_AT] == FEW_BITS:
            return few_bits_decode(message)
        vector = decode(message)
    except CodecError:
        return "refused"
    assert vector.nnz <= 8 * message.size, "more entries than the message can hold"
    assert vector.values.nbytes <= 64 * message.size, (
        "more values than the message can hold"
    )
    return "decoded"


def few_bits_decode(message):
    """Decode a message with values in few bits, and all of its values."""
    coded = decode_few_bits(message)
    assert coded.size <= 8 * message.size, "more values than the message can hold"
    with np.errstate(invalid="ignore"):
        decode_values(coded, np.empty(coded.size, coded.dtype))
    return "decoded in few bits"


def run(count, seed):
    """Return how often a message was refused and decoded; faults of one sound message come in dozens."""
    rng, counts, sound = np.random.default_rng(seed), Counter(), None
    for number in range(count):
        if number % 12 == 0:
            sound = sound_message(rng) if rng.random() < 0.7 else sound_few_bits(rng)
        message = mutate(sound.copy(), rng)
        try:
            counts[decodes_or_raises(message)] += 1
        except BaseException:
            print(
                f"input {number} of seed {seed}: {message.tobytes().hex()}", flush=True
            )
            raise
    return counts


def limited(room=2**31):
    """Let no allocation take this process beyond `room` bytes more than it has: it fails, and so does the run."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room,) * 2)


def numbers(arguments):
    """Return how many inputs the command line asks for, and the seed."""
    return tuple(int(text) for text in arguments + ["1000000", "0"][len(arguments) :])


if __name__ == "__main__":
    run(100, 0)  # compile first
    limited()
    count, seed = numbers(sys.argv[1:])
    print(f"{count} messages from seed {seed}: {dict(run(count, seed))}")
