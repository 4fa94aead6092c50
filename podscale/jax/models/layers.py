"""Layers of networks over arrays by the model spec's names: convolution, first convolution, linear, pooling.

Convolution uses the fastest form for the device; results differ by rounding only. Accelerators use XLA's convolution.
XLA's for CPUs (jaxlib 0.10) is as fast as torch's in most cases and slower by an order of magnitude in three, which are
written as matrix products here: kernels of one pixel, whose filters' gradient is slow; fewer outputs than the kernel
has pixels; and groups. benchmarks/jax_cpu.py measures whole steps with and without.

The first convolution is computed in one of three ways; parameters and result are the same. Three input channels leave
a TPU's matrix units mostly idle. `padded4` adds a fourth channel of zeros, to images and filters. `space_to_depth`
folds blocks of stride x stride pixels into channels, and the filters with them, so that the stride becomes 1 (MLPerf's
TPU submissions, Kumar 2019): 7x7 with stride 2 on 3 channels turns into 4x4 on 12. Both only add products with zeros.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from podscale.jax import spatial
from podscale.jax.batch_norm import BatchNorm, ChannelStatistics
from podscale.models import Window

NHWC_OIHW = ("NHWC", "OIHW", "NHWC")
"""Layouts of images, filters and outputs; XLA arranges them as the device wants."""

ConvolutionFunction = Callable[[Array, Array, int, int, int], Array]
"""(images [n, height, width, channels], filters [outputs, channels / groups, kernel, kernel], stride, padding, groups)
-> [n, height, width, outputs], all of one dtype."""


def choose_convolution(mesh: Mesh) -> ConvolutionFunction:
    """Return the fastest convolution for the devices of a mesh, which may be described devices."""
    return matmul_convolution if mesh.devices.flat[0].platform == "cpu" else xla_convolution


def xla_convolution(x: Array, weight: Array, stride: int, padding: int, groups: int = 1) -> Array:
    """Convolve by XLA's own operation; `x` and `weight` as in `ConvolutionFunction`."""
    y: Array = lax.conv_general_dilated(
        x,
        weight,
        (stride, stride),
        [(padding, padding)] * 2,
        dimension_numbers=NHWC_OIHW,
        feature_group_count=groups,
    )
    return y


