"""Shard sets, sampler, augmentation and loaders: from source images to batches of uint8 images.

Names load on first use: a stage that only reads a manifest, or finds its work done, does without NumPy and the loaders.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from podscale.data.loaders.base import Batch, Loader
    from podscale.data.loaders.build_loader import (
        build_evaluation_loader,
        build_loader,
        open_shard_set,
        resolve_loader,
    )

__all__ = ["Batch", "Loader", "build_evaluation_loader", "build_loader", "open_shard_set", "resolve_loader"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "base" if name in ("Batch", "Loader") else "build_loader"
    return getattr(import_module(f"podscale.data.loaders.{module}"), name)
