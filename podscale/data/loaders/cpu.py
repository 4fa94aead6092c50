"""Loaders that decode on the CPU, in threads: `reference`, and `native` by the extension, with the same pixels.

`reference` applies torchvision's transforms to PIL images, bit for bit, without torchvision and torch, which TPU hosts
do not have. Threads are enough, because decoding and resizing release the GIL, and a killed rank leaves no worker
process behind.

Batches that go to a GPU are in pinned memory, so that the copy needs no other one. It comes from torch's cache, which
reuses memory that is free and whose copies are over, so a training soon allocates none.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from PIL import Image

from podscale.config.data import Interpolation
from podscale.data.augment import RandomDraws
from podscale.data.batch_plan import BatchPlan, BatchRequest
from podscale.data.crop import CropParams, CropParamsBatch
from podscale.data.decode import BadRecord, Pixels, crop_and_resize, decode_rows
from podscale.data.loaders.base import BadRecordGuard, Batch
from podscale.data.loaders.decoded_cache import CachedImage, ImageStore, OwnImages
from podscale.data.native import NO_RECORD, REASONS, Coefficients, CropDecoder
from podscale.data.shard_set import Split

log = logging.getLogger("podscale.data")

_CHUNK = 4  # images per task


AllocateImages = Callable[[tuple[int, ...]], Pixels]
"""Allocator of a batch's images: returns an uninitialised uint8 array of the given shape."""


def image_allocator(device: str) -> AllocateImages:
    """Return the allocator for images that go to this device (torch's name)."""
    return PinnedAllocator() if device.startswith("cuda") else allocate_pageable


def allocate_pageable(shape: tuple[int, ...]) -> Pixels:
    return np.empty(shape, dtype=np.uint8)


class PinnedAllocator:
    """Allocator of pinned memory, and of ordinary memory after pinning failed (no CUDA, or a limit of the machine).

    Call it in the thread that launches the training's kernels: CUDA refuses it while another one records a graph.
    """

    def __init__(self) -> None:
        self._can_pin = True

    def __call__(self, shape: tuple[int, ...], /) -> Pixels:
        import torch  # only if the engine is PyTorch

        if self._can_pin:
            try:
                # The array holds the tensor. torch finds the memory by its address, also from another tensor on it.
                return torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()
            except RuntimeError as error:
                self._can_pin = False
                log.warning("batches are in memory that is not pinned, which costs a copy each: %s", error)
        return allocate_pageable(shape)


class PendingBatch:
    """Batch that is being filled; `images` is uint8 [n, size, size, 3], uninitialised."""

    def __init__(self, request: BatchRequest, crops: CropParamsBatch, images: Pixels) -> None:
        self.request, self.crops, self.images = request, crops, images
        self.size = images.shape[1]
        self.images[request.sample_count :] = 0
        self.rows: npt.NDArray[np.int64] = request.rows.copy()
        self.tasks: list[Future[None]] = []


