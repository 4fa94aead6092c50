"""Native decoder: the reference's pixels to the bit, or a refusal; never a crash, whatever the bytes."""

import io
import os
import threading
import time
from collections import Counter

import numpy as np
import PIL
import pytest
from PIL import Image

from benchmarks.crop_parity.oracles import Photograph
from podscale.data import native as native_module
from podscale.data.crop import CropParams, evaluation_crops
from podscale.data.decode import RESAMPLING, Pixels, crop_and_resize, decode
from podscale.data.decode_index import NO_INDEX
from podscale.data.native import REASONS, Coefficients, CropDecoder, build_decode_index, is_available
from tests.support.jpeg_crops import (
    SAMPLINGS,
    SHAPES,
    as_record,
    batch_of,
    damage,
    encoded,
    extreme_blocks,
    long_codes,
    photographs,
    random_crops,
)
from tests.support.loading import needs_native, special_images
from tests.support.native_crops import SIZE, assert_exact, expected, native, same_or_refused
from tests.support.shard_set import encode_image, smooth_pixels
from tests.support.unusual_jpegs import refused_images, usual_variants

pytestmark = needs_native

KERNELS = pytest.mark.parametrize("kernels", native_module.kernels())


def pack(decoder: CropDecoder, record: Pixels) -> Coefficients:
    """Return the coefficients of an image that is not refused."""
    [packed] = decoder.pack([record], [2**40])
    assert packed is not None
    return packed


def test_the_extension_is_used_with_the_installed_pillow() -> None:
    assert is_available()


@KERNELS
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_crops_are_those_of_the_reference(kind, kernels) -> None:
    decoder, generator = CropDecoder(1, kernels=kernels), np.random.default_rng(1)
    for height, width in SHAPES:
        record = as_record(encoded(kind, height, width))
        crops = random_crops(generator, height, width, SIZE)
        for filtered in ("bilinear", "bicubic"):
            images, status = native(decoder, record, (height, width), crops, filtered=filtered)
            assert not status.any(), (height, width, status)
            assert_exact(images, Photograph(record, height, width), crops, filtered=filtered)
            packed, status = native(decoder, pack(decoder, record), (height, width), crops, filtered=filtered)
            assert not status.any()
            assert np.array_equal(packed, images), (height, width, filtered)


def test_the_order_of_the_installed_pillow_is_found(monkeypatch) -> None:
    """An older Pillow is two calls that resize one axis each."""
    is_new = int(PIL.__version__.partition(".")[0]) >= 13
    assert native_module.pillow_order() == ("fewest values first" if is_new else "rows first")
    monkeypatch.setattr(native_module, "crop_and_resize", rows_first)
    assert native_module.pillow_order.__wrapped__() == "rows first"


