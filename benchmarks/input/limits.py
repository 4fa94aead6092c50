"""Parts of a crop by themselves, whose cost limits any loader that has them."""

import time
from collections.abc import Callable

import numpy as np

from benchmarks.input.pipelines import draw_crops
from podscale.data.crop import CropParams, CropParamsBatch
from podscale.data.decode import decode
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
    output = np.empty((len(files), size, size, 3), dtype=np.uint8)
    source, target = (np.ones(COPIED, dtype=np.uint8) for _ in range(2))

    def huffman() -> None:
        for file in files:
            build_decode_index(file, INTERVAL, max_percent=100)

    def transform() -> int:
        return sum(restore(decoder, one, int(heights[slot]), int(widths[slot])) for slot, one in packed)

    megabytes = sum(file.nbytes for file in files) / 1e6
    cropped = sum(crop.width * crop.height for crop in map(crops.__getitem__, range(len(files)))) / 1e6
    seconds = cpu_seconds(huffman)
    lines = [
        "| part of the work, alone | images per CPU-second | rate |",
        "|---|---:|---:|",
        f"| Huffman codes of whole files | {len(files) / seconds:.0f} | {megabytes / seconds:.0f} MB/s of files |",
    ]
    restored, seconds = transform() / 1e6, cpu_seconds(transform)
    lines.append(
        f"| inverse DCT, upsampling and colour of whole images, from coefficients | {len(packed) / seconds:.0f} | "
        f"{restored / seconds:.0f} megapixels/s |"
    )
    seconds = cpu_seconds(lambda: decoder.decode(decoded, heights, widths, crops, output, "bilinear"))
    lines.append(
        f"| resizing of crops, from pixels | {len(files) / seconds:.0f} | {cropped / seconds:.0f} megapixels/s |"
    )
    seconds = cpu_seconds(lambda: np.copyto(target, source))
    lines.append(f"| copying memory | | {COPIED / seconds / 1e9:.1f} GB/s |")
    return lines


def restore(decoder: CropDecoder, packed: Coefficients, height: int, width: int) -> int:
    """Decode squares of an image that are not resized, side by side in its middle. Returns their pixels."""
    side = min(height, width)
    output = np.empty((1, side, side, 3), dtype=np.uint8)
    crop = CropParams((width - side) // 2, (height - side) // 2, side, side, side, side, 0, 0, False)
    batch = CropParamsBatch(*(np.array([value]) for value in crop))
    status = decoder.decode([packed], np.array([height]), np.array([width]), batch, output, "bilinear")
    assert not status.any(), "these coefficients were packed by this decoder"
    return side * side


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the least CPU time of some rounds, seconds."""
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return max(min(times), 1e-6)
