"""Pixels to what a network expects, on the device, inside the update (so that a compiler can fuse it)."""

import torch
from torch import Tensor

from podscale.config import InputSection
from podscale.pytorch.world import World


class Normalise:
    """uint8 [n, height, width, 3] -> float32 [n, 3, height, width] in the model's memory order, (x / 255 - mean) / std.

    The document's mean and standard deviation are of pixels scaled to [0, 1].
    """

    def __init__(self, section: InputSection, world: World, *, channels_last: bool) -> None:
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        scale = 255.0 * torch.tensor(section.std)
        self._factor = (1.0 / scale).view(1, 3, 1, 1).to(world.device)
        self._shift = (-255.0 * torch.tensor(section.mean) / scale).view(1, 3, 1, 1).to(world.device)

    def __call__(self, images: Tensor) -> Tensor:
        assert images.dtype == torch.uint8, images.dtype
        floats = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=self._layout)
        return floats.mul_(self._factor).add_(self._shift)
