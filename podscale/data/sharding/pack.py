"""Pack shards: read the images of each planned shard once, check them, write the tar and its record.

A shard is written under a temporary name, synced and renamed; then its record is written. After a crash, the next run
keeps the shards that have records and packs the others again.
"""

import hashlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from podscale.config.data import DataSection
from podscale.data import native
from podscale.data.decode_index import decode_index_path, write_decode_index
from podscale.data.index import JPEG
from podscale.data.sharding import file_formats
from podscale.data.sharding.pack_progress import (
    BuildObserver,
    PackerCounter,
    PackProgress,
    SharedTotals,
    SplitProgressReporter,
    add_to_totals,
)
from podscale.data.sharding.shard_plan import PLAN_FILE, SPLITS, PlannedImage, ShardPlan
from podscale.data.sharding.shard_record import UNREADABLE, RecordRows, RejectedImage, ShardRecord, record_path
from podscale.data.sharding.validate_image import ImageRules, InvalidImage, prepare_image
from podscale.data.sources import Source, open_source
from podscale.data.sources.base import Where
from podscale.errors import InputError
from podscale.util import processes
from podscale.util.files import fsync_directory
from podscale.util.progress_reports import ProgressCallback, ProgressReporter
from podscale.util.spawned_processes import MainlessContext

FLUSH_BYTES = 2**20
"""Size and alignment of writes, bytes. The page cache then uses large folios; twice as much does not fit into the
processor's caches (benchmarks/results/shards.md)."""
FLUSH_PIECES = 1000
"""Maximal number of buffers in one write; writev takes at most 1,024."""
SERIAL_PACK_BYTES = 16 * 2**20
"""Bytes below which packing takes less time than starting processes."""


class PackTask(NamedTuple):
    split: str
    shard: int


PackCallback = Callable[[PackProgress], None]
"""Called for every image."""
RejectCounts = Mapping[str, int]
"""Rejected images of a shard by reason."""


@dataclass(frozen=True)
class Packer:
    """Packer of a plan's shards into one directory; picklable."""

    directory: Path
    data: DataSection
    rules: ImageRules
    hash_shards: bool = True
    """Hash every shard while writing; False only to measure the copy alone."""

    def pack(self, plan: ShardPlan, source: Source, task: PackTask, on_image: PackCallback) -> ShardRecord:
        """Write one shard and its record; raises InputError for a disk error or, with policy `fail`, a bad image."""
        path = self.directory / task.split / plan.shard_name(*task)
        with explain_write_errors(path.parent):
            temporary = self._temporary_path(path)
            try:
                with _ShardWriter(temporary, int(plan.shard_bytes(task.split)[task.shard]), self.hash_shards) as writer:
                    packed = self._write_images(writer, plan.entries(*task), source, task.shard, on_image)
                columns, rejects, indexes = packed
                record = ShardRecord(plan.fingerprint, writer.position, writer.sha256, columns, rejects)
                record_path(self.directory, plan, *task).unlink(missing_ok=True)
                decode_index_path(path).unlink(missing_ok=True)
                temporary.rename(path)
                if indexes is not None and self.data.decode_index is not None:
                    write_decode_index(path, writer.sha256, self.data.decode_index, indexes)
                fsync_directory(path.parent)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            record.write(record_path(self.directory, plan, *task))
        return record

    def _temporary_path(self, path: Path) -> Path:
        """Return a temporary name beside `path`, after removing leftovers of killed packers."""
        for leftover in path.parent.glob(f".{path.name}.*.tmp"):
            leftover.unlink(missing_ok=True)
        return path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def _write_images(
        self,
        writer: "_ShardWriter",
        entries: Iterator[PlannedImage],
        source: Source,
        shard: int,
        on_image: PackCallback,
    ) -> tuple[dict[str, Any], list[RejectedImage], list[bytes] | None]:
        """Write the images; return their columns, the rejects and the decode indexes, None without the extension."""
        rows, rejects = RecordRows(), []
        interval = self.data.decode_index if native.is_installed() else None
        indexes: list[bytes] | None = None if interval is None else []
        for entry in entries:
            original = b""
            try:
                original = self._read(source, entry)
                content, image = prepare_image(entry.item.name, original, self.rules)
            except InvalidImage as problem:
                if self.data.policy == "fail":
                    raise (
                        Where(self.data.source)
                        .below(entry.item.name)
                        .refusal(str(problem), "Repair or remove it, or set data.policy to quarantine.")
                    ) from None
                rejects.append(RejectedImage(entry.key, problem.reason, problem.detail))
                on_image(PackProgress(1, 0, 1, len(original)))
                continue
            digest = xxhash.xxh3_128_intdigest(original)
            offset = writer.write_sample(entry.key, b"jpg" if image.format == JPEG else b"png", content, entry.label)
            rows.add(
                *(entry.key, offset, len(content), shard, entry.label),
                *(image.height, image.width, image.format, image.flags),
                *(digest >> 64, digest & (2**64 - 1)),
            )
            if indexes is not None and interval is not None:
                is_jpeg = image.format == JPEG
                indexes.append(native.build_decode_index(content, interval) if is_jpeg else b"")
            on_image(PackProgress(1, len(content), 0, len(original)))
        return rows.columns(), rejects, indexes

    def _read(self, source: Source, entry: PlannedImage) -> bytes:
        """Return the bytes of an image; raises InvalidImage, or InputError if its size is not the planned one."""
        if entry.item.size > self.rules.max_bytes:
            raise InvalidImage(
                "too_many_bytes", f"{entry.item.size} bytes, at most {self.rules.max_bytes} (data.max_bytes)"
            )
        try:
            content = source.read(entry.item)
        except OSError as error:
            raise InvalidImage(UNREADABLE, error.strerror or str(error)) from error
        if len(content) != entry.item.size:
            where = Where(self.data.source).below(entry.item.name)
            raise where.refusal(
                f"changed during packing, from {entry.item.size} bytes to {len(content)}",
                "Run again when no process writes to the source.",
            )
        return content


