"""Batch norm with statistics over a group of devices, a device's batch, or parts of it (Ying 2018, section 3.4).

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

The functions need `shard_map(..., check_vma=False)`: only the step as a whole knows what varies over which axis.

Running statistics are kept equal on all devices: the change of a step is averaged over the devices along with the loss
(see `podscale.pytorch.batch_norm.layer`). As in the field, the variance is the mean of the devices' variances.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from podscale.config.batch_norm_groups import BatchNormGroup
from podscale.config.model import BatchNormSection
from podscale.jax.mesh import GROUP, RANKS, SPATIAL, AxisNames
from podscale.jax.spatial import Tiles

REDUCED_DIMS = (0, 1, 2)


class NormOutput(NamedTuple):
    """Images, and the group's mean and unbiased variance (which torch and cuDNN keep, not flax), without gradient."""

    y: Array
    mean: Array
    unbiased: Array


class _Residuals(NamedTuple):
    x: Array
    weight: Array
    near: Array
    off: Array
    invstd: Array


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def sync_batch_norm(
    eps: float, axes: AxisNames, tiles: Tiles | None, x: Array, weight: Array, bias: Array, near: Array
) -> NormOutput:
    """Images [n, height, width, channels] normalised over all devices of a group, in their own dtype.

    axes: of the mesh, over which the group lies; none for one device alone. tiles: how its devices share images; None
    where they do not. near: fp32 [channels], equal in the group, not far from the mean. Every device brings equally
    many images, or tiles.
    """
    return _sync_batch_norm_forward(eps, axes, tiles, x, weight, bias, near)[0]


def _sync_batch_norm_forward(
    eps: float, axes: AxisNames, tiles: Tiles | None, x: Array, weight: Array, bias: Array, near: Array
) -> tuple[NormOutput, _Residuals]:
    away = _zero_outside(tiles, _subtract_near(x, near))
    off, square = _group_mean(jnp.stack([away.mean(REDUCED_DIMS), (away * away).mean(REDUCED_DIMS)]), axes, tiles)
    var = jnp.maximum(square - off * off, 0.0)
    invstd = lax.rsqrt(var + eps)
    y = ((away - off) * (invstd * weight) + bias).astype(x.dtype)
    count = (x.size // x.shape[-1]) * _group_size(axes) * _filled_fraction(tiles)
    found = NormOutput(y, near + off, var * (count / max(count - 1, 1)))
    return found, _Residuals(x, weight, near, off, invstd)


def _sync_batch_norm_backward(
    eps: float, axes: AxisNames, tiles: Tiles | None, kept: _Residuals, found: NormOutput
) -> tuple[Array, Array, Array, Array]:
    dy = found.y.astype(kept.off.dtype)
    xmu = _zero_outside(tiles, _subtract_near(kept.x, kept.near)) - kept.off
    sums = jnp.stack([dy.sum(REDUCED_DIMS), (dy * xmu).sum(REDUCED_DIMS)])
    of_dy, of_xmu = _group_mean(sums, axes, tiles) / (kept.x.size // kept.x.shape[-1])
    dx = (dy - of_dy - xmu * (kept.invstd * kept.invstd * of_xmu)) * (kept.weight * kept.invstd)
    return _zero_outside(tiles, dx).astype(kept.x.dtype), sums[1] * kept.invstd, sums[0], jnp.zeros_like(kept.near)


sync_batch_norm.defvjp(_sync_batch_norm_forward, _sync_batch_norm_backward)


def _subtract_near(x: Array, near: Array) -> Array:
    """x - near in fp32, or fp64 for images that are more exact than that."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) - near


def _group_mean(message: Array, axes: AxisNames, tiles: Tiles | None) -> Array:
    """Means over the pixels of the group's images, from those over the pixels of each tile."""
    mean = lax.pmean(message, axes) if axes else message
    return mean if _filled_fraction(tiles) == 1 else mean / _filled_fraction(tiles)


def _zero_outside(tiles: Tiles | None, x: Array) -> Array:
    """With zeros beyond the image."""
    return x if tiles is None or tiles.is_even else jnp.where(tiles.inside_mask(), x, 0.0)


def _filled_fraction(tiles: Tiles | None) -> float:
    return 1.0 if tiles is None else tiles.filled_fraction


def _group_size(axes: AxisNames) -> int:
    return lax.axis_size(axes) if axes else 1


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
    """Return the batch norm with statistics over `norm_group`: the mesh's groups, or parts of a device's batch."""
    return replace(
        norm, axes=GROUP if norm_group.ranks > 1 else (), part_size=None if norm_group.ranks > 1 else norm_group.images
    )


__all__ = ["BatchNorm", "ChannelStatistics", "assign_batch_norm_groups"]


def statistics_change(before: Mapping[str, Array], after: Mapping[str, Array]) -> Array:
    """What an update changed, as one flat fp32 array."""
    return jnp.concatenate([(after[name] - before[name]).reshape(-1) for name in before])


def apply_statistics_change(before: Mapping[str, Array], change: Array, finite: Array) -> dict[str, Array]:
    """The statistics after the averaged change, or as before where the update is not finite."""
    found, at = {}, 0
    for name, values in before.items():
        found[name] = jnp.where(finite, values + change[at : at + values.size].reshape(values.shape), values)
        at += values.size
    return found


def running_statistics_weight(section: BatchNormSection) -> Array | float:
    """The weight of this device's change in the average: the same for all, or everything for the first."""
    if section.running == "mean":
        return 1.0
    return jnp.where(lax.axis_index(RANKS) == 0, float(lax.axis_size(RANKS)), 0.0)
