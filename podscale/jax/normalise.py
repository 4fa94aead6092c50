"""Pixels to what a network expects, on the device, inside the update (so that the compiler can fuse it)."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from podscale.config import InputSection


def normalise(images: Array, section: InputSection) -> Array:
    """uint8 [n, height, width, 3] -> float32 of the same shape, (x / 255 - mean) / std.

    The document's mean and standard deviation are of pixels scaled to [0, 1].
    """
    assert images.dtype == jnp.uint8, images.dtype
    scale = 255.0 * np.array(section.std)
    factor, shift = 1.0 / scale, -255.0 * np.array(section.mean) / scale
    return images.astype(jnp.float32) * factor.astype(np.float32) + shift.astype(np.float32)