def matmul_convolution(x: Array, weight: Array, stride: int, padding: int, groups: int = 1) -> Array:
    """Convolve by matrix products if XLA's is slow on a CPU; `x` and `weight` as in `ConvolutionFunction`."""
    if groups > 1:
        pairs = zip(jnp.split(x, groups, axis=-1), jnp.split(weight, groups), strict=True)
        return jnp.concatenate([matmul_convolution(part, filters, stride, padding) for part, filters in pairs], axis=-1)
    kernel = weight.shape[-1]
    rows, columns = ((side + 2 * padding - kernel) // stride + 1 for side in x.shape[1:3])
    if kernel > 1 and rows * columns >= kernel * kernel:
        return xla_convolution(x, weight, stride, padding)
    x = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    height, width = stride * (rows - 1) + 1, stride * (columns - 1) + 1
    shifted = [
        lax.slice(x, (0, i, j, 0), (len(x), i + height, j + width, x.shape[-1]), (1, stride, stride, 1))
        for i, j in product(range(kernel), repeat=2)
    ]
    filters = weight.transpose(0, 2, 3, 1).reshape(len(weight), -1)  # a window row by row, each pixel's channels
    return jnp.einsum("nhwi,oi->nhwo", jnp.concatenate(shifted, axis=-1), filters)


StemCompute = Literal["plain", "padded4", "space_to_depth"]


def stem_convolution(
    images: Array,
    weight: Array,
    stride: int,
    padding: int,
    compute: StemCompute = "plain",
    convolve: ConvolutionFunction = xla_convolution,
) -> Array:
    """Convolve `images` [n, height, width, 3] with `weight` [outputs, 3, kernel, kernel] of the same dtype.

    Returns [n, rows, columns, outputs]. A stem of stride 1 has nothing to fold and stays plain.
    """
    if compute == "space_to_depth" and stride > 1:
        return convolve(*_space_to_depth_conv(images, weight, stride, padding), 1, 0, 1)
    if compute == "padded4":
        images = jnp.pad(images, ((0, 0), (0, 0), (0, 0), (0, 1)))
        weight = jnp.pad(weight, ((0, 0), (0, 1), (0, 0), (0, 0)))
    return convolve(images, weight, stride, padding, 1)


def _space_to_depth_conv(images: Array, weight: Array, stride: int, padding: int) -> tuple[Array, Array]:
    """Return images and filters whose convolution, without stride or padding, is the plain one.

    In the padded image output o begins at row stride * o, the first of a block; zeros fill up the kernel. If the plain
    convolution leaves out the image's last rows, the padding after them is negative.
    """
    kernel = weight.shape[-1]
    blocks = -(-kernel // stride)
    fill = blocks * stride - kernel
    bottom, right = (
        ((side + 2 * padding - kernel) // stride + blocks) * stride - padding - side for side in images.shape[1:3]
    )
    none = (0, 0, 0)
    images = lax.pad(images, jnp.zeros((), images.dtype), (none, (padding, bottom, 0), (padding, right, 0), none))
    weight = jnp.pad(weight, ((0, 0), (0, 0), (0, fill), (0, fill)))
    return space_to_depth(images, stride), space_to_depth_filters(weight, stride)


def space_to_depth(x: Array, block: int) -> Array:
    """Fold blocks of pixels of `x` into channels: [n, h, w, c] -> [n, h / block, w / block, c * block^2]."""
    n, h, w, c = x.shape
    parts = x.reshape(n, h // block, block, w // block, block, c).transpose(0, 1, 3, 5, 2, 4)
    return parts.reshape(n, h // block, w // block, c * block * block)


def space_to_depth_filters(weight: Array, block: int) -> Array:
    """Fold filters `weight` likewise: [o, c, h, w] -> [o, c * block^2, h / block, w / block]."""
    o, c, h, w = weight.shape
    parts = weight.reshape(o, c, h // block, block, w // block, block).transpose(0, 1, 3, 5, 2, 4)
    return parts.reshape(o, c * block * block, h // block, w // block)


Arrays = Mapping[str, Array]


@dataclass(frozen=True)
class LayerOptions:
    """Implementation of the layers.

    Args:
        norm: batch norm; its parameters and statistics are fp32.
        dtype: arithmetic of images, filters and linear weights.
        stem: form of the first convolution.
        convolve: convolution for the devices (see `choose_convolution`).
    """

    norm: BatchNorm
    dtype: DTypeLike = jnp.float32
    stem: StemCompute = "plain"
    convolve: ConvolutionFunction = xla_convolution


class LayerApplier:
    """Layers of one forward pass, which look up their arrays by name and collect new running statistics.

    Images are [n, height, width, channels] of the network's dtype, or this device's tiles of them.
    """

    def __init__(
        self,
        parameters: Arrays,
        statistics: Arrays,
        options: LayerOptions,
        *,
        train: bool,
        tiles: spatial.TilesOf = spatial.no_tiles,
    ) -> None:
        self._parameters, self._options, self._train, self._tiles = parameters, options, train, tiles
        self.statistics = dict(statistics)

    def stem(self, name: str, images: Array, *, stride: int, padding: int) -> Array:
        """Apply the first convolution to `images` [n, height, width, 3] of any float dtype."""
        weight, x = self._weight(name), images.astype(self._options.dtype)
        x, padding = spatial.exchange_halo(x, Window(weight.shape[-1], stride, padding), self._tiles(x))
        y = stem_convolution(x, weight, stride, padding, self._options.stem, self._options.convolve)
        return self._add_bias(name, y)

    def convolution(self, name: str, x: Array, *, stride: int = 1, groups: int = 1) -> Array:
        """Convolve images `x` with same padding."""
        weight = self._weight(name)
        kernel = weight.shape[-1]
        x, padding = spatial.exchange_halo(x, Window(kernel, stride, kernel // 2), self._tiles(x))
        return self._add_bias(name, self._options.convolve(x, weight, stride, padding, groups))

    def blur(self, x: Array) -> Array:
        """Blur each channel of images `x` with [1, 2, 1] / 4 along both directions, zero-padded (Zhang 2019)."""
        x, padding = spatial.exchange_halo(x, Window(3, 1, 1), self._tiles(x))
        x = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
        x = (x[:, :-2] + x[:, 2:]) / 4 + x[:, 1:-1] / 2
        return (x[:, :, :-2] + x[:, :, 2:]) / 4 + x[:, :, 1:-1] / 2

    def subsample(self, x: Array, stride: int) -> Array:
        """Return every `stride`-th pixel of images `x` along both directions."""
        x, _ = spatial.exchange_halo(x, Window(1, stride, 0), self._tiles(x))
        return x[:, ::stride, ::stride]

    def norm(self, name: str, x: Array) -> Array:
        """Apply batch norm to images `x`; in training by the batch's statistics, which also update the running ones."""
        weight, bias = (self._parameters[f"{name}.{part}"] for part in ("weight", "bias"))
        mean, var = f"{name}.running_mean", f"{name}.running_var"
        running, tiles = ChannelStatistics(self.statistics[mean], self.statistics[var]), self._tiles(x)
        if not self._train:
            return self._options.norm.evaluate(x, weight, bias, running)
        y, running = self._options.norm.train(x, weight, bias, running, tiles)
        self.statistics[mean], self.statistics[var] = running
        return y

    def max_pool(self, x: Array, kernel: int, stride: int, padding: int) -> Array:
        """Return the largest value of each window of images `x`."""
        return spatial.max_pool(x, Window(kernel, stride, padding), self._tiles(x))

    def global_average_pool(self, x: Array) -> Array:
        """Return the mean over the pixels of each image of `x`, fp32 (or fp64) [n, channels]."""
        return spatial.global_average_pool(x.astype(jnp.promote_types(x.dtype, jnp.float32)), self._tiles(x))

    def gather_tiles(self, x: Array) -> Array:
        """Return whole images from tiles `x`; whole images as they are."""
        return spatial.gather_tiles(x, self._tiles(x))

    def linear(self, name: str, x: Array) -> Array:
        """Map `x` [n, inputs] to fp32 (or fp64) [n, outputs]: products in the network's dtype, sums and bias exact."""
        exact = jnp.promote_types(self._options.dtype, jnp.float32)
        y = jnp.dot(x.astype(self._options.dtype), self._weight(name).T, preferred_element_type=exact)
        return y + self._parameters[f"{name}.bias"]

    def _weight(self, name: str) -> Array:
        return self._parameters[f"{name}.weight"].astype(self._options.dtype)

    def _add_bias(self, name: str, y: Array) -> Array:
        bias = self._parameters.get(f"{name}.bias")
        return y if bias is None else y + bias.astype(y.dtype)
