"""The PyTorch engine. `trainer` is the loop; each neighbour is one thing the loop uses."""
