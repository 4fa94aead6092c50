"""Float64 oracle of tf.image.per_image_standardization, and images to compare with it."""

import numpy as np


def standardised(images: np.ndarray) -> np.ndarray:
    """Return (x - mean) / max(stddev, 1 / sqrt(N)) of each image [n, height, width, 3]; N is its number of values."""
    pixels = images.astype(np.float64).reshape(len(images), -1)
    mean = pixels.mean(axis=1, keepdims=True)
    deviation = np.sqrt(((pixels - mean) ** 2).mean(axis=1, keepdims=True))
    return ((pixels - mean) / np.maximum(deviation, 1 / np.sqrt(pixels.shape[1]))).reshape(images.shape)


def compare_standardised(found: np.ndarray, images: np.ndarray) -> None:
    """Compare fp32 results with the oracle's.

    A mean of 200 in fp32 is off by up to 1e-5, which the smallest deviation, of the last case, enlarges.
    """
    want = standardised(images)
    np.testing.assert_allclose(found[:-1], want[:-1], atol=2e-5, rtol=1e-5)
    np.testing.assert_allclose(found[-1], want[-1], atol=5e-4, rtol=1e-4)


def standardisation_cases() -> np.ndarray:
    """Return uint8 [5, 8, 12, 3]: noise, a dark and a bright image, a constant one, and one with a single other value.

    The deviation of the last is 1 / sqrt(N) times sqrt(1 - 1 / N), just below the limit.
    """
    generator = np.random.default_rng(7)
    images = np.empty((5, 8, 12, 3), np.uint8)
    images[0] = generator.integers(0, 256, images.shape[1:])
    images[1] = generator.integers(0, 4, images.shape[1:])
    images[2] = generator.integers(250, 256, images.shape[1:])
    images[3:] = 200
    images[4, 3, 5, 1] = 201
    return images
