"""Batch norm with statistics over a group of devices, a device's batch, or parts of it (Ying 2018).

Forward and backward send one message each. The moments are those of x - near, where `near` is the running mean: one
pass over the images computes both, one all-reduce of 2 fp32 values per channel combines those of a group, and little
cancels in E[d^2] - E[d]^2 (Chan 1983, "shifted data"). The variance has a relative error of about
1e-7 * (1 + (mean - near)^2 / variance). `near` follows the mean, and a network begins with means of about one
deviation. Plain sums, as in flax and in MLPerf's submissions, are the case near = 0.

With sums over the whole group (Ioffe 2015, section 3) and xmu = x - mean:
dx = weight * invstd * (dy - sum(dy) / count - xmu * invstd^2 * sum(dy * xmu) / count).
The gradients of weight and bias stay local: the gradient average over the devices completes them. Images are kept for
backward in their own dtype, so in bf16 if the network computes in it. If the group shares images, the pixels of tiles
beyond the image have zero gradient, by the rules of `podscale.jax.spatial`.

The functions need `shard_map(..., check_vma=False)`, because they do not declare over which axes their values vary.

Running statistics are kept equal on all devices: the change of a step is averaged over the devices along with the loss
(see `podscale.pytorch.batch_norm.layer`). As is usual, the variance is the mean of the devices' variances.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from podscale.config.model import BatchNormSection
from podscale.config.ranks import BatchNormGroup
from podscale.jax.mesh import GROUP, RANKS, SPATIAL, AxisNames
from podscale.jax.spatial import Tiles

REDUCED_DIMS = (0, 1, 2)


class DeviceGroup(NamedTuple):
    """Devices that share statistics: `size` consecutive ones along `axes`, or all along `axes` if it is None.

    Without axes, each device alone.
    """

    axes: AxisNames = ()
    size: int | None = None

    @property
    def devices(self) -> int:
        return self.size or (lax.axis_size(self.axes) if self.axes else 1)

    def mean(self, values: Array) -> Array:
        """Return the mean over the devices of the group, on each of them.

        Args:
            values: fp32 or fp64, of any shape.
        """
        if not self.axes:
            return values
        length = lax.axis_size(self.axes)
        whole = self.size in (None, length)
        groups = None if whole else np.arange(length).reshape(-1, self.size or 1).tolist()
        mean: Array = lax.pmean(values, self.axes, axis_index_groups=groups)
        return mean

    def with_tiles(self) -> "DeviceGroup":
        """Return the group with all devices that share its images."""
        return DeviceGroup(self.axes + SPATIAL, self.size and self.size * lax.axis_size(SPATIAL))


ALONE = DeviceGroup()


class NormOutput(NamedTuple):
    """Normalised images, and the group's mean and unbiased variance (as in torch, unlike flax), without gradient."""

    y: Array
    mean: Array
    unbiased: Array


class _Residuals(NamedTuple):
    x: Array
    weight: Array
    near: Array
    shift: Array
    invstd: Array


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def sync_batch_norm(
    eps: float, group: DeviceGroup, tiles: Tiles | None, x: Array, weight: Array, bias: Array, near: Array
) -> NormOutput:
    """Normalise images over all devices of a group, in their dtype.

    Args:
        group: devices that share statistics; each has the same number of images or tiles.
        tiles: tiles of images that devices share; None if they share none.
        x: images [n, height, width, channels].
        weight: scale, fp32 [channels].
        bias: shift, fp32 [channels].
        near: estimate of the mean, fp32 [channels], equal in the group.
    """
    return _sync_batch_norm_forward(eps, group, tiles, x, weight, bias, near)[0]


