"""Crops of the native decoder beside those of the reference."""

from collections.abc import Sequence

import numpy as np

from podscale.config.data import Interpolation
from podscale.data.crop import CropParams
from podscale.data.decode import BadRecord, Pixels, crop_and_resize, decode_rows
from podscale.data.decode_index import NO_INDEX
from podscale.data.native import Coefficients, CropDecoder
from tests.support.jpeg_crops import batch_of

SIZE = 24


def expected(record: Pixels, shape: tuple[int, int], crop: CropParams, size: int, filtered: Interpolation) -> Pixels:
    if record.ndim == 1:
        record = decode_rows(record, *shape, crop.top + crop.height)
    return np.asarray(crop_and_resize(record, crop, size, filtered))


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
    """Assert that each crop is refused or has the reference's pixels. Returns the number of crops with pixels."""
    images, status = native(decoder, data, shape, crops)
    for crop, image, refusal in zip(crops, images, status, strict=True):
        if refusal == 0:
            try:
                want = expected(data, shape, crop, SIZE, "bilinear")
            except BadRecord as error:
                raise AssertionError(f"the reference refuses it: {error}") from error
            assert np.array_equal(image, want), crop
    [packed] = decoder.pack([data], [2**40])
    if packed is not None:
        images_of_packed, status_of_packed = native(decoder, packed, shape, crops)
        assert np.array_equal(status_of_packed, status)
        assert np.array_equal(images_of_packed[status == 0], images[status == 0])
    return int((status == 0).sum())
