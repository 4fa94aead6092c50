"""The running statistics of batch norm, kept equal on all devices.

Each device sees its own batches, so plain running statistics drift apart; what an update changed is averaged over the
devices along with the loss (see `podscale.pytorch.batch_norm.layer`). As in the field, the variance is the mean of the
devices' variances.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array, lax

from podscale.config.model import BatchNormSection
from podscale.jax.mesh import RANKS


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
