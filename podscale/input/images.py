"""Decoded images of a split by row, as the threads of a loader ask for them; some are kept for the epochs to come."""

import threading

import numpy as np

from podscale.input.decode import BadRecord, Pixels, decode_rows
from podscale.shards.shardset import Split


class DecodedCache:
    """Decodes images, and keeps those that fit into `limit` bytes, whole and as they were decoded.

    What is kept stays: every sample comes once in an epoch, so to evict one for another would only cost the decoding of
    both. An image that is not kept is decoded no further down than asked, into memory that its thread uses again.
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
        """Bytes of the images that are kept."""
        return self._cached_bytes

    def __call__(self, row: int, rows: int | None = None) -> Pixels:
        """At least the first `rows` rows (default: all) of an image, uint8 [n, width, 3].

        To be read only, and only until the calling thread asks for its next image. Raises BadRecord where the bytes
        are no image, or not the one that the index describes.
        """
        kept = self._kept.get(row)
        if kept is not None:
            return kept
        height, width = (int(size[row]) for size in self._sizes)
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

    def _keep(self, row: int, pixels: Pixels) -> Pixels:
        with self._lock:
            if row in self._kept:  # another thread was as far: a record stood in for a bad one
                self._cached_bytes -= pixels.size
            return self._kept.setdefault(row, pixels)

    def _reserve(self, size: int) -> bool:
        """Books the bytes of an image that is to be kept; False where they do not fit."""
        if self._cached_bytes + size > self._limit_bytes:
            return False
        with self._lock:
            if self._cached_bytes + size > self._limit_bytes:
                return False
            self._cached_bytes += size
            return True

    def _buffer(self, size: int) -> Pixels:
        """The calling thread's own memory, which fresh pages for every image would take longer to get."""
        buffer: Pixels | None = getattr(self._thread_local, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._thread_local.buffer = np.empty(size, dtype=np.uint8)
        return buffer
