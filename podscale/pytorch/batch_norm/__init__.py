"""Batch norm whose statistics span a group of ranks, a rank's batch, or parts of it (Ying 2018, section 3.4).

layer: the module that networks use. function: one normalisation over a group, forward and backward. statistics: the
message in which ranks put their moments together. native and traced: the passes over images, as kernels of torch and
as plain operations for the compiler. parts: several small batches in one.
"""

from podscale.pytorch.batch_norm.layer import BatchNorm, assign_batch_norm_groups

__all__ = ["BatchNorm", "assign_batch_norm_groups"]
