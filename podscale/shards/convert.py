"""What is packed for an image: its own bytes, or a clean JPEG where the options ask for one."""

import io
from dataclasses import dataclass

import numpy as np
import PIL.Image as pil  # noqa: N813 - our own Image is what a header says
from PIL import ImageOps

from podscale.config.data import DataSection
from podscale.shards.index import JPEG, PNG, Flag
from podscale.shards.validate import Image, Unusable, check_pixels, decode_strictly, examine

_JPEG_NAMES = (b".jpg", b".jpeg", b".jpe", b".jfif")
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
FULL_CHROMA, HALF_CHROMA = 0, 2
"""Pillow's names of 4:4:4 and 4:2:0: a conversion keeps colour as it is, a reduced picture does as cameras do."""


@dataclass(frozen=True)
class Rules:
    """What is usable, what is rewritten, and how."""

    convert: bool
    resize_short: int | None
    quality: int
    max_pixels: int
    max_bytes: int
    decode: bool = True
    """Decode every image strictly; without it only headers are looked at."""

    @classmethod
    def of(cls, data: DataSection) -> "Rules":
        return cls(data.policy == "convert", data.resize_short, data.quality, data.max_pixels, data.max_bytes)


def admit(name: bytes, data: bytes, rules: Rules) -> tuple[bytes, Image]:
    """The bytes to pack for an image and what they are; raises Unusable."""
    try:
        image = examine(data, rules.max_pixels, rules.max_bytes)
        if rules.decode:
            decode_strictly(data, image)
    except Unusable as problem:
        if rules.convert and problem.convertible:
            return _rewrite(data, None, rules, Flag.CONVERTED)
        raise
    if rules.convert and _unclean(name, image):
        return _rewrite(data, image, rules, Flag.CONVERTED)
    if rules.resize_short is not None and min(image.height, image.width) > rules.resize_short:
        return _rewrite(data, image, rules, Flag.RESIZED)
    return data, image


def _unclean(name: bytes, image: Image) -> bool:
    """CMYK, a rotation left to the reader, or a PNG that claims to be a JPEG."""
    misnamed = image.format == PNG and name.lower().endswith(_JPEG_NAMES)
    return misnamed or bool(image.flags & (Flag.CMYK | Flag.ROTATED))


def _rewrite(data: bytes, image: Image | None, rules: Rules, done: Flag) -> tuple[bytes, Image]:
    """A baseline JPEG of the picture: upright and RGB where converted, at the short side asked for."""
    try:
        with pil.open(io.BytesIO(data), formats=_FORMATS) as opened:
            check_pixels(opened.height, opened.width, rules.max_pixels)
            picture = _eight_bits(ImageOps.exif_transpose(opened) if done & Flag.CONVERTED else opened)
    except (OSError, SyntaxError, ValueError, EOFError, pil.DecompressionBombError) as error:
        raise Unusable("corrupt", str(error)) from error
    gray = image is not None and bool(image.flags & Flag.GRAY) and not done & Flag.CONVERTED
    picture = picture.convert("L" if gray else "RGB")
    short = min(picture.size)
    if rules.resize_short is not None and short > rules.resize_short:
        done |= Flag.RESIZED
        scale = rules.resize_short / short
        size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
        picture = picture.resize(size, pil.Resampling.BICUBIC)  # antialiased: Pillow widens the kernel when reducing
    chroma = HALF_CHROMA if done & Flag.RESIZED else FULL_CHROMA
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=rules.quality, subsampling=chroma, exif=b"", icc_profile=None)
    kept = Flag.GRAY if gray else Flag(0)  # a resized picture loses its Exif tag, and so does ROTATED
    return out.getvalue(), Image(JPEG, picture.height, picture.width, kept | done)


def _eight_bits(picture: pil.Image) -> pil.Image:
    """The first frame with 8 bits a channel; Pillow would clip 16-bit gray instead of scaling it."""
    picture.load()
    if picture.mode.startswith("I"):
        return pil.fromarray((np.asarray(picture).astype(np.uint32) >> 8).astype(np.uint8))
    return picture
