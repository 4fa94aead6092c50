"""Crops of the native decoder beside those of the reference path and of Pillow alone."""

from collections.abc import Sequence

import numpy as np
import PIL

from benchmarks.crop_parity.oracles import Photograph
from podscale.config.data import Interpolation
from podscale.data.crop import CropParams
from podscale.data.decode import Pixels, crop_and_resize
from podscale.data.decode_index import NO_INDEX
from podscale.data.native import Coefficients, CropDecoder
from tests.support.jpeg_crops import batch_of

SIZE = 24


def expected(pixels: Pixels, crop: CropParams, size: int, filtered: Interpolation) -> Pixels:
    """Return the crop of a decoded image, uint8 [height, width, 3], as Pillow resizes it."""
    return np.asarray(crop_and_resize(pixels, crop, size, filtered))


def assert_exact(
    images: Pixels,
    photograph: Photograph,
    crops: Sequence[CropParams],
    size: int = SIZE,
    filtered: Interpolation = "bilinear",
) -> None:
    """Assert that the crops of an intact file are those of the reference path, and those of Pillow alone."""
    for image, crop in zip(images, crops, strict=True):
        if PIL.__version__ == "11.0.0" and crop.height > 100 * crop.width:
            continue  # later versions before 13 resize these vertically first: one grey level apart
        for oracle in (photograph.crop_by_reference, photograph.crop_by_pillow):
            assert np.array_equal(image, oracle(crop, size, filtered)), (photograph, oracle.__name__, filtered, crop)


def native(
    decoder: CropDecoder,
    record: Pixels | Coefficients,
    shape: tuple[int, int],
    crops: Sequence[CropParams],
    size: int = SIZE,
    filtered: Interpolation = "bilinear",
    index: Pixels = NO_INDEX,
) -> tuple[Pixels, Pixels]:
    """Return the crops of one image, and their status."""
    images = np.full((len(crops), size, size, 3), 77, dtype=np.uint8)
    heights, widths = (np.full(len(crops), side) for side in shape)
    records, indexes = [record] * len(crops), [index] * len(crops)
    status = decoder.decode(records, heights, widths, batch_of(crops), images, filtered, indexes)
    return images, status


def same_or_refused(decoder: CropDecoder, data: Pixels, shape: tuple[int, int], crops: Sequence[CropParams]) -> int:
    """Assert that each crop of a file is refused, or has the pixels of the reference path, and of Pillow if it decodes.

    Pillow refuses some files that are damaged below the crop. Returns the number of crops with pixels.
    """
    images, status = native(decoder, data, shape, crops)
    photograph = Photograph(data, *shape)
    for crop, image, refusal in zip(crops, images, status, strict=True):
        if refusal == 0:
            reference, pillow = (
                oracle(crop, SIZE, "bilinear") for oracle in (photograph.crop_by_reference, photograph.crop_by_pillow)
            )
            assert reference is not None, f"the reference refuses it: {crop}"
            assert np.array_equal(image, reference), crop
            assert pillow is None or np.array_equal(image, pillow), f"Pillow has other pixels: {crop}"
    [packed] = decoder.pack([data], [2**40])
    if packed is not None:
        images_of_packed, status_of_packed = native(decoder, packed, shape, crops)
        assert np.array_equal(status_of_packed, status)
        assert np.array_equal(images_of_packed[status == 0], images[status == 0])
    return int((status == 0).sum())
