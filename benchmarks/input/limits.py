"""Parts of a crop by themselves, whose cost limits any loader that has them."""

import io
from collections.abc import Callable

import numpy as np
from PIL import Image

from benchmarks.input.pipelines import draw_crops
from benchmarks.measure import cpu_seconds, rate
from podscale.data.crop import CropParams, CropParamsBatch
from podscale.data.decode import Pixels, decode
from podscale.data.native import Coefficients, CropDecoder, build_decode_index
from podscale.data.shard_set import Split

ROUNDS = 3
COPIED = 2**28
"""Bytes of the copy that measures memory."""
INTERVAL = 16
"""MCUs between two entries of a decode index: all codes are read, and writing the entries costs little."""


def limits(split: Split, images: int, size: int) -> list[str]:
    """Return a table of the parts of crops of the first `images` images, one thread."""
    rows = np.arange(min(images, len(split)))
    decoder = CropDecoder(1)
    files = [split.read(row) for row in rows.tolist()]
    widths, heights, crops = draw_crops(split, rows, size)
    packed = [(slot, one) for slot, one in enumerate(decoder.pack(files, [2**40] * len(files))) if one is not None]
    decoded = [decode(file) for file in files]
    gray = [one for one in decoder.pack([to_gray(image) for image in decoded], [2**40] * len(files)) if one is not None]
    assert len(gray) == len(files), "the extension packs gray JPEGs"
    output = np.empty((len(files), size, size, 3), dtype=np.uint8)
    source, target = (np.ones(COPIED, dtype=np.uint8) for _ in range(2))

    def huffman() -> None:
        for file in files:
            build_decode_index(file, INTERVAL, max_percent=100)

    def transform() -> int:
        return sum(restore(decoder, one, int(heights[slot]), int(widths[slot])) for slot, one in packed)

    def transform_gray() -> int:
        return sum(restore(decoder, one, int(heights[slot]), int(widths[slot])) for slot, one in enumerate(gray))

    def resize() -> None:
        decoder.decode(decoded, heights, widths, crops, output, "bilinear")

    file_bytes = sum(file.nbytes for file in files)
    cropped = int((crops.width.astype(np.int64) * crops.height).sum())
    coded, transformed, resized = (least_seconds(work) for work in (huffman, transform, resize))
    one_component = least_seconds(transform_gray)
    copied = least_seconds(lambda: np.copyto(target, source))
    return [
        "| part of the work, alone | images per CPU-second | rate |",
        "|---|---:|---:|",
        f"| Huffman codes of whole files | {rate(len(files), coded):.0f} | "
        f"{rate(file_bytes, coded) / 1e6:.0f} MB/s of files |",
        f"| inverse DCT, upsampling and colour of the middle square, from coefficients | "
        f"{rate(len(packed), transformed):.0f} | {rate(transform(), transformed) / 1e6:.0f} megapixels/s |",
        f"| inverse DCT of one component, of the middle square of gray copies, from coefficients | "
        f"{rate(len(gray), one_component):.0f} | {rate(transform_gray(), one_component) / 1e6:.0f} megapixels/s |",
        f"| resizing of crops, from pixels | {rate(len(files), resized):.0f} | "
        f"{rate(cropped, resized) / 1e6:.0f} megapixels/s |",
        f"| copying memory | | {rate(COPIED, copied) / 1e9:.1f} GB/s |",
    ]


def to_gray(pixels: Pixels) -> Pixels:
    """Return a gray JPEG of an image, whose decoding has no upsampling and no colours besides the inverse DCT."""
    file = io.BytesIO()
    Image.fromarray(pixels).convert("L").save(file, "JPEG", quality=90)
    return np.frombuffer(file.getvalue(), dtype=np.uint8)


def restore(decoder: CropDecoder, packed: Coefficients, height: int, width: int) -> int:
    """Decode the middle square of an image, which is not resized. Returns its pixels."""
    side = min(height, width)
    output = np.empty((1, side, side, 3), dtype=np.uint8)
    crop = CropParams((width - side) // 2, (height - side) // 2, side, side, side, side, 0, 0, False)
    batch = CropParamsBatch(*(np.array([value]) for value in crop))
    status = decoder.decode([packed], np.array([height]), np.array([width]), batch, output, "bilinear")
    assert not status.any(), "these coefficients were packed by this decoder"
    return side * side


def least_seconds(work: Callable[[], object]) -> float:
    """Return the least CPU time of some rounds, seconds."""
    times = []
    for _ in range(ROUNDS):
        start = cpu_seconds()
        work()
        times.append(cpu_seconds() - start)
    return min(times)