class _ShardWriter:
    """Writer of a shard that gathers buffers and writes FLUSH_BYTES at a time, without copies."""

    def __init__(self, path: Path, size: int, hashing: bool) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(self._descriptor, 0, size)  # contiguous, and fails now if the disk is full
        except OSError:
            os.close(self._descriptor)
            raise
        self._digest = hashlib.sha256() if hashing else None
        self._pieces: list[bytes | memoryview] = []
        self._pending = 0
        self.position = 0

    def write_sample(self, key: int, ending: bytes, content: bytes, label: int) -> int:
        """Append image and label of one sample; return the offset of the image in bytes."""
        name = b"%08d." % key
        size = len(content)
        offset = self.position + file_formats.TAR_BLOCK_BYTES
        text = b"%d" % label
        after = (
            bytes(file_formats.tar_padding(size))
            + file_formats.tar_header(name + b"cls", len(text))
            + text.ljust(file_formats.TAR_BLOCK_BYTES, b"\0")
        )
        self._append(
            (file_formats.tar_header(name + ending, size), content, after), file_formats.tar_sample_bytes(size)
        )
        return offset

    def _append(self, pieces: Sequence[bytes], size: int) -> None:
        self._pieces.extend(pieces)
        self.position += size
        self._pending += size
        if self._pending >= FLUSH_BYTES:
            self._flush_aligned()
        elif len(self._pieces) >= FLUSH_PIECES - 3:
            self._flush()

    def _flush_aligned(self) -> None:
        """Write up to the last multiple of FLUSH_BYTES; keep the rest."""
        surplus = self.position % FLUSH_BYTES
        surplus_pieces: list[bytes | memoryview] = []
        while surplus:
            piece = self._pieces.pop()
            cut = max(0, len(piece) - surplus)
            surplus_pieces.insert(0, memoryview(piece)[cut:] if cut else piece)
            if cut:
                self._pieces.append(memoryview(piece)[:cut])
            surplus -= len(piece) - cut
        self._pending -= sum(map(len, surplus_pieces))
        self._flush()
        self._pieces, self._pending = surplus_pieces, sum(map(len, surplus_pieces))

    def _flush(self) -> None:
        if self._digest is not None:
            for piece in self._pieces:
                self._digest.update(piece)
        written = os.writev(self._descriptor, self._pieces)
        if written < self._pending:  # a signal or a full disk; write the rest, or raise the disk's error
            rest = memoryview(b"".join(self._pieces))[written:]
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        self._pieces.clear()
        self._pending = 0

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest() if self._digest is not None else ""

    def __enter__(self) -> "_ShardWriter":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if kind is None:
                self._append((file_formats.TAR_END,), len(file_formats.TAR_END))
                self._flush()
                os.ftruncate(self._descriptor, self.position)  # rejects and conversions leave it shorter
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


