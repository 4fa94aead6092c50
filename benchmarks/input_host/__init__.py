"""Input on a host without accelerated decoding."""
