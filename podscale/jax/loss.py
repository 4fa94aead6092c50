"""The training loss."""

import jax.numpy as jnp
from jax import Array, nn


def smoothed_cross_entropy(logits: Array, labels: Array, smoothing: float) -> Array:
    """Mean cross entropy in fp32 against targets that spread `smoothing` over all classes (Szegedy 2016, section 7).

    logits: [n, classes] of any float type; labels: integers [n].
    """
    chances = nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
    of_labels = jnp.take_along_axis(chances, labels[:, None], axis=1).mean()
    return -(1.0 - smoothing) * of_labels - smoothing * chances.mean()