def rows_first(pixels, crop, size, interpolation):
    """Return the crop by a Pillow before version 13."""
    rectangle = pixels[crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
    if crop.height > 100 * crop.width and crop.out_height < crop.height:
        low = Image.fromarray(rectangle).resize((crop.width, crop.out_height), RESAMPLING[interpolation])
        low_crop = crop._replace(left=0, top=0, height=crop.out_height)
        return crop_and_resize(np.asarray(low), low_crop, size, interpolation)
    narrow = Image.fromarray(rectangle).resize((crop.out_width, crop.height), RESAMPLING[interpolation])
    return crop_and_resize(np.asarray(narrow), crop._replace(left=0, top=0, width=crop.out_width), size, interpolation)


@KERNELS
@pytest.mark.parametrize("filtered", ["bilinear", "bicubic"])
def test_rows_come_first_for_an_older_pillow(kernels, filtered) -> None:
    decoder, pixels = CropDecoder(1, kernels=kernels, order="rows first"), smooth_pixels(3, 210, 190)
    pixels ^= np.random.default_rng(0).integers(0, 64, pixels.shape).astype(np.uint8)
    crops = [
        CropParams(7, 5, width, height, 24, 24, 0, 0, False)
        for width in (1, 2, 20, 24, 57)
        for height in (24, 60, 100, 200)
    ]
    crops += [CropParams(0, 0, 1, height, 24, 24, 0, 0, False) for height in (101, 205)]
    images, status = native(decoder, pixels, (210, 190), crops, filtered=filtered)
    assert not status.any()
    for crop, image in zip(crops, images, strict=True):
        assert np.array_equal(image, np.asarray(rows_first(pixels, crop, SIZE, filtered))), crop


@KERNELS
def test_both_orders_of_the_passes_are_pillows(kernels) -> None:
    """Pillow 13 resizes vertically first if the height shrinks by more than twice what the width does."""
    decoder, pixels = CropDecoder(1, kernels=kernels), smooth_pixels(3, 210, 190)
    pixels ^= np.random.default_rng(0).integers(0, 64, pixels.shape).astype(np.uint8)
    sides = [20, 23, 24, 25, 40, 55, 56, 57, 73, 121, 154, 190]
    crops = [CropParams(0, 0, width, height, 24, 24, 0, 0, False) for width in sides for height in (*sides, 210)]
    images, status = native(decoder, pixels, (210, 190), crops)
    assert not status.any()
    for crop, image in zip(crops, images, strict=True):
        assert np.array_equal(image, expected(pixels, crop, SIZE, "bilinear")), crop


@pytest.mark.parametrize(("height", "width"), [(1, 3000), (3000, 1)])
def test_a_very_long_image_is_resized_by_its_short_side(height, width) -> None:
    """An evaluation crop is cut out of an image that is resized to 72,000 pixels."""
    record = as_record(encoded("4:2:0", height, width))
    crop = evaluation_crops(np.array([width]), np.array([height]), size=SIZE, fraction=1.0)[0]
    assert max(crop.out_width, crop.out_height) == 3000 * SIZE
    images, status = native(CropDecoder(1), record, (height, width), [crop])
    assert not status.any()
    assert_exact(images, Photograph(record, height, width), [crop])


@KERNELS
def test_decoded_images_are_cropped_the_same(kernels) -> None:
    decoder, generator = CropDecoder(2, kernels=kernels), np.random.default_rng(2)
    for height, width in SHAPES:
        pixels = generator.integers(0, 256, (height, width, 3)).astype(np.uint8)
        crops = random_crops(generator, height, width, SIZE)
        images, status = native(decoder, pixels, (height, width), crops, filtered="bicubic")
        assert not status.any()
        for crop, image in zip(crops, images, strict=True):
            assert np.array_equal(image, expected(pixels, crop, SIZE, "bicubic")), crop


@KERNELS
def test_extreme_blocks_are_exact_or_refused(kernels) -> None:
    """Black and white noise has the largest coefficients; 16-bit steps of libjpeg's SIMD code may overflow."""
    decoder, generator = CropDecoder(1, kernels=kernels), np.random.default_rng(3)
    statuses: Counter[int] = Counter()
    for attempt in range(60):
        shape = (40, 56)
        record = as_record(extreme_blocks(generator, *shape, attempt))
        crop = CropParams(3, 2, 50, 37, SIZE, SIZE, 0, 0, False)
        images, status = native(decoder, record, shape, [crop])
        statuses[int(status[0])] += 1
        if not status[0]:
            assert_exact(images, Photograph(record, *shape), [crop])
        images_of_packed, status_of_packed = native(decoder, pack(decoder, record), shape, [crop])
        assert status_of_packed[0] == status[0]
        assert status[0] or np.array_equal(images_of_packed, images)
    assert statuses[0] > 30
    assert statuses[3] > 5
    assert set(statuses) == {0, 3}


@KERNELS
def test_long_codes_are_read_as_libjpeg_reads_them(kernels) -> None:
    """Their blocks have twice the bytes of extreme ones, and more bits than one refill of the buffer has.

    With 13 and 15 blocks a row, long and short ones are above each other, which are read in turn with an index.
    """
    decoder, generator = CropDecoder(1, kernels=kernels), np.random.default_rng(4)
    for shape in 3 * ((72, 98), (72, 114)):
        record = as_record(long_codes(generator, *shape))
        crops = random_crops(generator, *shape, SIZE)
        index = as_record(build_decode_index(record, 3, max_percent=100))
        assert len(index)
        for found in (NO_INDEX, index):
            images, status = native(decoder, record, shape, crops, index=found)
            assert not status.any()
            assert_exact(images, Photograph(record, *shape), crops)
        packed, status = native(decoder, pack(decoder, record), shape, crops)
        assert not status.any()
        assert np.array_equal(packed, images)


@pytest.mark.parametrize("name", refused_images())
def test_unusual_images_are_refused_with_a_reason(name) -> None:
    data, reason = refused_images()[name]
    crop = CropParams(2, 1, 55, 48, SIZE, SIZE, 0, 0, False)
    decoder = CropDecoder(1)
    _, status = native(decoder, as_record(data), (50, 60), [crop])
    assert REASONS[int(status[0])] == reason
    [packed] = decoder.pack([as_record(data)], [2**40])
    assert (packed is None) == (reason != "size")
    if packed is not None:
        _, status = native(decoder, packed, (50, 60), [crop])
        assert REASONS[int(status[0])] == reason


@pytest.mark.parametrize("name", usual_variants())
def test_usual_variants_are_not_refused(name) -> None:
    record = as_record(usual_variants()[name])
    crop = CropParams(2, 1, 30, 30, SIZE, SIZE, 0, 0, True)
    images, status = native(CropDecoder(1), record, (40, 33), [crop])
    assert status[0] == 0
    assert_exact(images, Photograph(record, 40, 33), [crop])


UPPER = CropParams(10, 3, 40, 20, SIZE, SIZE, 0, 0, False)
WHOLE = CropParams(0, 0, 70, 60, SIZE, SIZE, 0, 0, False)


@pytest.mark.parametrize("kind", ["gray", "4:2:0", "restart in rows"])
def test_truncated_files(kind) -> None:
    """Cut at every byte, with and without an end marker behind the cut."""
    good, decoder = encoded(kind, 60, 70), CropDecoder(1)
    decoded = 0
    for length in range(len(good)):
        _, status = native(decoder, as_record(good[:length]), (60, 70), [WHOLE])
        assert status[0]
        decoded += same_or_refused(decoder, as_record(good[:length] + b"\xff\xd9"), (60, 70), [UPPER, WHOLE])
    assert decoded > 50, "the upper crop does not need the last rows"


@pytest.mark.parametrize("kind", ["gray", "4:4:4", "4:2:2", "4:2:0", "restart in rows", "own tables"])
def test_damaged_files(kind) -> None:
    """Change bits and bytes in the header and behind it, remove bytes, insert some."""
    good, decoder, generator = as_record(encoded(kind, 60, 70)), CropDecoder(1), np.random.default_rng(4)
    decoded = 0
    for attempt in range(500):
        damaged = damage(generator, good, attempt)
        decoded += same_or_refused(decoder, damaged, (60, 70), [UPPER, WHOLE])
    assert decoded > 60


def test_a_batch_is_the_same_with_any_number_of_threads() -> None:
    records = [as_record(encoded(kind, *shape)) for kind in SAMPLINGS for shape in SHAPES]
    shapes = np.array([shape for _ in SAMPLINGS for shape in SHAPES])
    records[5] = as_record(b"nothing")
    crops = batch_of([CropParams(0, 0, width, height, 24, 24, 0, 0, bool(width % 2)) for height, width in shapes])
    found = []
    for threads in (1, 2, 5):
        images = np.zeros((len(records), SIZE, SIZE, 3), dtype=np.uint8)
        decoder = CropDecoder(threads)
        for _ in range(2):
            status = decoder.decode(records, shapes[:, 0], shapes[:, 1], crops, images, "bilinear")
        assert np.flatnonzero(status).tolist() == [5]
        images[5] = 0
        found.append(images)
        packed = decoder.pack(records, [2**40] * len(records))
        assert [number for number, one in enumerate(packed) if one is None] == [5]
        status = decoder.decode([one or records[5] for one in packed], *shapes.T, crops, images, "bilinear")
        assert np.flatnonzero(status).tolist() == [5]
        images[5] = 0
        assert np.array_equal(images, found[0])
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_a_batch_may_have_a_filter_for_each_crop() -> None:
    """Two calls of the extension leave the images of each other alone, and the statuses are those of either call."""
    record, crop = as_record(encoded("4:2:0", 60, 70)), CropParams(3, 2, 60, 50, SIZE, SIZE, 0, 0, False)
    records = [record, as_record(b"nothing"), record, record, as_record(b"nothing")]
    is_bicubic, count = np.array([True, False, False, True, True]), len(records)
    sides = np.full(count, 60), np.full(count, 70)
    images, status = np.full((count, SIZE, SIZE, 3), 77, dtype=np.uint8), np.array([0, 1, 0, 0, 1])
    crops = batch_of([crop] * count)
    for mixed in (is_bicubic, ~is_bicubic, np.full(count, True), np.full(count, False)):
        found = CropDecoder(2).decode(records, *sides, crops, images, mixed)
        assert np.array_equal(found, status)
        for slot in np.flatnonzero(status == 0):
            filtered = "bicubic" if mixed[slot] else "bilinear"
            assert_exact(images[[slot]], Photograph(record, 60, 70), [crop], filtered=filtered)


def test_other_threads_of_python_run_while_it_decodes() -> None:
    """The longest pause of a thread that does nothing but wake up is far shorter than the decoding."""
    record, wakings, done = as_record(encoded("4:2:0", 1000, 1500)), list[float](), threading.Event()
    decoder = CropDecoder(1)
    crops = [CropParams(0, 0, 1500, 1000, SIZE, SIZE, 0, 0, False)] * 6

    def wake() -> None:
        while not done.wait(0.001):
            wakings.append(time.perf_counter())

    thread = threading.Thread(target=wake)
    thread.start()
    start = time.perf_counter()
    _, status = native(decoder, record, (1000, 1500), crops)
    end = time.perf_counter()
    done.set()
    thread.join()
    assert not status.any()
    assert np.diff([start, *(at for at in wakings if start < at < end), end]).max() < (end - start) / 2


@pytest.mark.parametrize(
    "crop",
    [
        CropParams(0, 0, 0, 5, 24, 24, 0, 0, False),
        CropParams(-1, 0, 5, 5, 24, 24, 0, 0, False),
        CropParams(50, 0, 11, 5, 24, 24, 0, 0, False),
        CropParams(0, 0, 5, 51, 24, 24, 0, 0, False),
        CropParams(0, 0, 5, 5, 0, 24, 0, 0, False),
        CropParams(0, 0, 5, 5, 24, 2**40, 0, 0, False),
    ],
)
def test_impossible_crops_are_an_error(crop) -> None:
    decoder, record = CropDecoder(1), as_record(encode_image(smooth_pixels(1, 50, 60)))
    with pytest.raises(ValueError):
        native(decoder, record, (50, 60), [crop])
    native(decoder, record, (50, 60), [CropParams(0, 0, 60, 50, 24, 24, 0, 0, False)])  # all of the image


def test_arrays_of_another_size_or_type_are_an_error() -> None:
    decoder, crops = CropDecoder(1), batch_of([WHOLE, WHOLE])
    record, sides = as_record(encode_image(smooth_pixels(1, 60, 70))), (np.array([60, 60]), np.array([70, 70]))
    whole = np.zeros((2, SIZE, SIZE, 3), dtype=np.uint8)
    decoder.decode([record, record], *sides, crops, whole, "bilinear")
    with pytest.raises(ValueError):
        decoder.decode([record, record], *sides, crops, whole[:1], "bilinear")
    with pytest.raises(ValueError):
        decoder.decode([record, record], *sides, crops, whole[:, :, ::-1], "bilinear")
    decoder.decode([record.copy(), record], *sides, crops, whole, "bilinear")
    with pytest.raises(ValueError):
        decoder.decode([record.repeat(2)[::2], record], *sides, crops, whole, "bilinear")
    whole.flags.writeable = False
    with pytest.raises(ValueError):
        decoder.decode([record, record], *sides, crops, whole, "bilinear")


@KERNELS
@pytest.mark.parametrize("kind", ["gray", "4:4:4", "4:2:2", "4:2:0"])
def test_damaged_coefficients_do_no_harm(kind, kernels) -> None:
    """No crash and no read out of bounds, whatever the bytes. Cut ones are refused."""
    decoder, generator = CropDecoder(1, kernels=kernels), np.random.default_rng(7)
    good = np.frombuffer(pack(decoder, as_record(encoded(kind, 60, 70))).packed, dtype=np.uint8)
    blocks_end = len(good) - 152  # zeros behind the blocks
    for length in [*range(600), *range(600, blocks_end, 37), blocks_end]:
        _, status = native(decoder, Coefficients(good[:length].tobytes()), (60, 70), [WHOLE])
        assert status[0] in (2, 3), length
    statuses: Counter[int] = Counter()
    for attempt in range(400):
        damaged, end = good.copy(), (600, len(good))[attempt % 2]
        damaged[generator.integers(0, end, 1 + attempt % 5)] = generator.integers(0, 256, 1 + attempt % 5)
        _, status = native(decoder, Coefficients(damaged.tobytes()), (60, 70), [UPPER, WHOLE])
        statuses.update(status.tolist())
    assert set(statuses) <= {0, 2, 3}
    assert min(statuses[0], statuses[3]) > 20


def test_coefficients_have_at_most_the_bytes_of_their_limit() -> None:
    decoder, record = CropDecoder(1), as_record(encoded("4:2:0", 60, 70))
    size = pack(decoder, record).nbytes
    assert len(record) < size < 3 * 60 * 70
    found = decoder.pack([record] * 4, [size, size - 1, 0, 100])
    assert [one is not None for one in found] == [True, False, False, False]
    with pytest.raises(ValueError):
        decoder.pack([record], [])


@KERNELS
def test_coefficients_are_resized_in_the_order_of_an_older_pillow(kernels) -> None:
    decoder, record = CropDecoder(1, kernels=kernels, order="rows first"), as_record(encoded("4:4:4", 150, 101))
    crops = [CropParams(3, 2, width, 140, SIZE, SIZE, 0, 0, False) for width in (1, 20, 57)]
    images, status = native(decoder, pack(decoder, record), (150, 101), crops)
    assert not status.any()
    for crop, image in zip(crops, images, strict=True):
        assert np.array_equal(image, np.asarray(rows_first(decode(record), crop, SIZE, "bilinear"))), crop


def test_special_images_are_the_same_or_refused() -> None:
    statuses = {}
    for name, data in special_images().items():
        record = as_record(data)
        height, width = decode(record).shape[:2]
        crop = CropParams(0, 0, width, height, SIZE, SIZE, 0, 0, True)
        images, status = native(CropDecoder(1), record, (height, width), [crop])
        statuses[name] = int(status[0])
        if not status[0]:
            assert_exact(images, Photograph(record, height, width), [crop])
    usual = {"4:4:4", "4:2:2", "4:2:0", "gray", "rotated by EXIF", "odd size", "one pixel"}
    assert {name for name, status in statuses.items() if status == 0} == usual


ALL = "PODSCALE_TEST_ALL_PHOTOGRAPHS" in os.environ
"""Compare all photographs, which takes ten minutes, instead of about 100."""


@pytest.mark.parametrize(("archive", "every"), [("imagenet-500.tar", 20), ("imagenette224.tar", 180)])
def test_photographs_are_the_same(archive, every, real_data) -> None:
    generator, decoder = np.random.default_rng(6), CropDecoder(1)
    refused = 0
    found = photographs(real_data / archive, 1 if ALL else every)
    for data in found:
        record = as_record(data)
        with Image.open(io.BytesIO(data)) as image:
            width, height = image.size
        chosen = random_crops(generator, height, width, 96)[5:12]
        index = as_record(build_decode_index(record, 8))
        for filtered in ("bilinear", "bicubic"):
            images, status = native(decoder, record, (height, width), chosen, 96, filtered)
            indexed, status_with_index = native(decoder, record, (height, width), chosen, 96, filtered, index)
            assert np.array_equal(indexed[status == 0], images[status == 0])
            assert np.array_equal(status_with_index, status)
            [packed] = decoder.pack([record], [2**40])
            assert (packed is None) == bool(status.any())
            if packed is not None:
                images_of_packed, status_of_packed = native(decoder, packed, (height, width), chosen, 96, filtered)
                assert not status_of_packed.any()
                assert np.array_equal(images_of_packed, images)
            refused += bool(status.any())
            decoded = np.flatnonzero(status == 0)
            photograph = Photograph(record, height, width)
            assert_exact(images[decoded], photograph, [chosen[at] for at in decoded], 96, filtered)
    print(f"{len(found)} photographs, {refused // 2} refused")
    assert refused <= 2 * max(1, len(found) // 100)
