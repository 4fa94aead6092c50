"""Memory cache of decoded images, for the loaders that decode in threads of the CPU."""

import threading

import numpy as np

from podscale.data.decode import Pixels, decode_rows
from podscale.data.loaders.image_store import Image, ImageStore, OwnImages
from podscale.data.native import Coefficients
from podscale.data.shard_set import Split


class DecodedCache:
    """Decode images and keep those that fit into a store, as pixels or as coefficients of the native extension.

    Nothing is evicted: every sample is used once in an epoch, so evicting saves no decoding. Of an image that is not
    kept, only the rows asked for are decoded, into a buffer of the calling thread.
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
        keeps = cached is None and self.has_room(row)
        asked = height if keeps or rows is None else rows
        pixels = decode_rows(self._split.read(row), height, width, asked, self._buffer(self._pixel_bytes(row)))
        if keeps and self._store.keep(row, pixels):
            kept = self._store.find(row)
            return kept if isinstance(kept, np.ndarray) else pixels
        return pixels

    def find(self, row: int) -> Image | None:
        """Return an image that is kept: its pixels, uint8 [height, width, 3], or its coefficients."""
        return self._store.find(row)

    def has_room(self, row: int) -> bool:
        """Return True if the pixels of an image fit now."""
        return self._pixel_bytes(row) <= self._store.free_bytes

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
