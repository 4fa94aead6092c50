"""Loader `reference`: torchvision's transforms on PIL images, bit for bit, in a pool of threads.

It needs neither torchvision nor torch, which TPU hosts do not have. Threads are enough, because decoding and resizing
release the GIL, and a killed rank leaves no worker process behind.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from podscale.data.augment import RandomDraws
from podscale.data.batch_plan import BatchPlan, BatchRequest
from podscale.data.crop import CropParams, CropParamsBatch
from podscale.data.decode import BadRecord, Pixels, crop_and_resize
from podscale.data.loaders.base import BadRecordGuard, Batch
from podscale.data.loaders.batch_memory import AllocateImages, allocate_pageable
from podscale.data.loaders.decoded_cache import DecodedCache
from podscale.data.loaders.image_store import ImageStore

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
    """Loader with `workers` threads, `prefetch` batches ahead; keeps decoded images in `images`.

    `allocate` gives the memory of a batch. The thread that iterates over the batches calls it.
    """

    def __init__(
        self,
        batch_plan: BatchPlan,
        guard: BadRecordGuard,
        *,
        workers: int,
        prefetch: int,
        images: ImageStore | None = None,
        allocate: AllocateImages = allocate_pageable,
    ) -> None:
        self._batch_plan, self._guard, self._prefetch, self._allocate = batch_plan, guard, prefetch, allocate
        self._images = DecodedCache(batch_plan.split, images)
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
