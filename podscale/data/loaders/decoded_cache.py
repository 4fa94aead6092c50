"""Memory cache of decoded images, for the loaders that decode on the CPU.

A store holds the images, those of one process, or those of all processes of a node in shared memory. Nothing is
evicted: every sample is used once in an epoch, so evicting saves no decoding.
"""

import hashlib
import logging
import threading
from typing import Protocol

import numpy as np

from podscale.data import native
from podscale.data.decode import Pixels
from podscale.data.native import Coefficients
from podscale.data.shard_set import Split
from podscale.util import env
from podscale.util.formatting import format_bytes
from podscale.util.shared_memory import map_shared

log = logging.getLogger("podscale.data")

CachedImage = Pixels | Coefficients
"""Image that is kept: its pixels, uint8 [height, width, 3], or its coefficients."""


class ImageStore(Protocol):
    """Images by row of a split."""

    @property
    def limit_bytes(self) -> int:
        """Bytes of all images that fit, of all processes that share the store."""
        ...

    @property
    def free_bytes(self) -> int: ...

    @property
    def cached_bytes(self) -> int:
        """Bytes of the images; of shared ones this process's part, so that the processes' sum is right."""
        ...

    def find(self, row: int) -> CachedImage | None: ...

    def keep(self, row: int, image: CachedImage) -> bool:
        """Keep a copy of an image, unless there is one; return False if it does not fit."""
        ...


class OwnImages:
    """Images of this process."""

    def __init__(self, limit_bytes: int = 0) -> None:
        self.limit_bytes, self.cached_bytes = limit_bytes, 0
        self._kept: dict[int, CachedImage] = {}
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - self.cached_bytes

    def find(self, row: int) -> CachedImage | None:
        return self._kept.get(row)

    def keep(self, row: int, image: CachedImage) -> bool:
        with self._lock:
            if row in self._kept:  # decoded by another thread too, as the substitute of a bad record
                return True
            if image.nbytes > self.free_bytes:
                return False
            self.cached_bytes += image.nbytes
            self._kept[row] = image.copy() if isinstance(image, np.ndarray) else image
        return True


class SharedImages:
    """Images of all processes of a node, in shared memory; native/src/shared.rs has its layout.

    Args:
        path: shared memory of these processes (`podscale.util.shared_memory`); its size is their limit.
        split: split of the images, the same for all processes.
        own_bytes: this process's part of the limit.

    Raises:
        OSError: the memory cannot be mapped.
        ValueError: it is too small, or has the images of another split.
    """

    def __init__(self, path: str, split: Split, own_bytes: int) -> None:
        memory = np.frombuffer(map_shared(path), dtype=np.uint8)
        self._heights, self._widths = split.column("height"), split.column("width")
        self._table = native.open_shared_images(memory, len(split), _identity(split))
        self._part = own_bytes / len(memory)
        self._memory = memory.view()
        self._memory.flags.writeable = False
        self.limit_bytes: int = self._table.limit

    @property
    def free_bytes(self) -> int:
        free: int = self._table.free
        return free

    @property
    def cached_bytes(self) -> int:
        return int(self._table.used * self._part)

    def find(self, row: int) -> CachedImage | None:
        found = self._table.find(row)
        if found is None:
            return None
        begin, length, is_packed = found
        image = self._memory[begin : begin + length]
        if is_packed:
            return Coefficients(image)
        return image.reshape(int(self._heights[row]), int(self._widths[row]), 3)

    def keep(self, row: int, image: CachedImage) -> bool:
        packed = image.packed if isinstance(image, Coefficients) else None
        fits: bool = self._table.keep(row, int(packed is not None), image if packed is None else packed)
        return fits


def open_image_store(split: Split, limit_bytes: int) -> ImageStore:
    """Return the store of a training loader: the node's shared memory, else one of up to `limit_bytes`."""
    if not limit_bytes:
        return OwnImages()
    path = env.read_path(env.DECODED_CACHE)
    if path is None:
        if (env.read_number(env.LOCAL_WORLD_SIZE) or 1) > 1:
            log.warning("each process has its own decoded cache, because the supervisor has no memory to share")
        return OwnImages(limit_bytes)
    if not native.can_share_images():
        log.warning("each process has its own decoded cache, because the native extension cannot share it")
        return OwnImages(limit_bytes)
    try:
        images = SharedImages(str(path), split, limit_bytes)
    except (OSError, ValueError) as error:
        log.warning("each process has its own decoded cache, because the node's cannot be opened: %s", error)
        return OwnImages(limit_bytes)
    log.info("the processes of the node share a decoded cache of %s", format_bytes(images.limit_bytes))
    return images


def _identity(split: Split) -> int:
    """Return a number of the split's images, not 0."""
    digest = hashlib.sha256(split.name.encode())
    for name in ("key", "size", "height", "width"):
        digest.update(np.ascontiguousarray(split.column(name)).data)
    return int.from_bytes(digest.digest()[:8], "little") | 1
