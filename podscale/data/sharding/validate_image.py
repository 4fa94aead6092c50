"""Validation of images from their bytes (magic, header, limits, strict decode), and their conversion.

The header is read without a decoder, so that a decompression bomb is refused before it is decoded. JPEGs are decoded at
1/8 scale in gray, at a third of the cost. That still reads all entropy-coded data, which reveals truncation and
corruption (Pillow, DALI and torchvision accept both silently).
"""

import io
import re
import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import PIL.Image as pil  # noqa: N813 - Image is taken
from PIL import ImageOps
from simplejpeg import decode_jpeg

from podscale.config.data import DataSection
from podscale.data.index import JPEG, PNG, ImageFlag

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
OTHER_MAGICS = {
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
    b"P5": "ppm",
    b"P6": "ppm",
}
MAX_SIDE = 65535
"""Pixels; the index has 16 bits for a side, as JPEG does."""


class InvalidImage(Exception):
    """Unusable image; `reason` is a stable key, `detail` a text for users."""

    def __init__(self, reason: str, detail: str, convertible: bool = False) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail, self.is_convertible = reason, detail, convertible

    def __reduce__(self) -> tuple[type, tuple[str, str, bool]]:
        return type(self), (self.reason, self.detail, self.is_convertible)


class ImageHeader(NamedTuple):
    format: int
    height: int
    width: int
    flags: ImageFlag


def read_header(data: bytes, max_pixels: int, max_bytes: int) -> ImageHeader:
    """Read the header; raises InvalidImage if the data is empty, not an image, too large or of an unusable kind."""
    if not data:
        raise InvalidImage("empty", "the file has no bytes")
    if len(data) > max_bytes:
        raise InvalidImage("too_many_bytes", f"{len(data)} bytes, at most {max_bytes} (data.max_bytes)")
    if data.startswith(b"\xff\xd8\xff"):
        image = jpeg_header(data)
    elif data.startswith(PNG_MAGIC):
        image = png_header(data, max_pixels)
    else:
        kind = other_format(data)
        if kind:
            raise InvalidImage("unusable_format", f"loaders do not read {kind}", convertible=True)
        raise InvalidImage("not_an_image", f"begins with {data[:8]!r}")
    check_pixels(image.height, image.width, max_pixels)
    return image


def check_pixels(height: int, width: int, max_pixels: int) -> None:
    """Raise InvalidImage if an image is larger than allowed or has no pixels."""
    if max(height, width) > MAX_SIDE:
        raise InvalidImage("too_many_pixels", f"{width}x{height}, at most {MAX_SIDE} pixels a side")
    if height * width > max_pixels:
        raise InvalidImage("too_many_pixels", f"{width}x{height}, at most {max_pixels} pixels (data.max_pixels)")
    if height == 0 or width == 0:
        raise InvalidImage("corrupt", f"{width}x{height} pixels")


