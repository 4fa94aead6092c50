"""Loader `reference`: torchvision's transforms on PIL images, bit for bit, in a pool of threads.

It needs neither torchvision nor torch, which TPU hosts do not have. Threads are enough, because decoding and resizing
release the GIL, and a killed rank leaves no worker process behind.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from podscale.data.augment import RandomDraws
from podscale.data.batch_plan import BatchPlan, BatchRequest
from podscale.data.crop import CropParams, CropParamsBatch
from podscale.data.decode import BadRecord, Pixels, crop_and_resize, decode_rows
from podscale.data.loaders.base import BadRecordGuard, Batch
from podscale.data.loaders.batch_memory import AllocateImages, allocate_pageable
from podscale.data.shard_set import Split


class DecodedCache:
    """Decode images and keep those that fit into `limit_bytes`.

    Nothing is evicted: every sample is used once in an epoch, so evicting saves no decoding. Of an image that is not
    kept, only the rows asked for are decoded, into a buffer of the calling thread.
    """

    def __init__(self, split: Split, limit_bytes: int = 0) -> None:
        self._split, self._limit_bytes = split, limit_bytes
        self._sizes = split.column("height"), split.column("width")
        self._kept: dict[int, Pixels] = {}
        self._cached_bytes = 0
        self._lock = threading.Lock()
        self._thread_local = threading.local()

    @property
    def cached_bytes(self) -> int:
        return self._cached_bytes

    def __call__(self, row: int, rows: int | None = None) -> Pixels:
        """Return at least the first `rows` rows (default: all) of an image, uint8 [n, width, 3].

        The pixels are read-only and valid until the thread's next call. Raises BadRecord if the image cannot be decoded
        or its size is not that of the index.
        """
        cached = self._kept.get(row)
        if cached is not None:
            return cached
        height, width = self._image_size(row)
        size = 3 * height * width
        record = self._split.read(row)
        if not self._reserve(size):
            return decode_rows(record, height, width, height if rows is None else rows, self._buffer(size))
        try:
            return self._keep(row, decode_rows(record, height, width, height, np.empty(size, dtype=np.uint8)))
        except BadRecord:
            with self._lock:
                self._cached_bytes -= size
            raise

    def find(self, row: int) -> Pixels | None:
        """Return the pixels of an image that is kept, uint8 [height, width, 3]."""
        return self._kept.get(row)

    def has_room(self, row: int) -> bool:
        """Return True if the pixels of an image fit now."""
        height, width = self._image_size(row)
        return self._fits(3 * height * width)

    def _image_size(self, row: int) -> tuple[int, int]:
        height, width = (int(size[row]) for size in self._sizes)
        return height, width

    def _fits(self, size: int) -> bool:
        return self._cached_bytes + size <= self._limit_bytes

    def _keep(self, row: int, pixels: Pixels) -> Pixels:
        with self._lock:
            if row in self._kept:  # decoded by another thread too, as the substitute of a bad record
                self._cached_bytes -= pixels.size
            return self._kept.setdefault(row, pixels)

    def _reserve(self, size: int) -> bool:
        """Reserve the bytes of an image; return False if they do not fit."""
        if not self._fits(size):
            return False
        with self._lock:
            if not self._fits(size):
                return False
            self._cached_bytes += size
            return True

    def _buffer(self, size: int) -> Pixels:
        """Return the thread's buffer; allocating new pages for every image takes longer."""
        buffer: Pixels | None = getattr(self._thread_local, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._thread_local.buffer = np.empty(size, dtype=np.uint8)
        return buffer


_CHUNK = 4  # images per task


class PendingBatch:
    """Batch that is being filled; `images` is uint8 [n, size, size, 3], uninitialised."""

    def __init__(self, request: BatchRequest, crops: CropParamsBatch, images: Pixels) -> None:
        self.request, self.crops, self.images = request, crops, images
        self.size = images.shape[1]
        self.images[request.sample_count :] = 0
        self.rows: npt.NDArray[np.int64] = request.rows.copy()
        self.tasks: list[Future[None]] = []


class PillowLoader:
    """Loader with `workers` threads, `prefetch` batches ahead; keeps up to `decoded_bytes` of decoded images.

    `allocate` gives the memory of a batch. The thread that iterates over the batches calls it.
    """

    def __init__(
        self,
        batch_plan: BatchPlan,
        guard: BadRecordGuard,
        *,
        workers: int,
        prefetch: int,
        decoded_bytes: int = 0,
        allocate: AllocateImages = allocate_pageable,
    ) -> None:
        self._batch_plan, self._guard, self._prefetch, self._allocate = batch_plan, guard, prefetch, allocate
        self._images = DecodedCache(batch_plan.split, decoded_bytes)
        self._augment = batch_plan.augment
        self._window: deque[PendingBatch] = deque()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="podscale-decode")

    @property
    def bad_records(self) -> int:
        return self._guard.bad_records

    @property
    def queued_batches(self) -> int:
        return sum(all(task.done() for task in pending.tasks) for pending in tuple(self._window))

    @property
    def native_refusals(self) -> Mapping[str, int]:
        return {}

    @property
    def cached_bytes(self) -> Mapping[str, int]:
        return {"records": self._batch_plan.split.cached_bytes, "decoded": self._images.cached_bytes}

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        window = self._window = deque[PendingBatch]()
        try:
            for step in range(start, stop):
                while len(window) <= self._prefetch and step + len(window) < stop:
                    window.append(self._submit_batch(step + len(window)))
                yield self._collect_batch(window.popleft())
        finally:
            for pending in window:
                for task in pending.tasks:
                    task.cancel()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit_batch(self, step: int) -> PendingBatch:
        request = self._batch_plan.request_at(step)
        views = self._batch_plan.crops_of(step, request.rows, request.epochs)
        size = self._batch_plan.image_size_at(step)
        pending = PendingBatch(request, views, self._allocate((len(request.rows), size, size, 3)))
        self._start(pending)
        return pending

    def _start(self, pending: PendingBatch) -> None:
        """Submit the tasks that fill a batch."""
        self._submit(self._fill, pending, range(pending.request.sample_count))

    def _submit(
        self, task: Callable[[PendingBatch, Sequence[int]], None], pending: PendingBatch, slots: Sequence[int]
    ) -> None:
        """Submit a task for these slots of a batch, a few at a time."""
        for begin in range(0, len(slots), _CHUNK):
            pending.tasks.append(self._pool.submit(task, pending, slots[begin : begin + _CHUNK]))

    def _collect_batch(self, pending: PendingBatch) -> Batch:
        for task in pending.tasks:
            task.result()
        return self._batch_plan.make_batch(replace(pending.request, rows=pending.rows), pending.images)

    def _fill(self, pending: PendingBatch, slots: Sequence[int]) -> None:
        for slot in slots:
            pixels, view = self._decode_or_substitute(pending, slot)
            image = crop_and_resize(pixels, view, pending.size, self._batch_plan.interpolation)
            done = np.asarray(image) if self._augment is None else self._augment(image, self._draws(pending, slot))
            pending.images[slot] = done

    def _draws(self, pending: PendingBatch, slot: int) -> RandomDraws:
        assert self._augment is not None
        one = slice(slot, slot + 1)
        keys = self._batch_plan.split.keys[pending.rows[one]].astype(np.uint64)
        drawn: RandomDraws = self._augment.draws(pending.request.epochs[one], keys)[0]
        return drawn

    def _decode_or_substitute(self, pending: PendingBatch, slot: int) -> tuple[Pixels, CropParams]:
        """Return the pixels and the crop of a slot's sample, or of its substitute."""
        row, epoch, view = int(pending.rows[slot]), int(pending.request.epochs[slot]), pending.crops[slot]
        while True:
            usable = self._guard.substitute(row, epoch)
            if usable != row:
                row = pending.rows[slot] = usable
                one = slice(slot, slot + 1)
                view = self._batch_plan.crops_of(pending.request.step, pending.rows[one], pending.request.epochs[one])[
                    0
                ]
            try:
                return self._images(row, view.top + view.height), view
            except BadRecord as error:
                self._guard.mark_bad(row, epoch, str(error))
