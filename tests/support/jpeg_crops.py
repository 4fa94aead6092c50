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


TILE = (509, 503)
"""Size of the picture that a large image repeats, pixels: no multiple of a block."""


def large(kind: str, height: int, width: int) -> bytes:
    """Return a JPEG of one of SAMPLINGS whose sides have thousands of pixels, without as many random numbers."""
    tile = smooth_pixels(7, *TILE, *((1,) if kind == "gray" else ()))
    repeats = (-(-height // TILE[0]), -(-width // TILE[1]), *((1,) if tile.ndim == 3 else ()))
    return encode_image(np.tile(tile, repeats)[:height, :width], **{"quality": 90, **SAMPLINGS[kind]})


def extreme_blocks(generator: np.random.Generator, height: int, width: int, attempt: int) -> bytes:
    """Return black and white noise; every third attempt has a table that multiplies every coefficient."""
    channels = () if attempt % 2 else (3,)
    pixels = (generator.integers(0, 2, (height, width, *channels)) * 255).astype(np.uint8)
    data = bytearray(encode_image(pixels, quality=100, subsampling=0))
    if attempt % 3 == 0:
        at = data.index(b"\xff\xdb") + 5
        data[at : at + 64] = bytes([1 + attempt // 3] * 64)
    return bytes(data)


LONG_CODES = {2: [0x00], 9: [0x02], 11: [0x12], 12: [0x03], 16: [0x05, 0x25, 0xF0]}
"""AC symbols by the length of their Huffman codes, bits; 0x00 ends a block."""
DC_BITS, DC_SIZE = 16, 5
"""Bits of the code of the only DC symbol, and of its value."""


def long_codes(generator: np.random.Generator, height: int, width: int) -> bytes:
    """Return a gray JPEG whose codes are much longer than those of encoders.

    Blocks have up to 168 bytes. One lookup finds code and value of some symbols (0x02), others are read in parts. In
    every fourth block all are long. In the next all but the first are short.
    """
    codes, code = {}, 0
    for length in range(1, 17):
        for symbol in LONG_CODES.get(length, ()):
            codes[symbol] = f"{code:0{length}b}"
            code += 1
        code *= 2
    bits: list[str] = []

    def write(code: str, size: int) -> None:
        bits.extend((code, *map(str, generator.integers(0, 2, size))))

    for block in range(-(-height // 8) * -(-width // 8)):
        write("0" * DC_BITS, DC_SIZE)
        position = 0
        while position < 63:
            symbol = int(generator.choice({0: [0x05], 1: [0x02]}.get(block % 4, list(codes))))
            if position + (symbol >> 4) + 1 > 63:
                symbol = 0x02
            write(codes[symbol], symbol & 15)
            if symbol == 0x00:
                break
            position += (symbol >> 4) + 1
    text = "".join(bits)
    text += "1" * (-len(text) % 8)
    scan = int(text, 2).to_bytes(len(text) // 8, "big").replace(b"\xff", b"\xff\x00")
    counts = bytes(len(LONG_CODES.get(length, ())) for length in range(1, 17))
    table = counts + bytes(symbol for symbols in LONG_CODES.values() for symbol in symbols)
    dc_table = bytes(length == DC_BITS for length in range(1, 17)) + bytes([DC_SIZE])

    def segment(marker: int, content: bytes) -> bytes:
        return bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2, "big") + content

    frame = b"\x08" + height.to_bytes(2, "big") + width.to_bytes(2, "big") + b"\x01\x01\x11\x00"
    return b"".join(
        (
            b"\xff\xd8",
            segment(0xDB, b"\x00" + bytes([1] * 64)),
            segment(0xC0, frame),
            segment(0xC4, b"\x00" + dc_table),
            segment(0xC4, b"\x10" + table),
            segment(0xDA, b"\x01\x01\x00\x00\x3f\x00"),
            scan,
            b"\xff\xd9",
        )
    )


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
