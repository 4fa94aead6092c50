"""Validation: the header is read as Pillow reads it; damaged, too large and unusable images are refused."""

import contextlib
import io
import random
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image as Pil

from podscale.data.index import JPEG, PNG, ImageFlag
from podscale.data.sharding.validate_image import InvalidImage, check_pixels, decode_strictly, jpeg_header, read_header

CAPS = {"max_pixels": 40_000_000, "max_bytes": 2**26}


def picture(mode: str = "RGB", size: tuple[int, int] = (90, 60)) -> Pil.Image:
    noise = np.random.default_rng(7).integers(0, 256, (size[1] // 3, size[0] // 3, 3), dtype=np.uint8)
    return Pil.fromarray(noise).resize(size, Pil.Resampling.BICUBIC).convert(mode)


def encoded(form: str = "JPEG", mode: str = "RGB", size: tuple[int, int] = (90, 60), **options: Any) -> bytes:
    out = io.BytesIO()
    picture(mode, size).save(out, form, **options)
    return out.getvalue()


def exif(orientation: int, order: str = "<") -> bytes:
    mark = {"<": b"II", ">": b"MM"}[order]
    head = mark + struct.pack(order + "HI", 42, 8)
    return b"Exif\0\0" + head + struct.pack(order + "HHHIHHI", 1, 0x0112, 3, 1, orientation, 0, 0)


def reason(data: bytes, **caps: int) -> str:
    with pytest.raises(InvalidImage) as caught:
        decode_strictly(data, read_header(data, **{**CAPS, **caps}))
    return caught.value.reason


@pytest.mark.parametrize(
    ("data", "form", "flags"),
    [
        (encoded(), JPEG, ImageFlag(0)),
        (encoded(quality=95, subsampling=0), JPEG, ImageFlag(0)),
        (encoded(progressive=True), JPEG, ImageFlag.PROGRESSIVE),
        (encoded(mode="L"), JPEG, ImageFlag.GRAY),
        (encoded(mode="CMYK"), JPEG, ImageFlag.CMYK),
        (encoded(exif=exif(6)), JPEG, ImageFlag.ROTATED),
        (encoded(exif=exif(8, ">")), JPEG, ImageFlag.ROTATED),
        (encoded(exif=exif(1)), JPEG, ImageFlag(0)),
        (encoded(comment=b"x" * 60000, icc_profile=b"y" * 200_000), JPEG, ImageFlag(0)),
        (encoded("PNG"), PNG, ImageFlag(0)),
        (encoded("PNG", "L"), PNG, ImageFlag.GRAY),
        (encoded("PNG", "RGBA"), PNG, ImageFlag(0)),
        (encoded("PNG", "P"), PNG, ImageFlag(0)),
        (encoded(size=(3, 3)), JPEG, ImageFlag(0)),
    ],
)
def test_usable_images_are_described(data: bytes, form: int, flags: ImageFlag) -> None:
    image = read_header(data, **CAPS)
    decode_strictly(data, image)
    assert (image.width, image.height) == Pil.open(io.BytesIO(data)).size
    assert (image.format, image.flags) == (form, flags)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "empty"),
        (b"<html>not found</html>", "not_an_image"),
        (encoded("GIF"), "unusable_format"),
        (encoded("WEBP"), "unusable_format"),
        (encoded("BMP"), "unusable_format"),
        (encoded("TIFF"), "unusable_format"),
        (encoded()[:-2], "corrupt"),
        (encoded()[:100], "corrupt"),
        (encoded()[: len(encoded()) // 2], "corrupt"),
        (encoded("PNG")[:-1000], "corrupt"),
        (encoded("PNG")[:-12], "corrupt"),
        (encoded("PNG")[:20], "corrupt"),
        (b"\xff\xd8\xff", "corrupt"),
        (b"\xff\xd8\xff\xe0" + b"\0" * 50, "corrupt"),
    ],
)
def test_unusable_images_are_refused(data: bytes, expected: str) -> None:
    assert reason(data) == expected


def test_corruption_inside_the_entropy_data_is_detected() -> None:
    """The reduced decode finds everything that a full strict decode finds."""
    data = encoded(size=(300, 200), quality=92)
    start = data.index(b"\xff\xda") + 20
    rng = random.Random(3)
    found = 0
    for _ in range(40):
        at = rng.randrange(start, len(data) - 60)
        damaged = data[:at] + rng.randbytes(50) + data[at + 50 :]
        try:
            simplejpeg.decode_jpeg(damaged, "RGB")
            broken = False
        except ValueError:
            broken = True
        if broken:
            assert reason(damaged) == "corrupt"
        found += broken
    assert found >= 20


def test_a_flipped_byte_in_a_png_is_detected() -> None:
    data = bytearray(encoded("PNG"))
    data[len(data) // 2] ^= 0x40
    assert reason(bytes(data)) == "corrupt"


@pytest.mark.parametrize("bits", [16])
def test_sixteen_bit_png(bits: int) -> None:
    out = io.BytesIO()
    Pil.fromarray(np.arange(0, 60000, 100, dtype=np.uint16).reshape(20, 30)).save(out, "PNG")
    assert reason(out.getvalue()) == "unusable_depth"


def test_twelve_bit_and_lossless_jpeg() -> None:
    data = bytearray(encoded())
    frame = data.index(b"\xff\xc0")
    data[frame + 4] = 12
    assert reason(bytes(data)) == "unusable_depth"
    data[frame + 4], data[frame + 1] = 8, 0xC3
    assert reason(bytes(data)) == "unusable_coding"
    data[frame + 1], data[frame + 9] = 0xC0, 2
    assert reason(bytes(data)) == "unusable_components"


def bomb_png(side: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    squeezed = zlib.compressobj(9)
    rows = b"".join(squeezed.compress(bytes(side + 1)) for _ in range(side)) + squeezed.flush()
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_decompression_bombs_are_refused_by_their_header() -> None:
    assert reason(bomb_png(7000)) == "too_many_pixels"
    data = bytearray(encoded())
    struct.pack_into(">HH", data, data.index(b"\xff\xc0") + 5, 65000, 65000)
    assert reason(bytes(data)) == "too_many_pixels"


def test_caps_and_empty_sides() -> None:
    assert reason(encoded(), max_pixels=90 * 60 - 1) == "too_many_pixels"
    assert reason(encoded(), max_bytes=100) == "too_many_bytes"
    with pytest.raises(InvalidImage, match=r"70000x1.*65535"):
        check_pixels(1, 70_000, max_pixels=100_000)
    data = bytearray(encoded())
    struct.pack_into(">H", data, data.index(b"\xff\xc0") + 5, 0)
    assert reason(bytes(data)) == "corrupt"


def test_any_bytes_give_a_verdict() -> None:
    rng = random.Random(11)
    for good in (encoded(), encoded("PNG"), encoded(exif=exif(6))):
        for _ in range(300):
            data = bytearray(good[: rng.randrange(1, len(good) + 1)])
            for _ in range(rng.randrange(4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            with contextlib.suppress(InvalidImage):  # and nothing else may be raised
                decode_strictly(bytes(data), read_header(bytes(data), **CAPS))


def test_real_originals_are_all_usable(real_data: Any) -> None:
    import tarfile

    with tarfile.open(real_data / "imagenet-500.tar") as archive:
        for count, member in enumerate(archive):
            file = archive.extractfile(member)
            if file is not None:
                data = file.read()
                image = jpeg_header(data)
                decode_strictly(data, image)
                assert (image.width, image.height) == Pil.open(io.BytesIO(data)).size
            if count == 60:
                break
