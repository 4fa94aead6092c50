"""Shard sets, sampler, augmentation and loaders: from source images to batches of uint8 images."""

from podscale.data.loaders.base import Batch, Loader
from podscale.data.loaders.build_loader import build_evaluation_loader, build_loader, open_shard_set, resolve_loader

__all__ = ["Batch", "Loader", "build_evaluation_loader", "build_loader", "open_shard_set", "resolve_loader"]
