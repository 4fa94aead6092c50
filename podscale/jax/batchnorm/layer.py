"""Batch norm as networks use it, and how it learns whom it shares statistics with."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
from jax import Array, lax

from podscale.config.batch_norm_groups import BatchNormGroup
from podscale.jax.batchnorm.function import NormOutput, sync_batch_norm
from podscale.jax.mesh import GROUP, SPATIAL, AxisNames
from podscale.jax.spatial.tiles import Tiles


class ChannelStatistics(NamedTuple):
    """Running mean and unbiased variance of each channel, fp32."""

    mean: Array
    var: Array


@dataclass(frozen=True)
class BatchNorm:
    """Normalises images [n, height, width, channels] per channel, over the batch, a group of devices, or parts.

    `axes`: the mesh axes of a group. `part` cuts a device's batch into parts of so many images, each normalised by
    itself: what as many small cores would do; their running statistics are means over the parts. Statistics are fp32,
    whatever the images are. Running statistics follow with weight `momentum`.
    """

    eps: float = 1e-5
    momentum: float = 0.1
    axes: AxisNames = ()
    part_size: int | None = None

    def train(
        self, x: Array, weight: Array, bias: Array, running: ChannelStatistics, tiles: Tiles | None = None
    ) -> tuple[Array, ChannelStatistics]:
        """By the batch's own statistics; and the running ones, moved. tiles: of images that devices share."""
        normalise = partial(sync_batch_norm, self.eps, self.axes if tiles is None else self.axes + SPATIAL, tiles)
        if self.part_size is None or len(x) <= self.part_size:
            y, mean, var = normalise(x, weight, bias, running.mean)
        else:
            y, mean, var = self._ghost_batch_norm(normalise, x, weight, bias, running.mean)
        mean, var = lax.stop_gradient((mean, var))
        moved = (old + self.momentum * (new - old) for old, new in zip(running, (mean, var), strict=True))
        return y, ChannelStatistics(*moved)

    def evaluate(self, x: Array, weight: Array, bias: Array, running: ChannelStatistics) -> Array:
        """By the running statistics."""
        scale = lax.rsqrt(running.var + self.eps) * weight
        return ((x.astype(scale.dtype) - running.mean) * scale + bias).astype(x.dtype)

    def _ghost_batch_norm(
        self, normalise: Callable[..., NormOutput], x: Array, weight: Array, bias: Array, near: Array
    ) -> tuple[Array, Array, Array]:
        assert self.part_size is not None
        assert len(x) % self.part_size == 0, f"parts of {self.part_size} do not divide {len(x)} images"
        parts = x.reshape(-1, self.part_size, *x.shape[1:])
        found = jax.vmap(lambda part: normalise(part, weight, bias, near))(parts)
        return found.y.reshape(x.shape), found.mean.mean(0), found.unbiased.mean(0)


def assign_batch_norm_groups(norm: BatchNorm, norm_group: BatchNormGroup) -> BatchNorm:
    """The same batch norm with statistics over `norm_group`: over the mesh's groups, or over parts of a device's batch."""
    return replace(
        norm, axes=GROUP if norm_group.ranks > 1 else (), part_size=None if norm_group.ranks > 1 else norm_group.images
    )
