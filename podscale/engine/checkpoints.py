"""The checkpoints of a run as its document and its shard set ask for them."""

from collections.abc import Callable

from podscale.config import RunConfig, result_values
from podscale.data.shard_set import ShardSet
from podscale.runs import RunDirectory
from podscale.runs.checkpoint import CheckpointReport, CheckpointStore, RunIdentity
from podscale.schedules import snapshot_steps


def open_checkpoint_store(
    config: RunConfig,
    run: RunDirectory,
    shard_set: ShardSet,
    fence: Callable[[], None] | None = None,
    listener: Callable[[CheckpointReport], None] | None = None,
) -> CheckpointStore:
    """Those of a run directory; fence and listener: see Checkpoints."""
    manifest = shard_set.manifest
    return CheckpointStore(
        run.checkpoints,
        RunIdentity(result_values(config), manifest.classes_sha256, manifest.plan_fingerprint),
        keep_last=config.checkpoint.keep_last,
        keep_best=config.checkpoint.keep_best,
        snapshot_steps=snapshot_steps(config.checkpoint.snapshots, config.train, len(shard_set.split("train"))),
        asynchronous=config.checkpoint.asynchronous,
        fence=fence,
        listener=listener,
    )
