"""Quantisation to few bits in dense NumPy and float64, written without regard to the kernels."""

from itertools import pairwise

import numpy as np

from mpicomp.arrays.device import kernels_for
from mpicomp.few_bits import BITS

DIGITS = {np.float16: 8, np.float32: 8, np.float64: 21}  # significant bits of a scale


def digits_of(dtype, bits):
    return 4 if dtype == np.float16 and bits == 8 else DIGITS[dtype]


def to_digits(number, digits, dtype, rounded):
    """Return a number rounded to significant bits, and for float16 to multiples of its smallest number."""
    fraction, exponent = np.frexp(number)
    exponent = int(exponent) - digits
    if dtype == np.float16:
        exponent = max(exponent, -24)
    return np.ldexp(rounded(np.ldexp(number, -exponent)), exponent) if fraction else 0.0


def quantised(values, bits, block, dtype):
    """Return the values in few bits, as float64."""
    result = np.zeros(values.size)
    for start in range(0, values.size, block):
        part = values[start : start + block].astype(np.float64)
        if not part.any():
            continue
        if bits > 2:
            top = 2 ** (bits - 1) - 1
            scale = to_digits(
                np.abs(part).max() / top, digits_of(dtype, bits), dtype, np.ceil
            )
            result[start : start + block] = np.rint(part / scale) * scale
        else:
            low, high = (
                two_magnitudes(np.abs(part)) if bits == 2 else [np.abs(part).mean()] * 2
            )
            low, high = (
                to_digits(each, digits_of(dtype, bits), dtype, np.rint)
                for each in (low, high)
            )
            magnitudes = np.where(np.abs(part) > (low + high) / 2, high, low)
            result[start : start + block] = np.where(part < 0, -magnitudes, magnitudes)
    return result


def two_magnitudes(magnitudes):
    """Return the two magnitudes after two rounds of Lloyd's algorithm, from the mean."""
    low = high = magnitudes.mean()
    for _ in range(2):
        above = magnitudes > (low + high) / 2
        if above.all() or not above.any():
            break
        low, high = magnitudes[~above].mean(), magnitudes[above].mean()
    return low, high


def bounds_of(length, block, shares):
    blocks = -(-length // block)
    return [
        min(length, blocks * share // shares * block) for share in range(shares + 1)
    ]


def by_owners(arrays, code, block):
    """Return total and every rank's rejected values: owners of shares add their own values as they are."""
    size, length = len(arrays), arrays[0].size
    total, rejected, bounds = (
        np.zeros(length),
        [np.zeros(length) for _ in arrays],
        bounds_of(length, block, size),
    )
    for owner in range(size):
        share = slice(bounds[owner], bounds[owner + 1])
        summed = arrays[owner][share].copy()
        for rank in set(range(size)) - {owner}:
            sent = code(arrays[rank][share])
            summed += sent
            rejected[rank][share] = arrays[rank][share] - sent
        total[share] = code(summed)
        rejected[owner][share] = summed - total[share]
    return total, rejected


def by_lanes(arrays, code, block):
    """Return total and every rank's rejected values on one node: the lanes round the sum of all."""
    bounds, summed = bounds_of(arrays[0].size, block, len(arrays)), sum(arrays)
    total, rejected = code(summed), [np.zeros(summed.size) for _ in arrays]
    for rank, (start, end) in enumerate(pairwise(bounds)):
        rejected[rank][start:end] = (summed - total)[start:end]
    return total, rejected


ORACLES = {"direct": by_owners, "node_lanes": by_lanes}


def decode(coded, out):
    """Write the values of `FewBits` to `out`, of their dtype."""
    if coded.bits in BITS:
        share = coded.codes, coded.scales
        kernels_for(out).decoder([share], coded.bits, coded.block, [out])()
    else:
        out[...] = coded.codes.view(coded.dtype)
