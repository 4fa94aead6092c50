"""Bytes of an image to pixels: the reference that the other loaders are held against.

Pixels are those of torchvision's transforms on PIL images, bit for bit: decode to RGB (gray repeated, CMYK converted,
alpha dropped, EXIF orientation ignored), crop, resize bilinearly with antialiasing, mirror.
"""

import io

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image

from podscale.input.crop import CropParams
from podscale.input.jpeg import truncate_jpeg

Pixels = npt.NDArray[np.uint8]


_CMYK_SPACES = ("CMYK", "YCCK")  # libjpeg-turbo and PIL round their conversion differently


class BadRecord(ValueError):
    """The bytes of a sample are no image, or another one than the index describes."""


def decode(record: Pixels, buffer: Pixels | None = None) -> Pixels:
    """The pixels uint8 [height, width, 3] of an encoded image.

    JPEGs go through libjpeg-turbo directly (simplejpeg), which gives PIL's pixels in less time; what it does not
    take (CMYK, PNG) goes through PIL. They may be written to `buffer` (uint8 [n]), where they fit.
    Raises BadRecord where nothing can be decoded.
    """
    data = record.data
    if bytes(data[:2]) == b"\xff\xd8":
        try:
            if simplejpeg.decode_jpeg_header(data, strict=False)[2] not in _CMYK_SPACES:
                return np.asarray(simplejpeg.decode_jpeg(data, colorspace="RGB", buffer=buffer, strict=True))
        except (ValueError, KeyError):
            pass  # damaged, or libjpeg is not sure: PIL has the last word
    return _decode_by_pil(data)


def decode_rows(record: Pixels, height: int, width: int, rows: int, buffer: Pixels | None = None) -> Pixels:
    """The first `rows` rows at least of an image of `height` times `width` pixels; the same pixels as `decode`'s.

    Raises BadRecord where nothing can be decoded, or the image has another size.
    """
    shorter = truncate_jpeg(record, height, width, rows)
    if shorter is not None:
        try:
            return np.asarray(simplejpeg.decode_jpeg(shorter.data, colorspace="RGB", buffer=buffer, strict=False))
        except (ValueError, KeyError):
            pass
    pixels = decode(record, buffer)
    if pixels.shape[:2] != (height, width):
        raise BadRecord(f"the image has {pixels.shape[1]}x{pixels.shape[0]} px, the index says {width}x{height}")
    return pixels


def _decode_by_pil(data: memoryview) -> Pixels:
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP")) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadRecord(str(error)) from error


def crop_and_resize(pixels: Pixels, crop: CropParams, size: int) -> Image.Image:
    """The view of a decoded image, a square of `size`; of the image only the rows down to the view's last matter.

    Resizing is PIL's, bilinear with antialiasing (a triangle filter as wide as the scale). PIL takes the rectangle out
    of the rows by itself and mirrors whole pixels: NumPy would copy the rectangle once more, and mirror bytewise.
    """
    width = pixels.shape[1]
    begin = (crop.top * width + crop.left) * 3
    end = begin + ((crop.height - 1) * width + crop.width) * 3
    rectangle = pixels.reshape(-1)[begin:end]
    image = Image.frombytes("RGB", (crop.width, crop.height), rectangle, "raw", "RGB", 3 * width, 1)
    if image.size != (crop.out_width, crop.out_height):
        image = image.resize((crop.out_width, crop.out_height), Image.Resampling.BILINEAR)
    if image.size != (size, size):
        image = image.crop((crop.out_left, crop.out_top, crop.out_left + size, crop.out_top + size))
    if crop.flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image
