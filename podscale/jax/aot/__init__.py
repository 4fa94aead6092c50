"""Ahead-of-time compilation of a document's train step by the real TPU compiler, on a machine without a TPU.

compiler: the child process, from a document and a topology to the compiler's report of the program. hlo: collectives in
the program's text. compile_report: step time and report. request, batch_search: the parent's side. Only the child
imports jax.
"""
