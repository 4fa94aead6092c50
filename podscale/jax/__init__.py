"""The JAX engine, for TPUs; its rooms and names are those of `podscale.pytorch`.

The parts of a training are pure functions: networks, batch norm, all-reduce, updates, the step. `build` makes a session
of them, which the loop of both engines (`podscale.training.trainer`) carries out.
"""
