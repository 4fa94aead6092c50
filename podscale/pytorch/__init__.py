"""PyTorch engine. `trainer` implements the shared training loop (`podscale.training.trainer`)."""
