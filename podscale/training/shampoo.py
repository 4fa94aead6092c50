"""Shampoo in both engines, without a framework: blocks of a parameter, and constants of the Newton iteration.

Small dimensions are merged and long ones cut, so that no matrix has more than `block_size` rows. A filter is taken as
(height, width, inputs, outputs) and a matrix as (inputs, outputs), as in Google's MLPerf 1.0 entry: with blocks of 128
a 3x3 convolution of 512 channels is (9, 512, 512), and 16 blocks of (9, 128, 128).
"""

from collections.abc import Sequence
from itertools import pairwise, product
from math import prod

NEWTON_ITERATIONS = 60
"""Most iterations for an inverse root: each multiplies a small eigenvalue by (1 + 1/p) ^ p, at least 2; the last few
converge quadratically."""
NEWTON_TOLERANCE = {4: 1e-6, 8: 1e-12}
"""Largest difference from the identity at which a matrix has converged, by the bytes of its numbers."""
MAX_NEWTON_ERROR = 0.1
"""Largest difference from the identity after all iterations at which the root is used."""


def shampoo_dim_order(dims: int) -> tuple[int, ...]:
    """Return the permutation from (outputs, inputs, height, width) to (height, width, inputs, outputs)."""
    return (*range(2, dims), *reversed(range(min(2, dims))))


def merge_small_dims(shape: Sequence[int], block_size: int) -> tuple[int, ...]:
    """Merge neighbouring dimensions up to `block_size` elements. Dimensions of one element are dropped."""
    merged: list[int] = []
    length = 1
    for size in shape:
        if length * size <= block_size:
            length *= size
        else:
            merged += [length] * (length > 1)
            length = size
    return tuple(merged + [length] * (length > 1)) or (prod(shape),)


def partition_blocks(shape: Sequence[int], block_size: int) -> list[tuple[tuple[int, int], ...]]:
    """Return the blocks of a merged parameter as [start, stop) of every dimension; the last one varies fastest."""
    return list(product(*(pairwise([*range(0, size, block_size), size]) for size in shape)))


def preconditioner_elements(shape: Sequence[int], block_size: int, *, vectors: bool) -> int:
    """Count the elements of all blocks' matrices, one per dimension; parameters of one dimension only if `vectors`."""
    if len(shape) < 2 and not vectors:
        return 0
    blocks = partition_blocks(
        merge_small_dims([shape[dim] for dim in shampoo_dim_order(len(shape))], block_size), block_size
    )
    return sum((stop - start) ** 2 for block in blocks for start, stop in block)
