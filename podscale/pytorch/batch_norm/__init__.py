"""Batch norm with statistics over a group of ranks, a rank's batch, or parts of it (Ying 2018, section 3.4).

layer: the module that networks use, and its statistics over a group. native_kernels and traced_kernels: the passes over
images, by torch's kernels and as plain operations for the compiler. ghost: several small batches in one.
"""

from podscale.pytorch.batch_norm.layer import BatchNorm, assign_batch_norm_groups

__all__ = ["BatchNorm", "assign_batch_norm_groups"]
