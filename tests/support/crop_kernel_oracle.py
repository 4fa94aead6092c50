"""Kernels of crops in Triton's interpreter beside PIL.

`python -m tests.support.crop_kernel_oracle` prints, for each case, the largest difference of grey levels as JSON.
"""

import json
from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from podscale.config.data import Interpolation
from podscale.data.crop import CropParams, CropParamsBatch
from podscale.data.decode import RESAMPLING, crop_and_resize
from podscale.data.loaders import crop_kernels
from podscale.data.loaders.crop_kernels import PILLOW_ORDER
from podscale.data.native import ORDERS, PassOrder
from tests.support.triton_interpreter import adapt_interpreter

CASES = {
    "shrunk": [(3, 5, 33, 20, 12, 12, 0, 0), (0, 0, 44, 34, 12, 12, 0, 0), (10, 2, 14, 31, 12, 12, 0, 0)],
    "grown": [(2, 1, 5, 7, 12, 12, 0, 0), (40, 30, 1, 1, 12, 12, 0, 0), (0, 0, 12, 12, 12, 12, 0, 0)],
    "one axis": [(0, 0, 12, 33, 12, 12, 0, 0), (0, 0, 43, 12, 12, 12, 0, 0)],
    "square of the centre": [(0, 0, 44, 34, 18, 14, 3, 1), (0, 0, 44, 34, 12, 16, 0, 2)],
    "padded": [(0, 0, 44, 34, 12, 12, -2, 2), (0, 0, 44, 34, 10, 16, -1, -3)],
    "high": [(5, 0, 13, 34, 12, 12, 0, 0), (2, 1, 7, 33, 12, 14, 0, 1)],
}
"""Crops: left, top, width, height, output width and height, and the corner of the square of 12 pixels."""
[OTHER_ORDER] = set(ORDERS) - {PILLOW_ORDER}
"""Order of the passes that the installed PIL does not have."""
SIZE, SIDES = 12, (34, 44)


def crop_in_order(
    pixels: npt.NDArray[np.uint8], crop: CropParams, interpolation: Interpolation, order: PassOrder
) -> npt.NDArray[np.uint8]:
    """Return PIL's crop. The other order, which begins with the other axis of a high crop, is two calls of PIL."""
    if order == OTHER_ORDER:
        rectangle = pixels[crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
        width, height = (crop.out_width, crop.height) if order == "rows first" else (crop.width, crop.out_height)
        pixels = np.asarray(Image.fromarray(rectangle).resize((width, height), RESAMPLING[interpolation]))
        crop = crop._replace(left=0, top=0, width=width, height=height)
    return np.asarray(crop_and_resize(pixels, crop, SIZE, interpolation))


def differences(
    interpolation: Interpolation, device: str = "cpu", order: PassOrder = PILLOW_ORDER, cases: Collection[str] = CASES
) -> dict[str, int]:
    """Return the largest difference between the kernels and PIL by case, grey levels; all crops are one batch."""
    random = np.random.default_rng(0)
    named = [(name, crop) for name, crops in named_crops(cases).items() for crop in crops]
    images = [random.integers(0, 256, (*SIDES, 3)).astype(np.uint8) for _ in named]
    batch = CropParamsBatch(*(np.array(column) for column in zip(*(crop for _, crop in named), strict=True)))
    planes = [torch.from_numpy(image).permute(2, 0, 1).contiguous().to(device) for image in images]
    found = torch.full((len(named), SIZE, SIZE, 3), 77, dtype=torch.uint8, device=device)
    crop_kernels.crop_batch(planes, batch, interpolation, found, order)
    largest: dict[str, int] = {}
    for (name, crop), image, ours in zip(named, images, found.cpu().numpy(), strict=True):
        expected = crop_in_order(image, crop, interpolation, order)
        difference = int(np.abs(ours.astype(int) - expected).max())
        largest[name] = max(difference, largest.get(name, 0))
    return largest


def named_crops(cases: Collection[str]) -> dict[str, list[CropParams]]:
    return {
        f"{name}{', mirrored' * flip}": [CropParams(*crop, flip) for crop in CASES[name]]
        for name in cases
        for flip in (False, True)
    }


def use_few_programs() -> None:
    """Let a program compute a whole crop: each takes milliseconds in the interpreter."""
    crop_kernels.BLOCK_ROWS = 16


def main() -> None:
    adapt_interpreter()
    use_few_programs()
    kinds: tuple[Interpolation, ...] = ("bilinear", "bicubic")
    found = {kind: differences(kind) for kind in kinds}
    found |= {f"{kind}, {OTHER_ORDER}": differences(kind, order=OTHER_ORDER, cases=["high"]) for kind in kinds}
    print(json.dumps({f"{name}, {kind}": value for kind, values in found.items() for name, value in values.items()}))


if __name__ == "__main__":
    main()
