"""Losses and accuracy of the two engines from the same weights over the same batches."""
