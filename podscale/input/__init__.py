"""From shards to batches of uint8 images; no framework is imported outside the loaders that need one."""
