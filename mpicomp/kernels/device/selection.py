"""The largest magnitudes of a vector, and those above a threshold: exact, in about one read of the data.

Source of the compaction in one pass: D. Merrill and M. Garland, "Single-pass parallel
prefix scan with decoupled look-back", NVIDIA NVR-2016-002. All kernels of a selection
are launched before the host waits for one.
"""

import math
from typing import NamedTuple

import cupy
import numpy as np

from mpicomp.kernels.device.compiling import MOST_BLOCKS, Array, in_tiles, launch, zeros
from mpicomp.kernels.device.merging import add, add_parts, divide
from mpicomp.kernels.host.bits import FORMATS, Format
from mpicomp.kernels.host.selection import not_finite_error

Found = tuple[Array, Array]
Summands = tuple[Array, Array] | tuple[()]

_DIGIT = 11
_BINS = 1 << _DIGIT
# values of the sample for the lower threshold, and the threads that read them
_SAMPLE, _SAMPLERS = 1 << 14, 1024
_SIGMAS = 4
# candidates: up to here one block selects from them, in one launch; in more, they are
# shared by a grid
_FEW = 1 << 17
# sizes of the counts, and of the counter of finished blocks: zero before a search
# begins
_SEARCHING = _BINS, 1
_REPORT = 6  # integers: the fields of `_Reported`
# values that a block reads at a time, by their bytes
_TILES = {2: 4096, 4: 4096, 8: 2048}


class _Candidates(NamedTuple):
    """Values to select from, as bits; on the device how many there are, None for all; and positions, None for 0, ..."""

    bits: Array
    counted: Array | None
    positions: Array | None


class _Reported(NamedTuple):
    """What a selection writes on the device: among the largest, entries above their least magnitude and equal to it."""

    above: int
    equal: int
    threshold: int  # the k-th largest magnitude
    ties: int  # of it, to be selected
    reached: int  # candidates at or above the floor
    floor: int  # from a sample


def largest(values: Array, k: int, *, threads: int | None = None) -> Found:
    """Return the positions of the `k` largest magnitudes of `values`, in increasing order, and the values there.

    The same as `mpicomp.kernels.host.largest`. threads: ignored.

    A sample gives a threshold that slightly more than `k` magnitudes are expected to
    reach; one read of the data compacts those, and a radix selection among them is
    exact: by one block of threads in one launch, or for many by a launch for each 11
    bits, and one more. If the sample misleads, and on short vectors, the radix
    selection is among all values.
    """
    form = FORMATS[values.dtype]
    bits, k = values.view(form.keys), min(k, values.size)
    if not k:
        return cupy.empty(0, np.intp), values[:0].copy()
    found = _by_sample(bits, form, k) if bits.size >= 4 * _SAMPLE else None
    positions, kept = found or _by_digits(bits, form, k)
    return positions, kept.view(values.dtype)


def add_largest(
    a: Array,
    b: Array,
    out: Array,
    k: int,
    *,
    scale: float = 1.0,
    threads: int | None = None,
) -> Found:
    """Write ``scale * a + b`` to `out`, and return ``largest(out, k)``; for a scale of 1 in one pass over `a` and `b`.

    The same as `mpicomp.kernels.host.add_largest`. threads: ignored. The compaction
    computes and writes the sum, so that the sum is not read again. If the sample
    misleads, and on short vectors, the sum is computed first.
    """
    if scale != 1:
        add_parts(a, scale, [b], out)
        return largest(out, k)
    form = FORMATS[out.dtype]
    bits, k = out.view(form.keys), min(k, out.size)
    summands = a.view(form.keys), b.view(form.keys)
    found = _by_sample(bits, form, k, summands) if bits.size >= 4 * _SAMPLE else None
    if found is None:
        add(a, b, out)
        return largest(out, k)
    return found[0], found[1].view(out.dtype)


def divide_largest(
    indices: Array, values: Array, k: int
) -> tuple[Array, Array, Array, Array]:
    """Return the entries with the `k` largest magnitudes, and the others, as `mpicomp.kernels.host` does."""
    return divide(indices, values, largest(values, k)[0])


def raise_not_finite(values: Array) -> None:
    """Raise ValueError naming the first value of `values`, of any shape, that is NaN or infinite."""
    flat = values.reshape(-1)
    position = first_not_finite(flat)
    if position >= 0:
        raise not_finite_error(
            position, values.shape, flat[position : position + 1].get()[0]
        )


def first_not_finite(values: Array) -> int:
    """Return the first position of `values` that holds NaN or an infinity; -1 if there is none."""
    form = FORMATS[values.dtype]
    bits, position = values.view(form.keys), cupy.full(1, -1, np.int64)
    if bits.size:
        launch(
            "first_reaching",
            [bits.dtype],
            _blocks(bits),
            bits,
            bits.size,
            form.mask,
            form.infinity,
            position,
        )
    return int(position.get()[0])


def _blocks(bits: Array) -> int:
    return min(MOST_BLOCKS, in_tiles(bits.size, _TILES[bits.itemsize]))


