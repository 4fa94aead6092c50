"""Benchmarks: each is a module or a package of this one with a `main`, and runs as `python -m benchmarks.NAME`."""
