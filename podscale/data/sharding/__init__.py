"""Build shard sets: tar files of images, one binary index per split, and a manifest that is written last."""
