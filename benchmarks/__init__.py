"""Benchmarks: each is a module or a package with a `main`, and runs as `python -m benchmarks.NAME`."""
