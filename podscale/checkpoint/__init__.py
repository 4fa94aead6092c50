"""Checkpoints: complete or ignored, framework-free, restorable at any world size."""

from podscale.checkpoint.identity import Identity
from podscale.checkpoint.layout import Entry, Snapshot
from podscale.checkpoint.store import Checkpoints, Failed, Passed, Report, Restored, Saved

__all__ = ["Checkpoints", "Entry", "Failed", "Identity", "Passed", "Report", "Restored", "Saved", "Snapshot"]
