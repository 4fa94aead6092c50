"""Bytes of an image to pixels: the reference that the other loaders are held against.

Pixels are those of torchvision's transforms on PIL images, bit for bit: decode to RGB (gray repeated, CMYK converted,
alpha dropped, EXIF orientation ignored), crop, resize bilinearly with antialiasing, mirror.
"""

import io

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image

from podscale.input.crop import View

Pixels = npt.NDArray[np.uint8]


_FOUR_INKS = ("CMYK", "YCCK")  # libjpeg-turbo and PIL round their conversion differently


class BadRecord(ValueError):
    """The bytes of a sample are no image, or another one than the index describes."""


def decode(record: Pixels) -> Pixels:
    """The pixels uint8 [height, width, 3] of an encoded image.

    JPEGs go through libjpeg-turbo directly (simplejpeg), which gives PIL's pixels in less time; what it does not
    take (CMYK, PNG) goes through PIL. Raises BadRecord where nothing can be decoded.
    """
    data = record.data
    if bytes(data[:2]) == b"\xff\xd8":
        try:
            if simplejpeg.decode_jpeg_header(data, strict=False)[2] not in _FOUR_INKS:
                return np.asarray(simplejpeg.decode_jpeg(data, colorspace="RGB", strict=True))
        except (ValueError, KeyError):
            pass  # damaged, or libjpeg is not sure: PIL has the last word
    return _decode_by_pil(data)


def _decode_by_pil(data: memoryview) -> Pixels:
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP")) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadRecord(str(error)) from error


def resize(pixels: Pixels, width: int, height: int) -> Pixels:
    """Bilinear with antialiasing (a triangle filter as wide as the scale), uint8 [height, width, 3]."""
    if pixels.shape[:2] == (height, width):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR))


def cut(pixels: Pixels, view: View, size: int) -> Pixels:
    """The view of a decoded image, uint8 [size, size, 3]."""
    part = pixels[view.top : view.top + view.height, view.left : view.left + view.width]
    resized = resize(part, view.out_width, view.out_height)
    square = resized[view.out_top : view.out_top + size, view.out_left : view.out_left + size]
    return square[:, ::-1] if view.flip else square
