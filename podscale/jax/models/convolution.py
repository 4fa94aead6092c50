"""Convolution as the device at hand computes it well; the results differ by rounding alone.

Accelerators get XLA's convolution. That of XLA for CPUs (jaxlib 0.10) is as fast as torch's in most cases and by an
order of magnitude slower in three, which are written as products of matrices here: kernels of one pixel, whose filters'
gradient is slow; fewer outputs than the kernel has pixels; and groups. benchmarks/jax_cpu.py measures whole steps with
and without.
"""

from collections.abc import Callable
from itertools import product

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

NHWC_OIHW = ("NHWC", "OIHW", "NHWC")
"""Images as loaders bring them, filters as the catalogue keeps them; XLA arranges both as the device wants."""

ConvolutionFunction = Callable[[Array, Array, int, int, int], Array]
"""(images [n, height, width, channels], filters [outputs, channels / groups, kernel, kernel], stride, padding, groups)
-> [n, height, width, outputs], all of one dtype."""


def choose_convolution(mesh: Mesh) -> ConvolutionFunction:
    """What suits the devices of a mesh, which need not be there."""
    return matmul_convolution if mesh.devices.flat[0].platform == "cpu" else xla_convolution


def xla_convolution(x: Array, weight: Array, stride: int, padding: int, groups: int = 1) -> Array:
    """XLA's convolution."""
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
    """By products of matrices where XLA's convolution is slow on a CPU."""
    if groups > 1:
        pairs = zip(jnp.split(x, groups, axis=-1), jnp.split(weight, groups), strict=True)
        return jnp.concatenate([matmul_convolution(part, filters, stride, padding) for part, filters in pairs], axis=-1)
    kernel = weight.shape[-1]
    rows, columns = ((side + 2 * padding - kernel) // stride + 1 for side in x.shape[1:3])
    if kernel > 1 and rows * columns >= kernel * kernel:
        return xla_convolution(x, weight, stride, padding)
    x = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    far, wide = stride * (rows - 1) + 1, stride * (columns - 1) + 1
    seen = [
        lax.slice(x, (0, i, j, 0), (len(x), i + far, j + wide, x.shape[-1]), (1, stride, stride, 1))
        for i, j in product(range(kernel), repeat=2)
    ]
    filters = weight.transpose(0, 2, 3, 1).reshape(len(weight), -1)  # a window row by row, each pixel's channels
    return jnp.einsum("nhwi,oi->nhwo", jnp.concatenate(seen, axis=-1), filters)
