"""The blocks of all parameters, those of one shape together (see `podscale.training.param_layout`)."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from podscale.pytorch.optim.share import ParamSlice
from podscale.training.param_layout import merge_small_dims, partition_blocks, shampoo_dim_order


class BlockIndex(NamedTuple):
    """One block: `number` counts those of its segment, `row` those of its stack."""

    slice_index: int
    number: int
    row: int


class BlockStack(NamedTuple):
    """All blocks of one shape.

    positions: where their elements are in the flat layout, int64 [blocks, *shape].
    """

    shape: tuple[int, ...]
    block_indices: list[BlockIndex]
    positions: Tensor

    def gather_blocks(self, flat: Tensor) -> Tensor:
        """A copy of the blocks, fp32 [blocks, *shape]."""
        return flat.index_select(0, self.positions.view(-1)).view(self.positions.shape)

    def scatter_blocks(self, flat: Tensor, blocks: Tensor) -> None:
        """Writes the blocks to where they were taken from."""
        flat.index_copy_(0, self.positions.view(-1), blocks.reshape(-1))


def stack_blocks(
    param_slices: Sequence[ParamSlice], block: int, device: torch.device, *, vectors: bool
) -> tuple[BlockStack, ...]:
    """The blocks of these segments by shape; `vectors`: those of segments with a single dimension too."""
    flat = torch.arange(max((s.start + s.size for s in param_slices), default=0))
    found: dict[tuple[int, ...], list[tuple[BlockIndex, Tensor]]] = {}
    for segment, parameter in enumerate(param_slices):
        view = parameter.view(flat)
        if view.dim() > 1 or vectors:
            for number, part in enumerate(cut_blocks(view, block)):
                same = found.setdefault(tuple(part.shape), [])
                same.append((BlockIndex(segment, number, len(same)), part))
    return tuple(
        BlockStack(shape, [place for place, _ in same], torch.stack([part for _, part in same]).to(device))
        for shape, same in found.items()
    )


def cut_blocks(parameter: Tensor, block: int) -> Iterator[Tensor]:
    """The blocks of a parameter, merged, in their order."""
    turned = parameter.permute(shampoo_dim_order(parameter.dim()))
    tensor = turned.reshape(merge_small_dims(turned.shape, block))
    for place in partition_blocks(tensor.shape, block):
        yield tensor[tuple(slice(*span) for span in place)]
