"""How Shampoo sees a parameter: small dimensions merged, long ones cut, so that no matrix has more than `block` rows.

A filter is taken as (height, width, inputs, outputs) and a matrix as (inputs, outputs), as Google's MLPerf 1.0 entry
keeps them: with blocks of 128 a 3x3 convolution of 512 channels is (9, 512, 512), and 16 blocks of (9, 128, 128).
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from podscale.pytorch.optim.share import Segment


class Place(NamedTuple):
    """One block: `number` counts those of its segment, `row` those of its stack."""

    segment: int
    number: int
    row: int


class Stack(NamedTuple):
    """All blocks of one shape.

    positions: where their elements are in the flat layout, int64 [blocks, *shape].
    """

    shape: tuple[int, ...]
    places: list[Place]
    positions: Tensor

    def take(self, flat: Tensor) -> Tensor:
        """A copy of the blocks, fp32 [blocks, *shape]."""
        return flat.index_select(0, self.positions.view(-1)).view(self.positions.shape)

    def put(self, flat: Tensor, blocks: Tensor) -> None:
        """Writes the blocks to where they were taken from."""
        flat.index_copy_(0, self.positions.view(-1), blocks.reshape(-1))


def stack_blocks(segments: Sequence[Segment], block: int, device: torch.device, *, vectors: bool) -> tuple[Stack, ...]:
    """The blocks of these segments by shape; `vectors`: those of segments with a single dimension too."""
    flat = torch.arange(max((s.start + s.size for s in segments), default=0))
    found: dict[tuple[int, ...], list[tuple[Place, Tensor]]] = {}
    for segment, parameter in enumerate(segments):
        view = parameter.view(flat)
        if view.dim() > 1 or vectors:
            for number, part in enumerate(cut(in_order(view), block)):
                same = found.setdefault(tuple(part.shape), [])
                same.append((Place(segment, number, len(same)), part))
    return tuple(
        Stack(shape, [place for place, _ in same], torch.stack([part for _, part in same]).to(device))
        for shape, same in found.items()
    )


def in_order(parameter: Tensor) -> Tensor:
    """From (outputs, inputs, height, width) to (height, width, inputs, outputs), and so with fewer dimensions."""
    return parameter.permute(*range(2, parameter.dim()), *reversed(range(min(2, parameter.dim()))))


def merged(shape: Sequence[int], most: int) -> tuple[int, ...]:
    """Neighbouring dimensions become one as long as it has at most `most` elements; those of one element vanish."""
    found: list[int] = []
    length = 1
    for size in shape:
        if length * size <= most:
            length *= size
        else:
            found += [length] * (length > 1)
            length = size
    return tuple(found + [length] * (length > 1)) or (prod(shape),)


def cut(parameter: Tensor, block: int) -> Iterator[Tensor]:
    """The blocks of a parameter, merged; the last dimension runs fastest, and the last block of each may be shorter."""
    tensor = parameter.reshape(merged(parameter.shape, block))
    spans = [list(pairwise([*range(0, size, block), size])) for size in tensor.shape]
    for place in product(*spans):
        yield tensor[tuple(slice(*span) for span in place)]
