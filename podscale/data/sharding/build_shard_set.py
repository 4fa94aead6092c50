"""Build the shard set of a data section: plan, pack the missing shards, merge."""

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from podscale.config.data import DataSection
from podscale.config.identity import data_fingerprint
from podscale.data.manifest import MANIFEST_FILE, WHOLE_SHARD_SET, ShardPart, ShardSetManifest, file_matches
from podscale.data.sharding.merge_records import RecordsBySplit, check_rejects, merge_shards, write_rejects
from podscale.data.sharding.pack import Packer, PackTask, TooManyRejects, explain_write_errors, pack_shards
from podscale.data.sharding.pack_progress import NULL_OBSERVER, BuildObserver
from podscale.data.sharding.shard_plan import PLAN_FILE, SPLITS, ShardPlan, describe_changes, plan_shards
from podscale.data.sharding.shard_record import find_record
from podscale.data.sharding.validate_image import ImageRules
from podscale.data.sources import SourceMissing, open_source
from podscale.errors import InputError
from podscale.util import host_info
from podscale.util.progress_reports import ProgressCallback, ignore_progress


@dataclass(frozen=True)
class BuildResult:
    directory: Path
    complete_manifest: ShardSetManifest | None
    """None if other packers of the indexed job have not finished."""
    reused: bool
    """True if the set was already complete, so that nothing was written."""
    packed_shards: int
    existing_shards: int
    messages: tuple[str, ...] = ()
    """Messages for the user, a sentence each."""

    @property
    def manifest(self) -> ShardSetManifest:
        """Manifest of a complete set. A build of all parts always has one."""
        assert self.complete_manifest is not None
        return self.complete_manifest


def build_shard_set(
    data: DataSection,
    directory: Path,
    part: ShardPart = WHOLE_SHARD_SET,
    *,
    workers: int,
    verify: bool = False,
    progress: ProgressCallback | None = None,
    observer: BuildObserver = NULL_OBSERVER,
) -> BuildResult:
    """Build the shard set of `data` in `directory`, or finish it.

    The call that finds all shards packed merges them. After an InputError, finished shards are kept for the next call.

    Args:
        part: shards that this call packs.
        workers: packing processes; 0 for one per CPU.
        verify: read existing shards again, and repack those whose sha256 differs.
    """
    assert 0 <= part.index < part.count
    workers = workers or host_info.cpu_count()
    with explain_write_errors(directory):
        for folder in [directory / name for name in SPLITS] + [directory / "records" / name for name in SPLITS]:
            folder.mkdir(parents=True, exist_ok=True)
    with _build_lock(directory, shared=part.count > 1):
        return _build(data, directory, part, workers, verify, progress or ignore_progress, observer)


def _build(
    data: DataSection,
    directory: Path,
    part: ShardPart,
    workers: int,
    verify: bool,
    report: ProgressCallback,
    observer: BuildObserver,
) -> BuildResult:
    observer.phase_started("plan")
    existing = _read_complete_manifest(directory, data)
    try:
        plan = plan_shards(open_source(data), data, report)
    except SourceMissing as error:
        if existing is None:
            raise
        return BuildResult(directory, existing, True, 0, 0, (f"Using the complete set without its source: {error}",))
    _check_unchanged(directory, plan, existing, data)
    all_tasks = [PackTask(split, shard) for split in SPLITS for shard in range(plan.shard_count(split))]
    missing = {task for task in all_tasks if not _is_packed(directory, plan, task, existing, verify)}
    if existing is not None and not missing:
        return BuildResult(directory, existing, True, 0, len(all_tasks))
    own_tasks = [task for number, task in enumerate(all_tasks) if part.contains(number) and task in missing]
    with explain_write_errors(directory):
        if existing is not None:  # a damaged set is not complete until it is repaired
            (directory / MANIFEST_FILE).unlink()
        if not _has_same_plan(directory, plan):
            plan.write(directory / PLAN_FILE)
    _check_disk_space(directory, plan, own_tasks)
    limit = int(data.max_reject_rate * len(plan))
    try:
        observer.phase_started("pack")
        for split in SPLITS:
            observer.images_planned(split, sum(plan.image_count(*task) for task in own_tasks if task.split == split))
        pack_shards(
            Packer(directory, data, ImageRules.from_section(data)), plan, own_tasks, workers, report, limit, observer
        )
    except TooManyRejects:
        check_rejects(directory, plan, data, write_rejects(directory, plan, _read_records(directory, plan, all_tasks)))
        raise
    observer.phase_started("merge")
    records = _read_records(directory, plan, all_tasks)
    is_complete = sum(map(len, records.values())) == len(all_tasks)
    manifest = merge_shards(directory, plan, data, records) if is_complete else None
    return BuildResult(directory, manifest, False, len(own_tasks), len(all_tasks) - len(missing))


@contextmanager
def _build_lock(directory: Path, shared: bool) -> Iterator[None]:
    """Hold the lock of a shard set, exclusively or, for the packers of an indexed job, shared; wait for it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # without file locks, packers still write temporary names and rename
            fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read_complete_manifest(directory: Path, data: DataSection) -> ShardSetManifest | None:
    """Return the existing manifest; raise InputError if it belongs to another data section."""
    path = directory / MANIFEST_FILE
    if not path.exists():
        return None
    manifest = ShardSetManifest.parse(path.read_text(encoding="utf-8"), str(path))
    if manifest.data_fingerprint != data_fingerprint(data):
        raise InputError(
            "has the shard set of another data section", field=str(directory), hint="Choose another directory."
        )
    return manifest


def _check_unchanged(directory: Path, plan: ShardPlan, before: ShardSetManifest | None, data: DataSection) -> None:
    if before is None or before.plan_fingerprint == plan.fingerprint:
        return
    try:
        what = describe_changes(ShardPlan.read(directory / PLAN_FILE), plan)
    except InputError:
        what = "the listing differs"
    raise InputError(
        f"changed since its shard set was made: {what}",
        field="data.source",
        got=data.source,
        hint=f"Restore it, or delete {directory} to shard it again (runs that trained on the old set cannot be resumed "
        "with the new one).",
    )


def _is_packed(directory: Path, plan: ShardPlan, task: PackTask, before: ShardSetManifest | None, verify: bool) -> bool:
    record = find_record(directory, plan, *task)
    if record is None or (before is None and not record.is_final):
        return False
    return not verify or file_matches(directory / task.split / plan.shard_name(*task), record.bytes, record.sha256)


def _has_same_plan(directory: Path, plan: ShardPlan) -> bool:
    try:
        return ShardPlan.read(directory / PLAN_FILE).fingerprint == plan.fingerprint
    except InputError:
        return False


def _read_records(directory: Path, plan: ShardPlan, tasks: Sequence[PackTask]) -> RecordsBySplit:
    """Return the existing records by split, in shard order."""
    records: RecordsBySplit = {split: [] for split in SPLITS}
    for task in tasks:
        record = find_record(directory, plan, *task)
        if record is not None:
            records[task.split].append(record)
    return records


def _check_disk_space(directory: Path, plan: ShardPlan, tasks: Sequence[PackTask]) -> None:
    """Raise InputError if the disk cannot hold the shards of these tasks."""
    needed = sum(int(plan.shard_bytes(split)[shard]) for split, shard in tasks)
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise InputError(
            f"{len(tasks)} shards need {needed / 2**20:.0f} MiB, and only {free / 2**20:.0f} MiB are free",
            field=str(directory),
            hint="Free space or choose another run.workspace (finished shards are kept).",
        )
