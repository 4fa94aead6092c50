"""Augmentation by the native extension: Pillow's pixels to the bit."""

import platform

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter

from podscale.config.data import AugmentSection, Interpolation
from podscale.data import native
from podscale.data.augment import RAND_AUGMENT, Augmentation, FillMode
from podscale.data.decode import RESAMPLING, Pixels
from tests.support.loading import needs_native

pytestmark = [
    needs_native,
    pytest.mark.skipif(
        platform.machine() != "x86_64", reason="compilers for other processors fuse multiplications with additions"
    ),
]

FILL = (1, 200, 77)
FILTERS = pytest.mark.parametrize("interpolation", RESAMPLING)
OPERATIONS = {operation.name: operation for operation in RAND_AUGMENT}


def noise(generator: np.random.Generator, height: int, width: int) -> Pixels:
    return generator.integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_it_is_used_with_the_installed_pillow() -> None:
    assert native.can_augment()


@FILTERS
def test_affine_transforms_are_pillows(interpolation: Interpolation) -> None:
    generator = np.random.default_rng(1)
    for number in range(150):
        height, width = generator.integers(1, 60, 2)
        pixels = noise(generator, height, width)
        image = Image.fromarray(pixels)
        a, b, c, d, e, f = generator.normal(size=6).tolist()
        shift = float(generator.integers(-9, 10))
        matrix = [
            (1 + a / 2, b / 2, 10 * c, d / 2, 1 + e / 2, 10 * f),
            (1.0, b, 0.0, 0.0, 1.0, 0.0),  # shear
            (1.0, 0.0, shift, 0.0, 1.0, f),  # translation, by whole pixels and not
        ][number % 3]
        resample = RESAMPLING[interpolation]
        expected = image.transform(image.size, Image.Transform.AFFINE, matrix, resample, fillcolor=FILL)
        np.testing.assert_array_equal(
            native.affine(pixels, matrix, interpolation, FILL), np.asarray(expected), str(matrix)
        )


@pytest.mark.parametrize("matrix", [(np.nan,) * 6, (np.inf, 0, 0, 0, 1, 0), (1e300, 1e300, 1e300, 0, 1, 0)])
def test_matrices_without_a_place_give_the_fill_colour(matrix: tuple[float, ...]) -> None:
    pixels = noise(np.random.default_rng(2), 5, 7)
    assert (native.affine(pixels, matrix, "bicubic", FILL) == FILL).all()


@FILTERS
def test_rotations_are_pillows(interpolation: Interpolation) -> None:
    generator, fill = np.random.default_rng(3), FillMode(RESAMPLING[interpolation], FILL)
    for number in range(60):
        image = Image.fromarray(noise(generator, *generator.integers(1, 50, 2)))
        level, negative = generator.uniform(), bool(number % 2)
        degrees = (-30 if negative else 30) * level
        rotated = OPERATIONS["rotate"](image, level, negative=negative, fill_mode=fill)
        expected = image.rotate(degrees, RESAMPLING[interpolation], fillcolor=FILL)
        np.testing.assert_array_equal(np.asarray(rotated), np.asarray(expected), str(degrees))
    whole = OPERATIONS["rotate"](image, 0.0, negative=False, fill_mode=fill)
    np.testing.assert_array_equal(np.asarray(whole), np.asarray(image))


def test_sharpness_is_pillows() -> None:
    generator, fill = np.random.default_rng(4), FillMode(Image.Resampling.BILINEAR, FILL)
    for height, width in [(1, 1), (2, 9), (9, 2), (3, 3), (40, 31)]:
        pixels = noise(generator, height, width)
        image = Image.fromarray(pixels)
        np.testing.assert_array_equal(native.smooth(pixels), np.asarray(image.filter(ImageFilter.SMOOTH)))
        for negative in (False, True):
            sharpened = OPERATIONS["sharpness"](image, 0.7, negative=negative, fill_mode=fill)
            expected = ImageEnhance.Sharpness(image).enhance(1 + 0.9 * (-0.7 if negative else 0.7))
            np.testing.assert_array_equal(np.asarray(sharpened), np.asarray(expected))


@pytest.mark.parametrize("policy", ["rand_augment", "trivial_augment"])
def test_images_are_those_without_the_extension(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    augmentation = Augmentation(AugmentSection(policy=policy), 0, (0.485, 0.456, 0.406))
    image = Image.fromarray(noise(np.random.default_rng(5), 24, 24))
    draws = augmentation.draws(np.zeros(200, dtype=np.int64), np.arange(200, dtype=np.uint64))
    augmented = [augmentation(image, row) for row in draws]
    monkeypatch.setattr(native, "can_augment", lambda: False)
    np.testing.assert_array_equal(augmented, [augmentation(image, row) for row in draws])


def test_arrays_of_another_shape_are_refused() -> None:
    pixels = noise(np.random.default_rng(6), 4, 4)
    for image in (pixels[..., :2], pixels[0], pixels[:0], pixels[:, ::2]):
        with pytest.raises(ValueError):
            native.smooth(image)
    with pytest.raises(ValueError):
        native._native.smooth(pixels, np.empty((4, 5, 3), dtype=np.uint8))