@contextmanager
def explain_write_errors(directory: Path) -> Iterator[None]:
    """Raise InputError with a hint if the shard set cannot be written."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write the shard set: {error.strerror or error}",
            field=str(directory),
            hint="Set run.workspace to a writable directory with enough space and run again: finished shards are kept.",
        ) from error


class TooManyRejects(Exception):
    """More unusable images than allowed in the shards packed so far."""


def pack_shards(
    packer: Packer,
    plan: ShardPlan,
    tasks: Sequence[PackTask],
    workers: int,
    report: ProgressCallback,
    limit: int,
    observer: BuildObserver,
) -> None:
    """Pack `tasks` in `workers` processes, or in this one if they are small.

    Raises InputError for a disk error, TooManyRejects once the finished shards have more than `limit` rejects.
    """
    total = sum(plan.image_count(*task) for task in tasks)
    size = sum(int(plan.shard_bytes(split)[shard]) for split, shard in tasks)
    ticker = SplitProgressReporter(ProgressReporter("pack", report, total), observer)
    workers = min(workers, len(tasks))
    rejects = 0
    pack = _pack_serially if workers <= 1 or size < SERIAL_PACK_BYTES else _pack_in_pool
    for split, rejected in pack(packer, plan, tasks, workers, ticker):
        observer.shard_finished(split, rejected)
        rejects += sum(rejected.values())
        if rejects > limit:
            raise TooManyRejects
    ticker.close()


def _pack_serially(
    packer: Packer, plan: ShardPlan, tasks: Sequence[PackTask], workers: int, ticker: SplitProgressReporter
) -> Iterator[tuple[str, RejectCounts]]:
    source = open_source(packer.data)
    for task in tasks:
        counter = PackerCounter(partial(ticker.add, task.split))
        record = packer.pack(plan, source, task, counter)
        counter.flush()
        yield task.split, _reject_counts(record)


def _pack_in_pool(
    packer: Packer, plan: ShardPlan, tasks: Sequence[PackTask], workers: int, ticker: SplitProgressReporter
) -> Iterator[tuple[str, RejectCounts]]:
    context = MainlessContext()  # a fork would share the threads and locks of the caller
    counters = {split: [context.Value("Q", 0) for _ in PackProgress._fields] for split in SPLITS}
    pool = ProcessPoolExecutor(workers, context, _start_worker, (packer, counters, os.getpid()))
    try:
        waiting: set[Future[tuple[str, RejectCounts]]] = {pool.submit(_pack_task, task) for task in tasks}
        while waiting:
            done, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
            for split, totals in counters.items():
                ticker.set(split, PackProgress(*(int(counter.value) for counter in totals)))
            yield from (future.result() for future in done)
    except BrokenProcessPool as error:
        raise InputError(
            "a packing process was killed, possibly because memory ran out",
            field="launch.shard_workers",
            got=workers,
            hint="Run again with fewer workers: finished shards are kept.",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _PackWorker(NamedTuple):
    packer: Packer
    plan: ShardPlan
    source: Source
    totals: SharedTotals


_worker_state: list[_PackWorker] = []  # of this process; tasks of a pool can keep state only in a global


def _start_worker(packer: Packer, totals: SharedTotals, parent: int) -> None:
    """Prepare a packing process, which exits when its parent does."""
    processes.exit_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    plan = ShardPlan.read(packer.directory / PLAN_FILE)
    _worker_state.append(_PackWorker(packer, plan, open_source(packer.data), totals))


def _pack_task(task: PackTask) -> tuple[str, RejectCounts]:
    worker = _worker_state[0]
    counter = PackerCounter(partial(add_to_totals, worker.totals[task.split]))
    record = worker.packer.pack(worker.plan, worker.source, task, counter)
    counter.flush()
    return task.split, _reject_counts(record)


def _reject_counts(record: ShardRecord) -> RejectCounts:
    return Counter(reject.reason for reject in record.rejects)
