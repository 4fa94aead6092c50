"""Benchmarks of `podscale bench`; runs do not use them."""
