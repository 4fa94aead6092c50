"""Preparation of images for a model: the pixels that evaluation would give them, bit for bit, in chunks.

An image file is treated as `podscale shard` treats it by the `data` section of the model's run: the same limits,
checks, conversion and resizing. Then it is decoded, resized and cropped as evaluation does it.

The whole image is decoded by libraries even if the native extension is there, because the extension sees no damage
outside of a crop.

Threads read, decode and crop the next chunks while the model has one.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from podscale.config import RunConfig
from podscale.data import native
from podscale.data.crop import evaluation_crops
from podscale.data.decode import BadRecord, Pixels, crop_and_resize, decode, decode_rows, decode_sound_jpeg
from podscale.data.sharding.validate_image import ImageRules, InvalidImage, decode_strictly, prepare_image
from podscale.errors import InputError
from podscale.prediction.image_inputs import UNREADABLE, EncodedImage, Failure, ImageInput, ImageItem, TooLarge

CHUNKS_AHEAD = 2
"""Chunks that are prepared while the model has one."""
_IMAGES_PER_TASK = 4


class ImagePreparer:
    """Preparation by a run document; `convert` also converts images that shard sets of the run refuse.

    Safe from several threads; each has a buffer of its own.
    """

    def __init__(self, config: RunConfig, *, convert: bool = False) -> None:
        rules = ImageRules.from_section(config.data)
        convert = rules.convert or convert
        self._rewrites = convert or rules.resize_short is not None
        self._rules = replace(rules, convert=convert, decode=self._rewrites)
        self.size, self._fraction = config.eval_image_size, config.evaluate.crop_fraction
        self._interpolation = config.input.eval_interpolation
        self._native = native.CropDecoder(1) if native.is_available() else None
        self._thread_local = threading.local()

    @property
    def max_bytes(self) -> int:
        """Largest image file that is read."""
        return self._rules.max_bytes

    def __call__(self, name: bytes, image: EncodedImage) -> Pixels:
        """Return the pixels of an image, uint8 [size, size, 3]. Raises InvalidImage if it is unusable.

        Args:
            name: file name, because a PNG named .jpg is converted if conversion is on.
        """
        try:
            if isinstance(image.data, bytes):
                pixels = self._decode_file(name, image.data)
            else:
                pixels = self._decode_record(image.data, *image.shape)
        except BadRecord as error:
            raise InvalidImage("corrupt", str(error)) from error
        return self._crop(pixels)

    def _crop(self, pixels: Pixels) -> Pixels:
        """Return the crop of evaluation. The native extension has Pillow's pixels in less time."""
        heights, widths = (np.array([side]) for side in pixels.shape[:2])
        crops = evaluation_crops(widths, heights, size=self.size, fraction=self._fraction)
        if self._native is not None:
            square: Pixels = np.empty((self.size, self.size, 3), dtype=np.uint8)
            images = square[np.newaxis]
            refused = self._native.decode([pixels], heights, widths, crops, images, self._interpolation)
            if not refused.any():
                return square
        return np.asarray(crop_and_resize(pixels, crops[0], self.size, self._interpolation))

    def _decode_record(self, record: Pixels, height: int, width: int) -> Pixels:
        """Decode a record of a shard set, which was validated when it was packed."""
        return decode_rows(record, height, width, height, self._buffer(height, width))

    def _decode_file(self, name: bytes, data: bytes) -> Pixels:
        """Decode an image file. The strict check would decode it once more, so an undamaged JPEG is decoded without."""
        data, header = prepare_image(name, data, self._rules)
        record = np.frombuffer(data, dtype=np.uint8)
        buffer = self._buffer(header.height, header.width)
        pixels = decode_sound_jpeg(record, buffer)
        if pixels is None:
            if not self._rewrites:
                decode_strictly(data, header)
            pixels = decode(record, buffer)
        if pixels.shape[:2] != (header.height, header.width):
            raise InvalidImage("corrupt", f"{pixels.shape[1]}x{pixels.shape[0]} pixels, the header has another size")
        return pixels

    def _buffer(self, height: int, width: int) -> Pixels:
        """Return the thread's buffer for an image of this size in pixels."""
        size = 3 * height * width
        buffer: Pixels | None = getattr(self._thread_local, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._thread_local.buffer = np.empty(size, dtype=np.uint8)
        return buffer


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
    except Exception as error:  # a decoder's error on unforeseen bytes must not end the whole list
        return Failure("corrupt", f"{type(error).__name__}: {error}")


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


def _collect(chunk: DecodedChunk, tasks: Sequence[Future[None]]) -> DecodedChunk:
    for task in tasks:
        task.result()
    return chunk
