"""Chunks of prepared images, in order: threads read, decode and crop the next chunks while the model has one."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from podscale.data.decode import Pixels
from podscale.data.sharding.validate_image import InvalidImage
from podscale.errors import InputError
from podscale.prediction.image_inputs import UNREADABLE, EncodedImage, Failure, ImageInput, ImageItem, TooLarge
from podscale.prediction.preparation import ImagePreparer

CHUNKS_AHEAD = 2
"""Chunks that are prepared while the model has one."""
_IMAGES_PER_TASK = 4


@dataclass
class DecodedChunk:
    """Items of a chunk and their pixels, uint8 [n, size, size, 3]; zeros for an item in `failures`."""

    items: Sequence[ImageItem]
    images: Pixels
    failures: dict[int, Failure] = field(default_factory=dict)

    @property
    def usable(self) -> list[int]:
        """Positions of the items that have pixels."""
        return [slot for slot in range(len(self.items)) if slot not in self.failures]


class ChunkDecoder:
    """Reader and decoder of images, with `threads` threads."""

    def __init__(self, inputs: Sequence[ImageInput], preparer: ImagePreparer, threads: int) -> None:
        self._inputs, self._preparer = inputs, preparer
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="podscale-decode")

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def decode(self, chunks: Iterator[Sequence[ImageItem]]) -> Iterator[DecodedChunk]:
        """Yield the chunks with their pixels, in order; at most CHUNKS_AHEAD + 1 are in memory."""
        window: deque[tuple[DecodedChunk, list[Future[None]]]] = deque()
        try:
            for items in chunks:
                window.append(self._submit(items))
                if len(window) > CHUNKS_AHEAD:
                    yield _collect(*window.popleft())
            while window:
                yield _collect(*window.popleft())
        finally:
            for _, tasks in window:
                for task in tasks:
                    task.cancel()

    def _submit(self, items: Sequence[ImageItem]) -> tuple[DecodedChunk, list[Future[None]]]:
        size = self._preparer.size
        chunk = DecodedChunk(items, np.zeros((len(items), size, size, 3), dtype=np.uint8))
        parts = (range(i, min(i + _IMAGES_PER_TASK, len(items))) for i in range(0, len(items), _IMAGES_PER_TASK))
        return chunk, [self._pool.submit(self._fill, chunk, part) for part in parts]

    def _fill(self, chunk: DecodedChunk, part: range) -> None:
        for slot in part:
            prepared = self.prepare(chunk.items[slot])
            if isinstance(prepared, Failure):
                chunk.failures[slot] = prepared
            else:
                chunk.images[slot] = prepared

    def prepare(self, item: ImageItem) -> Pixels | Failure:
        """Return the pixels of one image for the model, or the reason why it has none."""
        if item.failure is not None:
            return item.failure
        read = self._inputs[item.source].read
        return prepare_or_fail(self._preparer, item.name.encode(), lambda: read(item, self._preparer.max_bytes))


def prepare_or_fail(preparer: ImagePreparer, name: bytes, read: Callable[[], EncodedImage]) -> Pixels | Failure:
    """Return the pixels of the image that `read` returns, or the reason why it has none."""
    try:
        return preparer(name, read())
    except InvalidImage as error:
        return Failure(error.reason, error.detail)
    except TooLarge as error:
        return Failure("too_many_bytes", str(error))
    except (OSError, InputError) as error:
        problem = error.problem if isinstance(error, InputError) else error.strerror or str(error)
        return Failure(UNREADABLE, problem)
    except Exception as error:  # a decoder's error on bytes that nobody foresaw must not end the whole list
        return Failure("corrupt", f"{type(error).__name__}: {error}")


def _collect(chunk: DecodedChunk, tasks: Sequence[Future[None]]) -> DecodedChunk:
    for task in tasks:
        task.result()
    return chunk
