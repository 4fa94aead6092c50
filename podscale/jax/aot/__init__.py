"""The training step of a document, compiled by the real TPU compiler on a machine without a TPU.

compiling: the job of a child process, from a document and a topology to what the compiler says of the program.
program: which collectives are in its text. estimate: how long a step takes. request, cache, sweep: the parent's side.
Only the child imports jax.
"""
