"""Loader `native`: crops decoded by the extension, with the pixels of the loader `reference`.

The extension decodes a batch in one call, in its own threads, from the entries of the shards' decode indexes if there
are any. What it refuses, the threads of the reference loader decode, with the same substitutes for bad records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from PIL import Image

from podscale.data.batch_plan import BatchPlan
from podscale.data.decode import Pixels
from podscale.data.loaders.base import BadRecordGuard
from podscale.data.loaders.batch_memory import AllocateImages, allocate_pageable
from podscale.data.loaders.image_store import ImageStore
from podscale.data.loaders.pillow import PendingBatch, PillowLoader
from podscale.data.native import REASONS, Coefficients, CropDecoder

_NOTHING: Pixels = np.empty(0, dtype=np.uint8)  # the extension refuses it


class NativeLoader(PillowLoader):
    """Loader whose extension decodes in `workers` threads; the arguments are those of PillowLoader.

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
        to_read = [slot for slot in missing if self._packs or not self._images.has_room(int(rows[slot]))]
        files = dict(zip(to_read, self._read(rows[to_read].tolist()), strict=True))
        packed = self._pack(rows, files) if self._packs else {}
        for slot, record in {**files, **packed}.items():
            records[slot] = record
        status = self._decoder.decode(
            [_NOTHING if record is None else record for record in records],
            split.column("height")[rows],
            split.column("width")[rows],
            pending.crops,
            pending.images[:count],
            self._batch_plan.interpolation,
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
            if coefficients is None and self._images.has_room(row):
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
