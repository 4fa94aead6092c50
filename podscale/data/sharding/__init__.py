"""Shard sets: plain tar files of images, one binary index a split, and a manifest that says they are complete."""
