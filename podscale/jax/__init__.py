"""JAX engine, for TPUs. Its modules and names are those of `podscale.pytorch`.

The parts of a training run are pure functions: networks, batch norm, all-reduce, optimizers, the train step.
`trainer` implements the shared training loop (`podscale.training.trainer`) with them.
"""
