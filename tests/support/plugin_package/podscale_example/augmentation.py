"""A shift of the colours."""

import numpy as np
import numpy.typing as npt
from PIL import Image


class Shift:
    """Adds one of -`by` ... `by` to each channel."""

    draws = 3

    def __init__(self, by: int = 16) -> None:
        self._by = by

    def __call__(self, image: Image.Image, draws: npt.NDArray[np.float64]) -> Image.Image:
        amounts = np.round((2 * draws - 1) * self._by).astype(np.int16)
        pixels = np.asarray(image).astype(np.int16) + amounts
        return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