def _by_sample(
    bits: Array, form: Format, k: int, summands: Summands = ()
) -> Found | None:
    """Return the `k` largest by a threshold from a sample; None if the sample misled. summands: as for `compact`."""
    share = _SAMPLE * k / bits.size
    rank = math.ceil(share + _SIGMAS * (1 + math.sqrt(share)))
    if rank >= _SAMPLE:
        return None
    room = min(
        bits.size, math.ceil((rank + _SIGMAS * math.sqrt(rank)) * bits.size / _SAMPLE)
    )
    report, *work = zeros(_REPORT, *compacting(bits.size, bits), *_choosing(room, bits))
    count, floor = report[4:5], report[5:]
    first, second = summands or (bits, None)
    sampling = (
        first,
        second,
        bits.size,
        form.mask,
        form.width,
        rank,
        k,
        floor,
        report[2:4],
    )
    launch("sample_floor", [bits.dtype], 1, *sampling, threads=_SAMPLERS)
    candidates = _Candidates(
        cupy.empty(room, bits.dtype), count, cupy.empty(room, np.intp)
    )
    compact(
        bits,
        form,
        0,
        floor,
        candidates.positions,
        candidates.bits,
        count,
        work[:2],
        summands,
    )
    found, reported = _choose(candidates, form, k, report, work[2:])
    return (
        None
        if reported.reached > room or (reported.reached < k and reported.floor > 1)
        else found
    )


def _by_digits(bits: Array, form: Format, k: int) -> Found:
    """Return the `k` largest by a radix selection among all."""
    report, *work = zeros(_REPORT, *_choosing(bits.size, bits))
    if work:
        report[3:4].fill(k)
    return _choose(_Candidates(bits, None, None), form, k, report, work)[0]


def _choosing(size: int, bits: Array) -> tuple[int, ...]:
    """Return the sizes of the work arrays of `_choose`: none for few values."""
    return () if size <= _FEW else (*_SEARCHING, *selecting(size, bits))


def _choose(
    candidates: _Candidates, form: Format, k: int, report: Array, work: list[Array]
) -> tuple[Found, _Reported]:
    """Return positions and bits of the `k` largest, and the report, once it is copied to the host.

    report: an integer for each field of `_Reported`; with work arrays the threshold
    begins as 0 and the ties as k.
    """
    positions, kept = cupy.empty(k, np.intp), cupy.empty(k, candidates.bits.dtype)
    bits, count, sources = candidates
    totals, search = report[:2], report[2:4]
    if work:
        _find_kth(bits, count, form, search, work[:2])
        select(
            bits, count, form.mask, search, sources, positions, kept, totals, work[2:]
        )
    else:
        args = (
            bits,
            bits.size,
            count,
            form.mask,
            form.width,
            k,
            sources,
            positions,
            kept,
            totals,
        )
        launch("largest_of_few", [bits.dtype], 1, *args, threads=_SAMPLERS)
    reported = _Reported._make(report.get().tolist())
    chosen = reported.above + min(reported.equal, reported.ties)
    return (positions[:chosen], kept[:chosen]), reported


def compacting(size: int, bits: Array) -> tuple[int, int]:
    """Return the sizes of the ticket and the states of `compact`, which have to be zero before it begins."""
    return 1, in_tiles(size, _TILES[bits.itemsize])


def selecting(size: int, bits: Array) -> tuple[int, int]:
    """Return the sizes of the ticket and the states of `select`."""
    return 1, 2 * in_tiles(size, _TILES[bits.itemsize])


def _find_kth(
    bits: Array, counted: Array | None, form: Format, search: Array, work: list[Array]
) -> None:
    """Turn `search`, which holds no digits and k, into the k-th largest magnitude and its ties, on the device."""
    counts, done = work
    shift = form.width
    while shift:
        digit = min(_DIGIT, shift)
        shift -= digit
        _count_digits(bits, counted, form.mask, search, shift, digit, counts, done)


def _count_digits(
    bits: Array,
    counted: Array | None,
    mask: int,
    search: Array,
    shift: int,
    digit: int,
    counts: Array,
    done: Array | None,
) -> None:
    if bits.size:
        args = bits, bits.size, counted, mask, search, shift, digit, counts, done
        launch("digit_counts", [bits.dtype], _blocks(bits), *args)


def compact(
    bits: Array,
    form: Format,
    floor: int,
    floors: Array | None,
    positions: Array,
    kept: Array,
    found: Array,
    work: list[Array],
    summands: Summands = (),
) -> None:
    """Write positions and bits of magnitudes at or above `floor`, or `floors[0]`, while there is room; count all.

    summands: two vectors whose sum is written to `bits` first; empty if `bits` is
    given.
    """
    ticket, states = work
    args = (
        *summands,
        bits,
        bits.size,
        form.mask,
        floor,
        floors,
        positions,
        kept,
        kept.size,
        found,
        ticket,
        states,
        states.size,
    )
    launch("add_compact" if summands else "compact", [bits.dtype], states.size, *args)


def select(
    bits: Array,
    counted: Array | None,
    mask: int,
    search: Array,
    sources: Array | None,
    positions: Array,
    kept: Array,
    totals: Array,
    work: list[Array],
) -> None:
    """Write positions and bits of magnitudes above ``search[0]``, and of the first ``search[1]`` equal to it."""
    ticket, states = work
    args = (
        bits,
        bits.size,
        counted,
        mask,
        search,
        sources,
        positions,
        kept,
        positions.size,
        totals,
        ticket,
        states,
    )
    launch("select", [bits.dtype], states.size // 2, *args)
