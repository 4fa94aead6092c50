"""Memory cache of decoded images, for the loaders that decode in threads of the CPU."""

import threading

import numpy as np

from podscale.data.decode import BadRecord, Pixels, decode_rows
from podscale.data.native import Coefficients
from podscale.data.shard_set import Split


class DecodedCache:
    """Decode images and keep those that fit into `limit_bytes`, as pixels or as coefficients of the native extension.

    Nothing is evicted: every sample is used once in an epoch, so evicting saves no decoding. Of an image that is not
    kept, only the rows asked for are decoded, into a buffer of the calling thread.
    """

    def __init__(self, split: Split, limit_bytes: int = 0) -> None:
        self._split, self._limit_bytes = split, limit_bytes
        self._sizes = split.column("height"), split.column("width")
        self._kept: dict[int, Pixels | Coefficients] = {}
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
        if isinstance(cached, np.ndarray):
            return cached
        height, width = self._image_size(row)
        size = self._pixel_bytes(row)
        record = self._split.read(row)
        if cached is not None or not self._reserve(size):
            return decode_rows(record, height, width, height if rows is None else rows, self._buffer(size))
        try:
            pixels = decode_rows(record, height, width, height, np.empty(size, dtype=np.uint8))
        except BadRecord:
            with self._lock:
                self._cached_bytes -= size
            raise
        self._keep(row, pixels)
        return pixels

    def find(self, row: int) -> Pixels | Coefficients | None:
        """Return an image that is kept: its pixels, uint8 [height, width, 3], or its coefficients."""
        return self._kept.get(row)

    def has_room(self, row: int) -> bool:
        """Return True if the pixels of an image fit now."""
        return self._fits(self._pixel_bytes(row))

    def coefficient_limit(self, row: int) -> int:
        """Return the bytes that the coefficients of an image may have: those of its pixels, and those that are free."""
        return min(self._pixel_bytes(row), self._limit_bytes - self._cached_bytes)

    def keep_coefficients(self, row: int, coefficients: Coefficients) -> bool:
        """Keep the coefficients of an image; return False if they do not fit."""
        if not self._reserve(coefficients.nbytes):
            return False
        self._keep(row, coefficients)
        return True

    def _image_size(self, row: int) -> tuple[int, int]:
        height, width = (int(size[row]) for size in self._sizes)
        return height, width

    def _pixel_bytes(self, row: int) -> int:
        height, width = self._image_size(row)
        return 3 * height * width

    def _fits(self, size: int) -> bool:
        return self._cached_bytes + size <= self._limit_bytes

    def _keep(self, row: int, image: Pixels | Coefficients) -> None:
        """Keep an image whose bytes are reserved."""
        with self._lock:
            if row in self._kept:  # decoded by another thread too, as the substitute of a bad record
                self._cached_bytes -= image.nbytes
            self._kept.setdefault(row, image)

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
