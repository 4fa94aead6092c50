"""Which checkpoints stay."""

from collections.abc import Collection, Sequence

from podscale.checkpoint.layout import CheckpointEntry


def kept_steps(
    entries: Sequence[CheckpointEntry], keep_last: int, keep_best: int, snapshots: Collection[int] = ()
) -> set[int]:
    """Steps to keep: the `keep_last` newest, the `keep_best` highest by top-1 (the later one where equal), and those
    of `snapshots`, for good.

    keep_last >= 1, so the newest complete checkpoint always stays.
    """
    newest = sorted((entry.step for entry in entries), reverse=True)[:keep_last]
    return {*newest, *snapshots, *(entry.step for entry in best_entries(entries)[:keep_best])}


def best_entries(entries: Sequence[CheckpointEntry]) -> list[CheckpointEntry]:
    """The entries with a known top-1, best first."""
    scored = [entry for entry in entries if entry.top1 is not None]
    return sorted(scored, key=lambda entry: (entry.top1, entry.step), reverse=True)
