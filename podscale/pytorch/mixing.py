"""Mixup (Zhang 2017) and cutmix (Yun 2019) on the device: each image of a pass with its counterpart from the end.

Both are one formula: images = W x own + (1 - W) x other, where W is the same everywhere for mixup, and 0 inside a
rectangle and 1 outside for cutmix. The targets are mixed by the mean of W. The host draws before an update; what it
drew lies in a tensor on the device, so a replayed CUDA graph mixes anew in every update.
"""

import numpy as np
import torch
from torch import Tensor

from podscale.config.train import MixSection
from podscale.data.rng import UInt64Array, derive_key, uniform
from podscale.pytorch.world import World

_KEY_DOMAIN = 0x6D6978  # "mix"
_MAX_TRIES = 32  # pairs of draws for one of Beta; each is good with a chance of a half or more


class BatchMixer:
    """Draws how the images of an update are mixed, and mixes them."""

    def __init__(self, section: MixSection, seed: int, world: World) -> None:
        self._section, self._seed, self._rank = section, seed, world.rank
        self._drawn = torch.tensor([0.0, 1.0, 0.0, 0.0], device=world.device)  # cuts?, share, row and column of centre

    def start_step(self, step: int) -> None:
        """To be called before update `step` (from 0), never while a CUDA graph is being recorded."""
        section, key = self._section, derive_key(self._seed, _KEY_DOMAIN, step, self._rank)
        which, row, column = uniform(derive_key(key, np.arange(3)))
        cuts = section.cutmix > 0 and (section.mixup == 0 or which < 0.5)
        share = sample_beta(section.cutmix if cuts else section.mixup, derive_key(key, 3))
        self._drawn.copy_(torch.tensor([float(cuts), share, row, column]))

    def mix_images(self, images: Tensor) -> Tensor:
        """Float [n, channels, height, width] -> the same, mixed."""
        own = self._mix_mask(*images.shape[-2:]).to(images.dtype)
        return images * own + images.flip(0) * (1 - own)

    def mix_weight(self, height: int, width: int) -> Tensor:
        """What an image of these sides keeps of itself, and its target with it: a scalar on the device."""
        return self._mix_mask(height, width).mean()

    def _mix_mask(self, height: int, width: int) -> Tensor:
        """W [height, width]. The rectangle has the image's shape; what lies outside the image is cut off."""
        cuts, share, *centre = self._drawn.unbind()
        half = (1 - share).sqrt() / 2
        inside = []
        for at, side in zip(centre, (height, width), strict=True):
            pixels = torch.arange(side, device=share.device)
            inside.append((pixels >= ((at - half) * side).floor()) & (pixels < ((at + half) * side).floor()))
        box = inside[0][:, None] & inside[1][None, :]
        return torch.where(cuts > 0, (~box).float(), share)


def sample_beta(alpha: float, key: UInt64Array) -> float:
    """A number from Beta(alpha, alpha), 0 < alpha <= 1, by Joehnk's method (1964), from the numbers of one key."""
    draws = uniform(derive_key(key, np.arange(2 * _MAX_TRIES))).reshape(_MAX_TRIES, 2) ** (1.0 / alpha)
    total = draws.sum(axis=1)
    good = np.flatnonzero((total > 0) & (total <= 1))
    return float(draws[good[0], 0] / total[good[0]]) if len(good) else 0.5
