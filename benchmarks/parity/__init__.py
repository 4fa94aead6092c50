"""The two engines from the same weights over the same batches."""
