"""Training loop and its parts that need no framework, shared by the PyTorch and the JAX engine."""