def other_format(data: bytes) -> str:
    """Return the name of a known format other than JPEG and PNG; empty if there is none."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    if data[4:12] in (b"ftypheic", b"ftypheix", b"ftypmif1", b"ftypavif"):
        return "heif"
    return next((kind for magic, kind in OTHER_MAGICS.items() if data.startswith(magic)), "")


_SEGMENT = struct.Struct(">BBH")
_FRAME = struct.Struct(">BHHB")
_STANDALONE = frozenset((0x01, *range(0xD0, 0xD8)))
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_USABLE_FRAMES = frozenset((0xC0, 0xC1, 0xC2))
# Plain numbers, because combining enum members takes longer than the rest of the scan.
_FLAGS = [ImageFlag(value) for value in range(128)]
_PROGRESSIVE = int(ImageFlag.PROGRESSIVE)
_OF_COMPONENTS = {1: int(ImageFlag.GRAY), 3: 0, 4: int(ImageFlag.CMYK)}


def jpeg_header(data: bytes) -> ImageHeader:
    """Read marker segments up to the frame header (ITU-T T.81, B.2); raises InvalidImage."""
    flags = 0
    position, end = 2, len(data) - 4
    while position <= end:
        lead, marker, length = _SEGMENT.unpack_from(data, position)
        if lead != 0xFF:
            raise InvalidImage("corrupt", "the JPEG header is damaged")
        if marker == 0xFF or marker in _STANDALONE:
            position += 1 if marker == 0xFF else 2
            continue
        if marker in _FRAMES and position + 10 <= len(data):
            return _read_frame(data, position, marker, flags)
        if marker == 0xE1 and data[position + 4 : position + 10] == b"Exif\0\0":
            flags |= _rotation_flag(data[position + 10 : position + 2 + length])
        if marker in (0xDA, 0xD9):
            break
        position += 2 + length
    raise InvalidImage("corrupt", "the JPEG has no frame header")


def _read_frame(data: bytes, position: int, marker: int, flags: int) -> ImageHeader:
    precision, height, width, components = _FRAME.unpack_from(data, position + 4)
    if marker not in _USABLE_FRAMES:
        raise InvalidImage("unusable_coding", f"JPEG coding process SOF{marker - 0xC0} (lossless or arithmetic)")
    if precision != 8:
        raise InvalidImage("unusable_depth", f"JPEG of {precision} bits per sample")
    if components not in _OF_COMPONENTS:
        raise InvalidImage("unusable_components", f"JPEG of {components} components")
    if marker == 0xC2:
        flags |= _PROGRESSIVE
    return ImageHeader(JPEG, height, width, _FLAGS[flags | _OF_COMPONENTS[components]])


def _rotation_flag(exif: bytes) -> int:
    """Return ROTATED if the Exif orientation (tag 0x0112) is in 2..8, else 0."""
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None or len(exif) < 8:
        return 0
    (directory,) = struct.unpack_from(order + "I", exif, 4)
    if directory + 2 > len(exif):
        return 0
    (count,) = struct.unpack_from(order + "H", exif, directory)
    for at in range(directory + 2, min(directory + 2 + 12 * count, len(exif) - 11), 12):
        tag, _, _, value = struct.unpack_from(order + "HHIH", exif, at)
        if tag == 0x0112:
            return int(ImageFlag.ROTATED) if 2 <= value <= 8 else 0
    return 0


def png_header(data: bytes, max_pixels: int) -> ImageHeader:
    """Read the IHDR chunk (PNG specification, 11.2.2); raises InvalidImage."""
    if len(data) < 33 or data[12:16] != b"IHDR":
        raise InvalidImage("corrupt", "the PNG has no header chunk")
    width, height, depth, color = struct.unpack_from(">IIBB", data, 16)
    check_pixels(height, width, max_pixels)
    if depth == 16:
        raise InvalidImage("unusable_depth", "PNG of 16 bits per sample", convertible=True)
    return ImageHeader(PNG, height, width, ImageFlag.GRAY if color in (0, 4) else ImageFlag(0))


def decode_strictly(data: bytes, image: ImageHeader) -> None:
    """Decode the whole image; raises InvalidImage if it is truncated or damaged."""
    try:
        if image.format == JPEG:
            space = "CMYK" if image.flags & ImageFlag.CMYK else "GRAY"
            decode_jpeg(data, space, min_height=1, min_width=1, min_factor=8)
        else:
            _decode_png(data)
    except ValueError as error:
        raise InvalidImage("corrupt", str(error)) from error


def _decode_png(data: bytes) -> None:
    """Check every CRC and all pixel data, as Pillow does for PNG (but not for JPEG)."""
    try:
        with pil.open(io.BytesIO(data), formats=("PNG",)) as picture:
            picture.load()
    except (OSError, SyntaxError, EOFError, pil.DecompressionBombError, struct.error) as error:
        raise ValueError(re.sub(r"<_io\.BytesIO object at 0x[0-9a-f]+>", "the file", str(error))) from error
    if b"IEND" not in data[-16:]:
        raise ValueError("the end of the PNG is missing")


_JPEG_NAMES = (b".jpg", b".jpeg", b".jpe", b".jfif")
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
FULL_CHROMA, HALF_CHROMA = 0, 2
"""Pillow's numbers of chroma subsampling: 4:4:4 for converted images, 4:2:0 (as cameras use) for resized ones."""