class CachingDecoder:
    """Decoder that keeps the images that fit into a store, as pixels or as coefficients of the native extension.

    Of an image that is not kept, only the rows asked for are decoded, into a buffer of the calling thread.
    """

    def __init__(self, split: Split, images: ImageStore | None = None) -> None:
        self._split, self._store = split, images or OwnImages()
        self._sizes = split.column("height"), split.column("width")
        self._thread_local = threading.local()

    @property
    def cached_bytes(self) -> int:
        return self._store.cached_bytes

    def __call__(self, row: int, rows: int | None = None) -> Pixels:
        """Return at least the first `rows` rows (default: all) of an image, uint8 [n, width, 3].

        The pixels are read-only and valid until the thread's next call. Raises BadRecord if the image cannot be decoded
        or its size is not that of the index.
        """
        cached = self._store.find(row)
        if isinstance(cached, np.ndarray):
            return cached
        height, width = self._image_size(row)
        keeps = cached is None and self.fits(row)
        asked = height if keeps or rows is None else rows
        pixels = decode_rows(self._split.read(row), height, width, asked, self._buffer(self._pixel_bytes(row)))
        if keeps and self._store.keep(row, pixels):
            kept = self._store.find(row)
            return kept if isinstance(kept, np.ndarray) else pixels
        return pixels

    def find(self, row: int) -> CachedImage | None:
        """Return an image that is kept: its pixels, uint8 [height, width, 3], or its coefficients."""
        return self._store.find(row)

    def fits(self, row: int) -> bool:
        """Return True if the pixels of an image fit now."""
        free = self._store.free_bytes  # 0 without a cache, so that no size is computed
        return free > 0 and self._pixel_bytes(row) <= free

    def coefficient_limit(self, row: int) -> int:
        """Return the bytes that the coefficients of an image may have: those of its pixels, and those that are free."""
        return min(self._pixel_bytes(row), self._store.free_bytes)

    def keep_coefficients(self, row: int, coefficients: Coefficients) -> bool:
        """Keep the coefficients of an image; return False if they do not fit."""
        return self._store.keep(row, coefficients)

    def _image_size(self, row: int) -> tuple[int, int]:
        height, width = (int(size[row]) for size in self._sizes)
        return height, width

    def _pixel_bytes(self, row: int) -> int:
        height, width = self._image_size(row)
        return 3 * height * width

    def _buffer(self, size: int) -> Pixels:
        """Return the thread's buffer; allocating new pages for every image takes longer."""
        buffer: Pixels | None = getattr(self._thread_local, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._thread_local.buffer = np.empty(size, dtype=np.uint8)
        return buffer


class PillowLoader:
    """Loader `reference`, with `workers` threads, `prefetch` batches ahead; keeps decoded images in `images`.

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
        self._images = CachingDecoder(batch_plan.split, images)
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
        crops = self._batch_plan.crops_of(step, request.rows, request.epochs)
        size = self._batch_plan.image_size_at(step)
        pending = PendingBatch(request, crops, self._allocate((len(request.rows), size, size, 3)))
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
            pixels, crop = self._decode_or_substitute(pending, slot)
            image = crop_and_resize(pixels, crop, pending.size, self._filter(pending, slot))
            done = np.asarray(image) if self._augment is None else self._augment(image, self._draws(pending, slot))
            pending.images[slot] = done

    def _filter(self, pending: PendingBatch, slot: int) -> Interpolation:
        one = slice(slot, slot + 1)
        [is_bicubic] = self._batch_plan.filters_of(pending.rows[one], pending.request.epochs[one])
        return "bicubic" if is_bicubic else "bilinear"

    def _draws(self, pending: PendingBatch, slot: int) -> RandomDraws:
        assert self._augment is not None
        one = slice(slot, slot + 1)
        keys = self._batch_plan.split.keys[pending.rows[one]].astype(np.uint64)
        drawn: RandomDraws = self._augment.draws(pending.request.epochs[one], keys)[0]
        return drawn

    def _decode_or_substitute(self, pending: PendingBatch, slot: int) -> tuple[Pixels, CropParams]:
        """Return the pixels and the crop of a slot's sample, or of its substitute."""
        row, epoch, crop = int(pending.rows[slot]), int(pending.request.epochs[slot]), pending.crops[slot]
        while True:
            usable = self._guard.substitute(row, epoch)
            if usable != row:
                row = pending.rows[slot] = usable
                one = slice(slot, slot + 1)
                epochs = pending.request.epochs[one]
                crop = self._batch_plan.crops_of(pending.request.step, pending.rows[one], epochs)[0]
            try:
                return self._images(row, crop.top + crop.height), crop
            except BadRecord as error:
                self._guard.mark_bad(row, epoch, str(error))


class NativeLoader(PillowLoader):
    """Loader `native`: the extension decodes a batch in one call, in `workers` threads of its own.

    It starts from the entries of the shards' decode indexes if there are any. What it refuses, the threads of the
    reference loader decode, with the same substitutes for bad records. The arguments are those of PillowLoader.

    An image that `images` keeps as pixels is decoded whole, once, by the reference path. The extension crops and
    resizes it later. With `keeps_coefficients` the extension packs the coefficients of an image once, and decodes crops
    from them. Images that it does not pack are kept as pixels. When the cache is full, pixels fill the rest of it.
    """

    def __init__(
        self,
        batch_plan: BatchPlan,
        guard: BadRecordGuard,
        *,
        workers: int,
        prefetch: int,
        images: ImageStore | None = None,
        keeps_coefficients: bool = False,
        allocate: AllocateImages = allocate_pageable,
    ) -> None:
        super().__init__(batch_plan, guard, workers=workers, prefetch=prefetch, images=images, allocate=allocate)
        self._decoder = CropDecoder(workers)
        self._packs = keeps_coefficients  # until an image does not fit
        self._batches = ThreadPoolExecutor(1, thread_name_prefix="podscale-native")
        self._refusals = Counter(dict.fromkeys(REASONS.values(), 0))

    @property
    def native_refusals(self) -> Mapping[str, int]:
        return self._refusals

    def close(self) -> None:
        self._batches.shutdown(wait=True, cancel_futures=True)
        super().close()

    def _start(self, pending: PendingBatch) -> None:
        pending.tasks.append(self._batches.submit(self._decode_batch, pending))

    def _decode_batch(self, pending: PendingBatch) -> None:
        """Decode a batch, and submit the tasks for what is left before this one ends."""
        split, count = self._batch_plan.split, pending.request.sample_count
        rows = pending.rows[:count]
        records = [self._images.find(row) for row in rows.tolist()]
        missing = [slot for slot, record in enumerate(records) if record is None]
        to_read = [slot for slot in missing if self._packs or not self._images.fits(int(rows[slot]))]
        files = dict(zip(to_read, self._read(rows[to_read].tolist()), strict=True))
        packed = self._pack(rows, files) if self._packs else {}
        for slot, record in {**files, **packed}.items():
            records[slot] = record
        status = self._decoder.decode(
            [NO_RECORD if record is None else record for record in records],
            split.column("height")[rows],
            split.column("width")[rows],
            pending.crops,
            pending.images[:count],
            self._batch_plan.filters_of(rows, pending.request.epochs[:count]),
            split.decode_indexes(rows),
        )
        refused = np.flatnonzero(status).tolist()
        self._refusals.update(REASONS[int(status[slot])] for slot in refused if records[slot] is not None)
        self._submit(self._fill, pending, refused)
        if self._augment is not None:
            self._submit(self._augment_slots, pending, np.flatnonzero(status == 0).tolist())

    def _pack(self, rows: npt.NDArray[np.int64], files: Mapping[int, Pixels]) -> dict[int, Coefficients | None]:
        """Pack the files of a batch. Returns by slot the coefficients that are now kept, and None for an image to keep
        as pixels: one that is refused, or whose coefficients have more bytes than its pixels.

        The first image that fits in neither form ends the packing, because all images are equally likely to be next.
        """
        slots = {int(rows[slot]): slot for slot in files}
        limits = [self._images.coefficient_limit(row) for row in slots]
        packed: dict[int, Coefficients | None] = {}
        found = self._decoder.pack([files[slot] for slot in slots.values()], limits)
        for (row, slot), coefficients in zip(slots.items(), found, strict=True):
            if coefficients is None and self._images.fits(row):
                packed[slot] = None
            elif coefficients is not None and self._images.keep_coefficients(row, coefficients):
                packed[slot] = coefficients
            else:
                self._packs = False
        return packed

    def _read(self, rows: Sequence[int]) -> Iterator[Pixels]:
        """Yield the records of these rows. Several threads read from a remote set, because each read may download."""
        split = self._batch_plan.split
        return self._pool.map(split.read_to_keep, rows) if split.is_remote else map(split.read_to_keep, rows)

    def _augment_slots(self, pending: PendingBatch, slots: Sequence[int]) -> None:
        assert self._augment is not None
        for slot in slots:
            pending.images[slot] = self._augment(Image.fromarray(pending.images[slot]), self._draws(pending, slot))
