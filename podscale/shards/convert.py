"""What is packed for an image: its own bytes, or a clean JPEG where the options ask for one."""

import io
from dataclasses import dataclass

import numpy as np
import PIL.Image as pil  # noqa: N813 - our own Image is what a header says
from PIL import ImageOps

from podscale.config.data import DataSection
from podscale.shards.index import JPEG, PNG, ImageFlag
from podscale.shards.validate import ImageHeader, InvalidImage, check_pixels, decode_strictly, read_header

_JPEG_NAMES = (b".jpg", b".jpeg", b".jpe", b".jfif")
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
FULL_CHROMA, HALF_CHROMA = 0, 2
"""Pillow's names of 4:4:4 and 4:2:0: a conversion keeps colour as it is, a reduced picture does as cameras do."""


@dataclass(frozen=True)
class ImageRules:
    """What is usable, what is rewritten, and how."""

    convert: bool
    resize_short: int | None
    quality: int
    max_pixels: int
    max_bytes: int
    decode: bool = True
    """Decode every image strictly; without it only headers are looked at."""

    @classmethod
    def from_section(cls, data: DataSection) -> "ImageRules":
        return cls(data.policy == "convert", data.resize_short, data.quality, data.max_pixels, data.max_bytes)


def prepare_image(name: bytes, data: bytes, rules: ImageRules) -> tuple[bytes, ImageHeader]:
    """The bytes to pack for an image and what they are; raises Unusable."""
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
    """CMYK, a rotation left to the reader, or a PNG that claims to be a JPEG."""
    misnamed = image.format == PNG and name.lower().endswith(_JPEG_NAMES)
    return misnamed or bool(image.flags & (ImageFlag.CMYK | ImageFlag.ROTATED))


def _reencode(data: bytes, image: ImageHeader | None, rules: ImageRules, done: ImageFlag) -> tuple[bytes, ImageHeader]:
    """A baseline JPEG of the picture: upright and RGB where converted, at the short side asked for."""
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
    kept = ImageFlag.GRAY if gray else ImageFlag(0)  # a resized picture loses its Exif tag, and so does ROTATED
    return out.getvalue(), ImageHeader(JPEG, picture.height, picture.width, kept | done)


def _to_eight_bits(picture: pil.Image) -> pil.Image:
    """The first frame with 8 bits a channel; Pillow would clip 16-bit gray instead of scaling it."""
    picture.load()
    if picture.mode.startswith("I"):
        return pil.fromarray((np.asarray(picture).astype(np.uint32) >> 8).astype(np.uint8))
    return picture
