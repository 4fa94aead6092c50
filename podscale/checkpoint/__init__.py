"""Checkpoints: complete or ignored, framework-free, restorable at any world size."""

from podscale.checkpoint.identity import RunIdentity
from podscale.checkpoint.layout import CheckpointEntry, Snapshot
from podscale.checkpoint.store import CheckpointReport, CheckpointStore, Failed, Restored, Saved, Skipped

__all__ = [
    "CheckpointEntry",
    "CheckpointReport",
    "CheckpointStore",
    "Failed",
    "Restored",
    "RunIdentity",
    "Saved",
    "Skipped",
    "Snapshot",
]