@dataclass(frozen=True)
class ImageRules:
    """Limits, conversion and resizing of images."""

    convert: bool
    resize_short: int | None
    quality: int
    max_pixels: int
    max_bytes: int
    decode: bool = True
    """Decode every image strictly; False: read only headers."""

    @classmethod
    def from_section(cls, data: DataSection) -> "ImageRules":
        return cls(data.policy == "convert", data.resize_short, data.quality, data.max_pixels, data.max_bytes)


def prepare_image(name: bytes, data: bytes, rules: ImageRules) -> tuple[bytes, ImageHeader]:
    """Return the bytes to pack for an image, and their header; raises InvalidImage."""
    try:
        image = read_header(data, rules.max_pixels, rules.max_bytes)
        if rules.decode:
            decode_strictly(data, image)
    except InvalidImage as problem:
        if rules.convert and problem.is_convertible:
            return _reencode(data, None, rules, ImageFlag.CONVERTED)
        raise
    if rules.convert and _needs_conversion(name, image):
        return _reencode(data, image, rules, ImageFlag.CONVERTED)
    if rules.resize_short is not None and min(image.height, image.width) > rules.resize_short:
        return _reencode(data, image, rules, ImageFlag.RESIZED)
    return data, image


def _needs_conversion(name: bytes, image: ImageHeader) -> bool:
    """Return True for CMYK, an Exif rotation, or a PNG with the file name of a JPEG."""
    misnamed = image.format == PNG and name.lower().endswith(_JPEG_NAMES)
    return misnamed or bool(image.flags & (ImageFlag.CMYK | ImageFlag.ROTATED))


def _reencode(data: bytes, image: ImageHeader | None, rules: ImageRules, done: ImageFlag) -> tuple[bytes, ImageHeader]:
    """Return a baseline JPEG, upright and RGB if converted, with at most `resize_short` on its short side."""
    try:
        with pil.open(io.BytesIO(data), formats=_FORMATS) as opened:
            check_pixels(opened.height, opened.width, rules.max_pixels)
            picture = _to_eight_bits(ImageOps.exif_transpose(opened) if done & ImageFlag.CONVERTED else opened)
    except (OSError, SyntaxError, ValueError, EOFError, pil.DecompressionBombError) as error:
        raise InvalidImage("corrupt", str(error)) from error
    gray = image is not None and bool(image.flags & ImageFlag.GRAY) and not done & ImageFlag.CONVERTED
    picture = picture.convert("L" if gray else "RGB")
    short = min(picture.size)
    if rules.resize_short is not None and short > rules.resize_short:
        done |= ImageFlag.RESIZED
        scale = rules.resize_short / short
        size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
        picture = picture.resize(size, pil.Resampling.BICUBIC)  # antialiased: Pillow widens the kernel when reducing
    chroma = HALF_CHROMA if done & ImageFlag.RESIZED else FULL_CHROMA
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=rules.quality, subsampling=chroma, exif=b"", icc_profile=None)
    flags = ImageFlag.GRAY if gray else ImageFlag(0)  # a resized picture loses its Exif tag, and so does ROTATED
    return out.getvalue(), ImageHeader(JPEG, picture.height, picture.width, flags | done)


def _to_eight_bits(picture: pil.Image) -> pil.Image:
    """Return the first frame with 8 bits per channel. Pillow would clip 16-bit gray instead of scaling it."""
    picture.load()
    if picture.mode.startswith("I"):
        return pil.fromarray((np.asarray(picture).astype(np.uint32) >> 8).astype(np.uint8))
    return picture
