"""Sets of indices as bitmaps, indices and values in few bits: the same words as on the host."""

from collections.abc import Sequence

from mpicomp.kernels.device.compiling import THREADS, Array, in_tiles, launch, zeros
from mpicomp.kernels.host.bits import FORMATS

_WORDS = 4 * THREADS  # that a block reads


def to_bitmap(indices: Array, first: int, words: Array) -> None:
    """Set the bits of increasing `indices`, counted from `first`, in `words` (uint64, zeros; low bits first)."""
    if indices.size:
        launch(
            "to_bitmap",
            [indices.dtype],
            in_tiles(indices.size, THREADS),
            indices,
            indices.size,
            first,
            words,
        )


def from_bitmap(words: Array, first: int, indices: Array) -> int:
    """Write the numbers of the bits that are set in `words`, as `mpicomp.kernels.host.from_bitmap` does."""
    return _walk("from_bitmap", words, (words, words.size, first), indices)


def to_elias_fano(
    indices: Array, first: int, low_bits: int, lows: Array, highs: Array
) -> None:
    """Write increasing `indices` into `lows` and `highs`, as `mpicomp.kernels.host.to_elias_fano` does."""
    if indices.size:
        args = indices, indices.size, first, low_bits, lows, highs
        launch("to_elias_fano", [indices.dtype], in_tiles(indices.size, THREADS), *args)


def from_elias_fano(
    lows: Array, highs: Array, first: int, low_bits: int, indices: Array
) -> int:
    """Decode the output of `to_elias_fano` into `indices`, as `mpicomp.kernels.host.from_elias_fano` does."""
    found = _walk(
        "from_elias_fano", highs, (lows, highs, highs.size, first, low_bits), indices
    )
    return min(found, int(indices.size) + 1)


def magnitude_range(values: Array) -> tuple[int, int]:
    """Return the bits of the least and of the largest magnitude of `values`, which are not empty."""
    form = FORMATS[values.dtype]
    keys = values.view(form.keys) & form.keys.type(form.mask)
    return int(keys.min()), int(keys.max())


def to_offsets(values: Array, least: int, width: int, planes: Array) -> None:
    """Write `values` into `planes`, zeros, as `mpicomp.kernels.host.to_offsets` does."""
    if values.size:
        form = FORMATS[values.dtype]
        args = (
            values.view(form.keys),
            values.size,
            form.mask,
            form.width,
            least,
            width,
            planes,
        )
        launch("to_offsets", [form.keys], in_tiles(values.size, THREADS), *args)


def from_offsets(planes: Array, least: int, width: int, values: Array) -> None:
    """Decode the output of `to_offsets` into `values`, as `mpicomp.kernels.host.from_offsets` does."""
    if values.size:
        form = FORMATS[values.dtype]
        args = (
            planes,
            form.mask,
            form.width,
            least,
            width,
            values.view(form.keys),
            values.size,
        )
        launch("from_offsets", [form.keys], in_tiles(values.size, THREADS), *args)


def _walk(name: str, words: Array, args: Sequence[Array | int], indices: Array) -> int:
    """Run a kernel over the bits of `words`; return how many are set."""
    if not words.size:
        return 0
    tiles = in_tiles(words.size, _WORDS)
    total, work = zeros(1, 1, tiles)
    launch(
        name,
        [indices.dtype],
        tiles,
        *args,
        indices,
        indices.size,
        *work,
        tiles,
    )
    return int(total[:1].get()[0])
