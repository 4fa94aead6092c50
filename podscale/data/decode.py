"""Reference decoder, from encoded bytes to pixels; the other decoders are tested against it.

Pixels equal those of torchvision's transforms on PIL images, bit for bit: decode to RGB (gray repeated, CMYK converted,
alpha dropped, EXIF orientation ignored), crop, resize with antialiasing, mirror.

A JPEG is decoded from the top only as far down as its crop. No Python wheel offers libjpeg-turbo's partial decoding,
but its decoder stops at the height in the header. The rows above stay the same, bit for bit.
"""

import io

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image

from podscale.config.data import Interpolation
from podscale.data.crop import CropParams

Pixels = npt.NDArray[np.uint8]

_MARGIN = 8  # rows decoded below the last one needed; smooth upsampling of chroma reads two of them
_WORTHWHILE = 16  # fewest rows saved that are worth a copy of the record: one line of blocks
_FRAMES = (0xC0, 0xC1)  # sequential frames; progressive ones have their rows in several passes
_TABLES = (0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE)  # tables, application data and comments before the scan
_SCAN = 0xDA
_EVERYTHING = b"\x00\x3f\x00"  # end of a scan's header with all coefficients and all of their bits
_END = b"\xff\xd9"
_WITHIN = np.zeros(256, dtype=np.bool_)  # bytes allowed after 0xFF in a scan: an escaped 0xFF, restart markers
_WITHIN[[0x00, *range(0xD0, 0xD8)]] = True


def truncate_jpeg(record: Pixels, height: int, width: int, rows: int) -> Pixels | None:
    """Return a copy of a JPEG (`record`, uint8 [bytes]) whose header gives it a height just above `rows`.

    Decode it leniently, because data follows the last row. Returns None if that saves nothing, if the size is not
    (height, width), if rows may depend on those below (progressive, several scans, CMYK), or if the file looks damaged
    (truncated, or with a marker in its data).
    """
    enough = rows + _MARGIN
    if enough + _WORTHWHILE > height or bytes(record[-2:]) != _END:
        return None
    frame_and_scan = find_frame_and_scan(record.data, height, width)
    if frame_and_scan is None:
        return None
    at, scan = frame_and_scan
    body = record[scan:-2]
    if not _WITHIN[body[1:][body[:-1] == 0xFF]].all():
        return None
    shorter = record.copy()
    shorter[at : at + 2] = enough >> 8, enough & 0xFF
    return shorter


def find_frame_and_scan(data: memoryview, height: int, width: int) -> tuple[int, int] | None:
    """Return the offsets of the height and of the scan in a JPEG of this size with 8 bits and 1 or 3 components."""
    at, frame, components = 2, None, 0
    while at + 10 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], data[at + 2] << 8 | data[at + 3]
        if marker in _FRAMES and frame is None:
            size = (data[at + 5] << 8 | data[at + 6], data[at + 7] << 8 | data[at + 8])
            frame, components = at + 5, data[at + 9]
            if size != (height, width) or data[at + 4] != 8 or components not in (1, 3):
                return None
        elif marker == _SCAN and frame is not None:
            scan = at + 2 + length
            usual = data[at + 4] == components and bytes(data[scan - 3 : scan]) == _EVERYTHING
            return (frame, scan) if usual else None
        elif marker not in _TABLES:
            return None
        at += 2 + length
    return None


CMYK_SPACES = ("CMYK", "YCCK")  # PIL decodes them, because libjpeg-turbo rounds their conversion differently


class BadRecord(ValueError):
    """A record is not an image, or not of the size in the index."""


def decode(record: Pixels, buffer: Pixels | None = None) -> Pixels:
    """Return the pixels of an encoded image, uint8 [height, width, 3].

    simplejpeg (libjpeg-turbo) gives the same pixels as PIL in less time; PIL decodes CMYK, PNG and WebP. Raises
    BadRecord if neither can decode the image.

    Args:
        record: uint8 [bytes], the encoded image.
        buffer: uint8 [n], memory that the pixels may use.
    """
    pixels = decode_sound_jpeg(record, buffer)
    return _decode_by_pil(record.data) if pixels is None else pixels


def decode_sound_jpeg(record: Pixels, buffer: Pixels | None) -> Pixels | None:
    """Return the pixels of a JPEG without any damage; None for other images, which `decode` gives to PIL."""
    data = record.data
    if bytes(data[:2]) == b"\xff\xd8":
        try:
            if simplejpeg.decode_jpeg_header(data, strict=False)[2] not in CMYK_SPACES:
                return np.asarray(simplejpeg.decode_jpeg(data, colorspace="RGB", buffer=buffer, strict=True))
        except (ValueError, KeyError):
            pass  # damaged, or libjpeg warned
    return None


def decode_rows(record: Pixels, height: int, width: int, rows: int, buffer: Pixels | None = None) -> Pixels:
    """Return at least the first `rows` rows of `decode(record, buffer)`.

    Raises BadRecord if the image cannot be decoded or its size is not (height, width).
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


RESAMPLING: dict[Interpolation, Image.Resampling] = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}
"""PIL's filters: a triangle, or Keys' cubic with a = -0.5; both as wide as the scale if the image shrinks."""


def crop_and_resize(pixels: Pixels, crop: CropParams, size: int, interpolation: Interpolation) -> Image.Image:
    """Return the crop of a decoded image, a square of `size` pixels.

    PIL resizes with antialiasing. PIL also cuts and mirrors, because NumPy would copy the rectangle once more and
    mirror byte by byte. Where the square extends beyond the image, PIL's crop is black.

    Args:
        pixels: uint8 [height, width, 3]; rows below the crop may be missing.
    """
    width = pixels.shape[1]
    begin = (crop.top * width + crop.left) * 3
    end = begin + ((crop.height - 1) * width + crop.width) * 3
    rectangle = pixels.reshape(-1)[begin:end]
    image = Image.frombytes("RGB", (crop.width, crop.height), rectangle, "raw", "RGB", 3 * width, 1)
    if image.size != (crop.out_width, crop.out_height):
        image = image.resize((crop.out_width, crop.out_height), RESAMPLING[interpolation])
    square = (crop.out_left, crop.out_top, crop.out_left + size, crop.out_top + size)
    if square != (0, 0, *image.size):
        image = image.crop(square)
    if crop.flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image
