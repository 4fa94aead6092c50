"""Benchmarks behind `podscale bench`. No run uses them."""
