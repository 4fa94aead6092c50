"""Checkpoints: complete or ignored, framework-free, restorable at any world size."""

from podscale.runs.checkpoint.format import CheckpointEntry, RunIdentity, Snapshot
from podscale.runs.checkpoint.store import (
    CheckpointReport,
    CheckpointStore,
    Failed,
    Restored,
    Retention,
    Saved,
    Skipped,
)

__all__ = [
    "CheckpointEntry",
    "CheckpointReport",
    "CheckpointStore",
    "Failed",
    "Restored",
    "Retention",
    "RunIdentity",
    "Saved",
    "Skipped",
    "Snapshot",
]
