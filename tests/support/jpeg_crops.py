"""JPEGs of every kind that the native decoder takes, damaged ones, and crops of them."""

import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from podscale.data.crop import CropParams, CropParamsBatch
from podscale.data.decode import Pixels
from tests.support.shard_set import encode_image, smooth_pixels

SAMPLINGS = {
    "gray": {},
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "restart in rows": {"subsampling": 2, "restart_marker_blocks": 3},
    "restart rows": {"subsampling": 1, "restart_marker_rows": 1},
    "own tables": {"subsampling": 2, "optimize": True, "quality": 97},
    "coarse": {"subsampling": 2, "quality": 3},
}
SHAPES = [
    *((1, 1), (1, 2), (2, 1), (2, 2), (3, 3), (1, 9), (9, 1), (4, 5), (5, 4), (7, 6), (8, 8), (9, 15), (15, 9)),
    *((16, 16), (17, 18), (31, 33), (33, 31), (48, 64), (61, 50), (150, 101)),
]


def as_record(data: bytes) -> Pixels:
    return np.frombuffer(data, dtype=np.uint8)


def encoded(kind: str, height: int, width: int) -> bytes:
    """Return a noisy JPEG of one of SAMPLINGS."""
    pixels = smooth_pixels(height * width, height, width, *((1,) if kind == "gray" else ()))
    noise = np.random.default_rng(width).integers(-20, 20, pixels.shape)
    return encode_image((pixels + noise).clip(0, 255).astype(np.uint8), **{"quality": 90, **SAMPLINGS[kind]})


def extreme_blocks(generator: np.random.Generator, height: int, width: int, attempt: int) -> bytes:
    """Return black and white noise; every third attempt has a table that multiplies every coefficient."""
    channels = () if attempt % 2 else (3,)
    pixels = (generator.integers(0, 2, (height, width, *channels)) * 255).astype(np.uint8)
    data = bytearray(encode_image(pixels, quality=100, subsampling=0))
    if attempt % 3 == 0:
        at = data.index(b"\xff\xdb") + 5
        data[at : at + 64] = bytes([1 + attempt // 3] * 64)
    return bytes(data)


def damage(generator: np.random.Generator, good: Pixels, attempt: int) -> Pixels:
    """Return a file with changed bits and bytes in the header or behind it; some attempts remove or insert bytes."""
    damaged, scan = good.copy(), bytes(good).index(b"\xff\xda")
    for _ in range(int(generator.integers(1, 4))):
        where = int(generator.integers(2, scan + 14) if attempt % 3 == 0 else generator.integers(scan, len(good)))
        change = [1 << int(generator.integers(8)), 255 ^ int(damaged[where]), int(generator.integers(256))]
        damaged[where] ^= change[attempt % 4 % 3]
    if attempt % 7 == 1:
        damaged = np.delete(damaged, slice(where, where + int(generator.integers(1, 40))))
    if attempt % 7 == 2:
        damaged = np.insert(damaged, where, generator.integers(0, 256, 5).astype(np.uint8))
    return damaged


def random_crops(generator: np.random.Generator, height: int, width: int, size: int) -> list[CropParams]:
    """Return crops at every edge, of one pixel, of the whole image, cut out of it, and padded."""
    rows = [0, 0, height - 1, int(generator.integers(height)), int(generator.integers(height))]
    columns = [width - 1, 0, 0, int(generator.integers(width)), int(generator.integers(width))]
    boxes = [(left, top, 1, 1) for left, top in zip(columns, rows, strict=True)]
    boxes += [
        (left, top, int(generator.integers(1, width - left + 1)), int(generator.integers(1, height - top + 1)))
        for left, top in zip(columns[1:], rows[1:], strict=True)
    ]
    boxes.append((0, 0, width, height))
    crops = [CropParams(*box, size, size, 0, 0, bool(generator.integers(2))) for box in boxes]
    scale = size / min(height, width)
    resized = (max(size, int(width * scale)), max(size, int(height * scale)))
    window = (int(generator.integers(resized[0] - size + 1)), int(generator.integers(resized[1] - size + 1)))
    crops.append(CropParams(0, 0, width, height, *resized, *window, False))
    crops.append(CropParams(0, 0, width, height, *resized, window[0] - 3, window[1] + 4, True))
    crops.append(CropParams(0, 0, width, height, width, height, -1, -2, True))  # not resized
    crops.append(CropParams(0, 0, width, height, width, size, 0, 0, False))
    return crops


def batch_of(crops: Sequence[CropParams]) -> CropParamsBatch:
    return CropParamsBatch(*(np.array(column) for column in zip(*crops, strict=True)))


def photographs(archive: Path, every: int) -> list[bytes]:
    """Return every `every`-th JPEG of an archive."""
    with tarfile.open(archive) as tar:
        members = [member for member in tar if member.name.endswith(("jpg", "JPEG"))][::every]
        return [file.read() for member in members if (file := tar.extractfile(member)) is not None]
