"""Checkpoint store of one run: asynchronous saves, retention, and restore of the newest complete checkpoint."""

import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from podscale.errors import InputError, PodscaleError
from podscale.runs.checkpoint.format import (
    DISK_FULL_ERRNOS,
    STEP_DIRECTORY_PATTERN,
    CheckpointEntry,
    CheckpointManifest,
    RunIdentity,
    Snapshot,
    complete_entries,
    read_entry,
    read_snapshot,
    remove_checkpoint,
    replace_manifest,
    step_directory,
    steps_on_disk,
    write_checkpoint,
    write_error,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """Checkpoints that a run keeps.

    Args:
        keep_last: Number of newest checkpoints; at least 1, so the newest complete one always stays.
        keep_best: Number of checkpoints with the highest top-1.
        snapshot_steps: Steps whose checkpoints are never removed, for example for a snapshot ensemble.
    """

    keep_last: int
    keep_best: int
    snapshot_steps: Collection[int] = ()

    def kept_steps(self, entries: Sequence[CheckpointEntry]) -> set[int]:
        """Return the steps to keep of the complete checkpoints `entries`."""
        newest = sorted((entry.step for entry in entries), reverse=True)[: self.keep_last]
        return {*newest, *self.snapshot_steps, *(entry.step for entry in best_entries(entries)[: self.keep_best])}


def best_entries(entries: Sequence[CheckpointEntry]) -> list[CheckpointEntry]:
    """Return the entries with a known top-1, best first; of equal ones the later step first."""
    scored = [entry for entry in entries if entry.top1 is not None]
    return sorted(scored, key=lambda entry: (entry.top1, entry.step), reverse=True)


@dataclass(frozen=True)
class Saved:
    """Finished save."""

    step: int
    bytes: int
    seconds: float
    top1: float | None


@dataclass(frozen=True)
class Failed:
    """Failed save; `disk_full` is also True if the user's quota is used up."""

    step: int
    reason: str
    disk_full: bool = False


@dataclass(frozen=True)
class Restored:
    """Checkpoint that was read and verified."""

    step: int
    seconds: float


@dataclass(frozen=True)
class Skipped:
    """Damaged checkpoint that restore skipped."""

    step: int
    reason: str


CheckpointReport = Saved | Failed | Restored | Skipped


class CheckpointStore:
    """Checkpoints in a directory, which has one writer at a time (see the run's lease).

    At most one save is in flight; the next `save` waits for it, so that memory holds one snapshot. A failed save raises
    its error at the next `save`, `wait` or `close`.

    Args:
        identity: Identity of the run; a checkpoint with another identity is refused.
        asynchronous: Write on another thread.
        fence: Called before each write; raises if a newer launch owns the run directory.
        listener: Receives the report of every save (on the writer's thread if asynchronous) and restore.
    """

    def __init__(
        self,
        directory: Path,
        identity: RunIdentity,
        retention: Retention,
        *,
        asynchronous: bool,
        fence: Callable[[], None] | None = None,
        listener: Callable[[CheckpointReport], None] | None = None,
    ) -> None:
        self.directory = directory
        self._identity, self._retention, self._asynchronous = identity, retention, asynchronous
        self._fence = fence or (lambda: None)
        self._listener = listener or (lambda report: None)
        self._writer = ThreadPoolExecutor(1, "checkpoint-writer")  # an interpreter that exits normally waits for it
        self._pending: Future[None] | None = None
        self._verified: set[int] = set()  # steps that this process wrote or read completely
        self._damaged: set[int] = set()  # steps that restore skipped, although their file sizes may look right

    def save(self, snapshot: Snapshot, *, top1: float | None = None) -> None:
        """Write `snapshot`, on the writer's thread if asynchronous. Raises the error of an earlier save.

        Args:
            snapshot: State to write; its arrays must be copies, because training changes the originals meanwhile.
            top1: Fraction, 0 to 1, by which `Retention` ranks the checkpoint; None if unknown.
        """
        self.wait()
        if self._asynchronous:
            self._pending = self._writer.submit(self._write, snapshot, top1)
        else:
            self._write(snapshot, top1)

    def wait(self) -> None:
        """Wait for the save in flight; raise its error once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the save in flight; safe to call twice."""
        self.wait()

    def restore(self, resume: str) -> Snapshot | None:
        """Return the verified state to resume from, None for a new run. Writes nothing, so every rank may call it.

        Args:
            resume: `auto`: the newest complete checkpoint of this run. `never`: none; the run must have no checkpoint.
                Otherwise the path of a checkpoint, of a directory of them or of a run, to start from until this run
                has its own.

        Raises:
            InputError: The checkpoint belongs to another run, `never` found one, or the directory has none.
        """
        started = time.perf_counter()
        snapshot = self._find_snapshot(resume)
        if snapshot is not None:
            self._listener(Restored(snapshot.step, time.perf_counter() - started))
        return snapshot

    def _find_snapshot(self, resume: str) -> Snapshot | None:
        if resume == "never":
            if self.entries():
                raise InputError(
                    f"{self.directory} already has checkpoints",
                    field="checkpoint.resume",
                    got="never",
                    hint="Choose another run.id, remove them, or set checkpoint.resume=auto.",
                )
            return None
        if resume == "auto":
            return self._read_newest(self.directory)
        start = Path(resume)
        if start.resolve().parent == self.directory.resolve():
            return self._restore_named(start)
        return self._read_newest(self.directory) or self._read_foreign(start)

    def entries(self) -> list[CheckpointEntry]:
        """Return the complete checkpoints, newest first."""
        return [entry for entry in complete_entries(self.directory) if entry.step not in self._damaged]

    def _write(self, snapshot: Snapshot, top1: float | None) -> None:
        started = time.perf_counter()
        try:
            if snapshot.step in self._verified:
                manifest = self._update_score(snapshot, top1)
            else:
                manifest = write_checkpoint(self.directory, snapshot, self._identity, top1, self._fence)
        except PodscaleError as error:
            cause = error.__cause__
            full = isinstance(cause, OSError) and cause.errno in DISK_FULL_ERRNOS
            self._listener(Failed(snapshot.step, str(error), full))
            raise
        self._verified.add(snapshot.step)
        self._damaged.discard(snapshot.step)
        try:
            self._prune()
        except OSError as error:
            failure = _removal_error(self.directory, snapshot.step, error)
            self._listener(Failed(snapshot.step, str(failure)))
            raise failure from error
        seconds = time.perf_counter() - started
        self._listener(Saved(snapshot.step, manifest.bytes, seconds, manifest.top1))

    def _update_score(self, snapshot: Snapshot, top1: float | None) -> CheckpointManifest:
        """Write a new top-1 into the manifest of a checkpoint that is complete, when its step is saved again."""
        self._fence()
        entry = read_entry(step_directory(self.directory, snapshot.step))
        if top1 is None or top1 == entry.top1:
            return entry.manifest
        manifest = replace(entry.manifest, top1=top1)
        try:
            replace_manifest(entry.path, manifest)
        except OSError as error:
            raise write_error(entry.path, snapshot, error) from error
        return manifest

    def _prune(self) -> None:
        """Remove checkpoints that retention does not keep, and leftovers of killed writers."""
        self._fence()
        kept_steps = self._retention.kept_steps(self.entries())
        for step, path in steps_on_disk(self.directory).items():
            if step not in kept_steps:
                remove_checkpoint(path)

    def _read_newest(self, root: Path) -> Snapshot | None:
        """Return the newest complete checkpoint under `root`; log damaged ones and refuse one of another run."""
        for step, path in steps_on_disk(root).items():
            try:
                return self._read(path)
            except InputError:
                raise
            except ValueError as error:
                logger.warning("%s is skipped: %s", path, error)
                self._listener(Skipped(step, str(error)))
                if root == self.directory:
                    self._damaged.add(step)
        return None

    def _restore_named(self, path: Path) -> Snapshot:
        """Return a checkpoint of this run by path. Raises InputError if the run has newer ones."""
        snapshot = self._read_named(path)
        later = [entry.path.name for entry in self.entries() if entry.step > snapshot.step]
        if later:
            raise InputError(
                f"this run has later checkpoints ({', '.join(later)})",
                field="checkpoint.resume",
                got=str(path),
                hint="Remove them to go back, or start a new run (another run.id) from this one.",
            )
        return snapshot

    def _read_foreign(self, start: Path) -> Snapshot:
        """Return the state of another run: of a checkpoint, or the newest of a run or of a directory of checkpoints."""
        if STEP_DIRECTORY_PATTERN.match(start.name):
            return self._read_named(start)
        snapshot = self._read_newest(start / "checkpoints" if (start / "checkpoints").is_dir() else start)
        if snapshot is None:
            raise InputError(
                "there is no complete checkpoint in this directory", field="checkpoint.resume", got=str(start)
            )
        return snapshot

    def _read_named(self, path: Path) -> Snapshot:
        try:
            return self._read(path)
        except InputError:
            raise
        except ValueError as error:
            raise InputError(
                f"this checkpoint cannot be used: {error}", field="checkpoint.resume", got=str(path)
            ) from None

    def _read(self, path: Path) -> Snapshot:
        """Read and verify a checkpoint. Raises ValueError if it is damaged, InputError if it belongs to another run."""
        entry = read_entry(path)
        conflicts = self._identity.conflicts(entry.manifest.identity)
        if conflicts:
            raise InputError(
                "this checkpoint belongs to another run:\n" + "".join(f"  {line}\n" for line in conflicts),
                field=str(path),
                hint="Restore these values to continue it, or start a new run (another run.id).",
            )
        snapshot = read_snapshot(entry)
        if path.parent == self.directory:
            self._verified.add(snapshot.step)
        return snapshot


def _removal_error(directory: Path, step: int, error: OSError) -> PodscaleError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    problem = f"the checkpoint of step {step} is written, but those that it replaces cannot be removed: {reason}"
    hint = "Make them removable: the same command continues from the newest."
    return PodscaleError(problem, field=error.filename or str(directory), hint=hint)
