"""Checkpoints: complete or ignored, framework-free, restorable at any world size."""

from podscale.checkpoint.identity import Identity
from podscale.checkpoint.layout import Entry, Snapshot
from podscale.checkpoint.store import Checkpoints, Passed, Saved

__all__ = ["Checkpoints", "Entry", "Identity", "Passed", "Saved", "Snapshot"]
