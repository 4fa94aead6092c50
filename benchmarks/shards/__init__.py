"""Sharding: images per CPU-second against other writers, and the cost of large plans."""
