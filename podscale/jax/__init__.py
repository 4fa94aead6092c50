"""The JAX engine, for TPUs; its rooms and names are those of `podscale.pytorch`.

What stands here are the parts of a training, as pure functions: networks, batch norm, all-reduce, updates, the step.
What makes a run of them (loaders, checkpoints, processes) is still missing, so the document does not offer it.
"""
