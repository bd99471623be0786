"""Means of the vectors of P ranks, as the exchanges of the library compute them, in one process.

A mean has `start(shapes, ranks)`, for vectors that are tensors of these shapes one
after the other, and `mean(vectors)`, which returns the mean (float32, flat) and the
bits of a value that a rank sends. `pooled`: it depends on the mean of the vectors
alone, so that one vector will do.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import Compressor, ErrorFeedback, SparseVector
from mpicomp.codec import encoded_nbytes, few_bits_message, smallest
from mpicomp.correction import Correction
from mpicomp.few_bits import coder, first_blocks, position, shares
from mpicomp.means import CodedMean

Floats = NDArray[np.float32]
Shapes = Sequence[tuple[int, ...]]

BLOCK = 256  # of few bits


class Dense:
    """The exact mean."""

    pooled = True

    def start(self, shapes: Shapes, ranks: int) -> None:
        """Make no state."""

    def mean(self, vectors: Sequence[Floats]) -> tuple[Floats, float]:
        """Return the mean, and the bits of a value that a rank sends."""
        return vectors[0] if len(vectors) == 1 else np.mean(vectors, axis=0), 32.0


class FewBits:
    """`quantised_allreduce` by its direct algorithm, with error feedback, in a basis if one is given."""

    pooled = False

    def __init__(self, bits: int, basis: Any = None) -> None:
        self.bits, self.basis = bits, basis

    def start(self, shapes: Shapes, ranks: int) -> None:
        """Make the residuals."""
        self.residuals = np.zeros((ranks, size_of(shapes)), np.float32)

    def mean(self, vectors: Sequence[Floats]) -> tuple[Floats, float]:
        """Return the mean, and the bits of a value that a rank sends, one way."""
        ranks, total, sent = len(vectors), np.empty_like(vectors[0]), 0
        corrected = [
            in_basis(self.basis, vector) + residual
            for vector, residual in zip(vectors, self.residuals, strict=True)
        ]
        sizes = (total.size,)
        ranges = shares(0, first_blocks(sizes, BLOCK)[-1], ranks)
        for owner, blocks in enumerate(ranges):
            start, end = (position(number, sizes, BLOCK) for number in blocks)
            parts = [values[start:end] for values in corrected]
            errors = [residual[start:end] for residual in self.residuals]
            pairs = [
                pair
                for rank, pair in enumerate(zip(parts, errors, strict=True))
                if rank != owner
            ]
            form = self.bits, BLOCK
            size = end - start, *form, total
            others = [
                coder(Correction([part], error), *form)(few_bits_message(*size))
                for part, error in pairs
            ]
            own = Correction([parts[owner]], errors[owner])
            share = coder(own, *form)(few_bits_message(*size), others)
            CodedMean([share], [end - start]).write(total[start:end])
            sent += share.codes.nbytes + share.scales.nbytes
        if self.basis:
            self.basis.inverse(total, total)
        return total / np.float32(ranks), 8 * sent / total.size


class Sparse:
    """The sum of compressed vectors, with error feedback, in a basis if one is given.

    over: divide by all "ranks", or each entry by its "contributors".
    """

    pooled = False

    def __init__(
        self,
        compressor: Compressor,
        decay: float = 1.0,
        basis: Any = None,
        over: str = "ranks",
    ) -> None:
        self.compressor, self.decay, self.basis, self.over = (
            compressor,
            decay,
            basis,
            over,
        )

    def start(self, shapes: Shapes, ranks: int) -> None:
        """Make the residuals."""
        self.feedbacks = [ErrorFeedback(decay=self.decay) for _ in range(ranks)]

    def mean(self, vectors: Sequence[Floats]) -> tuple[Floats, float]:
        """Return the mean, and the bits of a value that rank 0 sends."""
        sent = [
            self.selected(*each) for each in zip(self.feedbacks, vectors, strict=True)
        ]
        total = np.zeros_like(vectors[0])
        for vector in sent:
            vector.add_to(total)
        if self.over == "contributors":
            counts = np.zeros_like(total)
            for vector in sent:
                counts[vector.indices] += 1
            total /= np.maximum(counts, 1)
        else:
            total /= len(sent)
        if self.basis:
            self.basis.inverse(total, total)
        return total, 8 * encoded_nbytes(sent[0], smallest(sent[0])) / total.size

    def selected(self, feedback: ErrorFeedback, vector: Floats) -> SparseVector:
        """Return the entries that a rank sends; its feedback keeps the others."""
        vector = in_basis(self.basis, vector)
        correction = feedback.correct(vector)
        sent = self.compressor.compress(correction.add(), gradient=vector)
        feedback.prepare_residual(correction, sent)()
        return sent

    def rescale(self, factor: float) -> None:
        """Multiply what is kept."""
        for feedback in self.feedbacks:
            feedback.rescale(factor)


class PowerSgd:
    """PowerSGD (arXiv 1905.13727) as PyTorch's hook has it: error feedback, warm start, the first steps dense.

    Both factors are linear in the ranks' matrices, so the mean of the matrices has the
    same result, and its error is the mean of their errors. A matrix of which the
    factors are not less than half is sent as it is.
    """

    pooled = True

    def __init__(self, rank: int, dense_steps: int = 2) -> None:
        self.rank, self.dense = rank, dense_steps

    def start(self, shapes: Shapes, ranks: int) -> None:
        """Make the residual, and for each matrix that is compressed its bounds, its shape and its second factor."""
        draw, size = np.random.default_rng(0), size_of(shapes)
        self.residual, self.factors, first, self.sent = (
            np.zeros(size, np.float32),
            [],
            0,
            size,
        )
        for shape in shapes:
            last = first + int(np.prod(shape))
            factors = self.rank * sum(shape)
            if len(shape) == 2 and 2 * factors < last - first:
                self.factors.append(
                    [
                        slice(first, last),
                        shape,
                        draw.standard_normal((shape[1], self.rank)),
                    ]
                )
                self.sent -= last - first - factors
            first = last

    def mean(self, vectors: Sequence[Floats]) -> tuple[Floats, float]:
        """Return the mean, and the bits of a value that a rank sends, one way."""
        (vector,) = vectors
        if self.dense:
            self.dense -= 1
            return vector, 32.0
        vector = vector + self.residual
        mean = vector.copy()
        for place, shape, right in self.factors:
            matrix = vector[place].reshape(shape)
            left = np.linalg.qr(matrix @ np.linalg.qr(right.astype(np.float32))[0])[0]
            right[...] = matrix.T @ left
            mean[place] = (left @ right.T.astype(np.float32)).ravel()
        self.residual = vector - mean
        return mean, 32 * self.sent / vector.size


def in_basis(basis: Any, vector: Floats) -> Floats:
    """Return a copy of a vector, in a basis if one is given."""
    vector = vector.copy()
    if basis:
        basis.forward(vector, vector)
    return vector


def size_of(shapes: Shapes) -> int:
    """Return the number of values of all tensors."""
    return sum(map(int, map(np.prod, shapes)))
