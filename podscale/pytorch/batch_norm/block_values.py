"""Images between the layers of a ResNet's blocks, with what a kernel has computed of them or left to compute."""

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from podscale.pytorch.batch_norm.fused import ChunkMoments, NormLayer  # needs Triton


class Fork(NamedTuple):
    """The same values for a block's first convolution and for its shortcut, with separate gradients."""

    branch: Tensor
    shortcut: Tensor


class Convolved(NamedTuple):
    """Images that a convolution wrote, [n, channels, height, width], with their moments if it computed them."""

    images: Tensor
    moments: "ChunkMoments | None" = None


class PendingSum(NamedTuple):
    """Output of a block before the sum: what its last batch norm normalises, and its shortcut."""

    norm: "NormLayer"
    x: Convolved
    shortcut: Tensor
