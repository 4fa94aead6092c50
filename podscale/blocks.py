"""How Shampoo cuts parameters, so that no matrix has more than `most` rows: small dimensions merged, long ones cut.

A filter is taken as (height, width, inputs, outputs) and a matrix as (inputs, outputs), as Google's MLPerf 1.0 entry
keeps them: with blocks of 128 a 3x3 convolution of 512 channels is (9, 512, 512), and 16 blocks of (9, 128, 128).
"""

from collections.abc import Sequence
from itertools import pairwise, product
from math import prod


def shampoo_dim_order(dims: int) -> tuple[int, ...]:
    """The dimensions of a parameter that begins with (outputs, inputs), in the order given above."""
    return (*range(2, dims), *reversed(range(min(2, dims))))


def merge_small_dims(shape: Sequence[int], block_size: int) -> tuple[int, ...]:
    """Neighbouring dimensions become one as long as it has at most `most` elements; those of one element vanish."""
    found: list[int] = []
    length = 1
    for size in shape:
        if length * size <= block_size:
            length *= size
        else:
            found += [length] * (length > 1)
            length = size
    return tuple(found + [length] * (length > 1)) or (prod(shape),)


def partition_blocks(shape: Sequence[int], block_size: int) -> list[tuple[tuple[int, int], ...]]:
    """The blocks of a merged parameter as [start, stop) of every dimension; the last dimension runs fastest."""
    return list(product(*(pairwise([*range(0, size, block_size), size]) for size in shape)))


def preconditioner_elements(shape: Sequence[int], block_size: int, *, vectors: bool) -> int:
    """Elements of the matrices of a parameter, one of every dimension of every block."""
    if len(shape) < 2 and not vectors:
        return 0
    blocks = partition_blocks(
        merge_small_dims([shape[dim] for dim in shampoo_dim_order(len(shape))], block_size), block_size
    )
    return sum((stop - start) ** 2 for block in blocks for start, stop in block)