def _sync_batch_norm_forward(
    eps: float, group: DeviceGroup, tiles: Tiles | None, x: Array, weight: Array, bias: Array, near: Array
) -> tuple[NormOutput, _Residuals]:
    shifted = _zero_outside(tiles, _subtract_near(x, near))
    moments = jnp.stack([shifted.mean(REDUCED_DIMS), (shifted * shifted).mean(REDUCED_DIMS)])
    shift, square = _group_mean(moments, group, tiles)
    var = jnp.maximum(square - shift * shift, 0.0)
    invstd = lax.rsqrt(var + eps)
    y = ((shifted - shift) * (invstd * weight) + bias).astype(x.dtype)
    count = (x.size // x.shape[-1]) * group.devices * _filled_fraction(tiles)
    output = NormOutput(y, near + shift, var * (count / max(count - 1, 1)))
    return output, _Residuals(x, weight, near, shift, invstd)


def _sync_batch_norm_backward(
    eps: float, group: DeviceGroup, tiles: Tiles | None, residuals: _Residuals, cotangents: NormOutput
) -> tuple[Array, Array, Array, Array]:
    x, weight, near, shift, invstd = residuals
    dy = cotangents.y.astype(shift.dtype)
    xmu = _zero_outside(tiles, _subtract_near(x, near)) - shift
    sums = jnp.stack([dy.sum(REDUCED_DIMS), (dy * xmu).sum(REDUCED_DIMS)])
    mean_dy, mean_dy_xmu = _group_mean(sums, group, tiles) / (x.size // x.shape[-1])
    dx = (dy - mean_dy - xmu * (invstd * invstd * mean_dy_xmu)) * (weight * invstd)
    return _zero_outside(tiles, dx).astype(x.dtype), sums[1] * invstd, sums[0], jnp.zeros_like(near)


sync_batch_norm.defvjp(_sync_batch_norm_forward, _sync_batch_norm_backward)


def _subtract_near(x: Array, near: Array) -> Array:
    """Return x - near in fp32, or in fp64 if x is."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) - near


def _group_mean(message: Array, group: DeviceGroup, tiles: Tiles | None) -> Array:
    """Return means over the pixels of the group's images from means over the pixels of each tile."""
    mean = group.mean(message)
    return mean if _filled_fraction(tiles) == 1 else mean / _filled_fraction(tiles)


def _zero_outside(tiles: Tiles | None, x: Array) -> Array:
    """Set values beyond the image to zero."""
    return x if tiles is None or tiles.is_even else jnp.where(tiles.inside_mask(), x, 0.0)


def _filled_fraction(tiles: Tiles | None) -> float:
    return 1.0 if tiles is None else tiles.filled_fraction


class ChannelStatistics(NamedTuple):
    """Running mean and unbiased variance of each channel, fp32."""

    mean: Array
    var: Array


@dataclass(frozen=True)
class BatchNorm:
    """Batch norm per channel of images [n, height, width, channels]. Statistics are fp32.

    Args:
        momentum: weight of the batch in the running statistics.
        group: ranks that share statistics; default: each alone.
        part_size: images of a device's batch that share statistics; default: all. Running statistics are means over
            the parts.
    """

    eps: float = 1e-5
    momentum: float = 0.1
    group: DeviceGroup = ALONE
    part_size: int | None = None

    def train(
        self, x: Array, weight: Array, bias: Array, running: ChannelStatistics, tiles: Tiles | None = None
    ) -> tuple[Array, ChannelStatistics]:
        """Normalise images `x` by their statistics, then `weight` and `bias`, fp32 [channels].

        Returns the output and the updated running statistics.
        """
        normalise = partial(sync_batch_norm, self.eps, self.group if tiles is None else self.group.with_tiles(), tiles)
        if self.part_size is None or len(x) <= self.part_size:
            y, mean, var = normalise(x, weight, bias, running.mean)
        else:
            y, mean, var = self._ghost_batch_norm(normalise, x, weight, bias, running.mean)
        mean, var = lax.stop_gradient((mean, var))
        updated = (old + self.momentum * (new - old) for old, new in zip(running, (mean, var), strict=True))
        return y, ChannelStatistics(*updated)

    def evaluate(self, x: Array, weight: Array, bias: Array, running: ChannelStatistics) -> Array:
        """Normalise images `x` by the running statistics, then `weight` and `bias`, fp32 [channels]."""
        scale = lax.rsqrt(running.var + self.eps) * weight
        return ((x.astype(scale.dtype) - running.mean) * scale + bias).astype(x.dtype)

    def _ghost_batch_norm(
        self, normalise: Callable[..., NormOutput], x: Array, weight: Array, bias: Array, near: Array
    ) -> tuple[Array, Array, Array]:
        assert self.part_size is not None
        assert len(x) % self.part_size == 0, f"parts of {self.part_size} do not divide {len(x)} images"
        parts = x.reshape(-1, self.part_size, *x.shape[1:])
        output = jax.vmap(lambda part: normalise(part, weight, bias, near))(parts)
        return output.y.reshape(x.shape), output.mean.mean(0), output.unbiased.mean(0)


def assign_batch_norm_groups(norm: BatchNorm, norm_group: BatchNormGroup) -> BatchNorm:
    """Return the batch norm with statistics over `norm_group`: ranks of the mesh, or parts of a device's batch."""
    if norm_group.ranks > 1:
        return replace(norm, group=DeviceGroup(GROUP, norm_group.ranks), part_size=None)
    return replace(norm, group=ALONE, part_size=norm_group.images)


def statistics_change(before: Mapping[str, Array], after: Mapping[str, Array]) -> Array:
    """Return the change from `before` to `after` a step, arrays by name, as one flat fp32 array."""
    return jnp.concatenate([(after[name] - before[name]).reshape(-1) for name in before])


def apply_statistics_change(before: Mapping[str, Array], change: Array, finite: Array) -> dict[str, Array]:
    """Return the statistics `before` plus the averaged `change` (flat), or `before` if `finite` (scalar) is False."""
    statistics, start = {}, 0
    for name, values in before.items():
        part = change[start : start + values.size].reshape(values.shape)
        statistics[name] = jnp.where(finite, values + part, values)
        start += values.size
    return statistics


def running_statistics_weight(section: BatchNormSection) -> Array | float:
    """Return the weight of this rank: 1, or with `running: first` the number of ranks on the first and 0 elsewhere."""
    if section.running == "mean":
        return 1.0
    return jnp.where(lax.axis_index(RANKS) == 0, float(lax.axis_size(RANKS)), 0.0)
