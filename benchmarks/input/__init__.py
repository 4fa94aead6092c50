"""Input benchmark: images per CPU-second of Podscale's loaders and of others (`python -m benchmarks.input`)."""
