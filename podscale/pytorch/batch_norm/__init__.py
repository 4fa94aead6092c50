"""Batch norm with statistics over a group of ranks, a rank's batch, or parts of it (Ying 2018)."""

from podscale.pytorch.batch_norm.layer import BatchNorm, assign_batch_norm_groups

__all__ = ["BatchNorm", "assign_batch_norm_groups"]
