"""The first convolution, computed in the way that suits the device; the parameters and the result are the same.

Three input channels leave a TPU's matrix units mostly idle. `padded4` adds a fourth channel of zeros, to images and
filters. `space_to_depth` folds blocks of stride x stride pixels into channels, and the filters with them, so that the
stride becomes 1 (MLPerf's TPU submissions, Kumar 2019): 7x7 with stride 2 on 3 channels turns into 4x4 on 12. Both
only add products with zeros, in exact arithmetic nothing.
"""

from typing import Literal

import jax.numpy as jnp
from jax import Array, lax

from podscale.jax.models.convolution import ConvolutionFunction, xla_convolution

StemCompute = Literal["plain", "padded4", "space_to_depth"]


def stem_convolution(
    images: Array,
    weight: Array,
    stride: int,
    padding: int,
    compute: StemCompute = "plain",
    convolve: ConvolutionFunction = xla_convolution,
) -> Array:
    """images [n, height, width, 3] and filters [outputs, 3, kernel, kernel] -> [n, rows, columns, outputs].

    Both of one dtype, which the result has too; padding in pixels on every side. A stem of stride 1 has nothing to fold
    and stays plain.
    """
    if compute == "space_to_depth" and stride > 1:
        return convolve(*_space_to_depth_conv(images, weight, stride, padding), 1, 0, 1)
    if compute == "padded4":
        images = jnp.pad(images, ((0, 0), (0, 0), (0, 0), (0, 1)))
        weight = jnp.pad(weight, ((0, 0), (0, 1), (0, 0), (0, 0)))
    return convolve(images, weight, stride, padding, 1)


def _space_to_depth_conv(images: Array, weight: Array, stride: int, padding: int) -> tuple[Array, Array]:
    """Images and filters whose convolution, without stride or padding, is the plain one.

    In the padded image output o begins at row stride * o, where a block begins; the kernel ends with zeros. Where the
    plain convolution leaves out the image's last rows, the padding behind is negative.
    """
    kernel = weight.shape[-1]
    blocks = -(-kernel // stride)
    behind = blocks * stride - kernel
    bottom, right = (
        ((side + 2 * padding - kernel) // stride + blocks) * stride - padding - side for side in images.shape[1:3]
    )
    none = (0, 0, 0)
    images = lax.pad(images, jnp.zeros((), images.dtype), (none, (padding, bottom, 0), (padding, right, 0), none))
    weight = jnp.pad(weight, ((0, 0), (0, 0), (0, behind), (0, behind)))
    return space_to_depth(images, stride), space_to_depth_filters(weight, stride)


def space_to_depth(x: Array, block: int) -> Array:
    """Blocks of pixels to channels: [n, h, w, c] -> [n, h / block, w / block, c * block^2]."""
    n, h, w, c = x.shape
    parts = x.reshape(n, h // block, block, w // block, block, c).transpose(0, 1, 3, 5, 2, 4)
    return parts.reshape(n, h // block, w // block, c * block * block)


def space_to_depth_filters(weight: Array, block: int) -> Array:
    """The same for filters: [o, c, h, w] -> [o, c * block^2, h / block, w / block]."""
    o, c, h, w = weight.shape
    parts = weight.reshape(o, c, h // block, block, w // block, block).transpose(0, 1, 3, 5, 2, 4)
    return parts.reshape(o, c * block * block, h // block, w // block)
