"""Batch norm whose statistics span a group of devices, a device's batch, or parts of it (Ying 2018, section 3.4).

layer: what networks use. function: one normalisation, forward and backward.
"""

from podscale.jax.batchnorm.layer import BatchNorm, ChannelStatistics, assign_batch_norm_groups

__all__ = ["BatchNorm", "ChannelStatistics", "assign_batch_norm_groups"]
