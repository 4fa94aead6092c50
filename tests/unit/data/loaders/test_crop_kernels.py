"""Kernels that crop a batch of decoded images on a GPU: the pixels of PIL, and code for GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.support.logs import logged
from tests.support.triton_kernels import (
    KERNEL_FAILURES,
    REGISTERS,
    SHARED_MEMORY_BYTES,
    compile_kernel,
    kernel_failure,
    skip_without_interpreter,
)

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.slow
def test_crops_have_the_pixels_of_pil_to_the_bit() -> None:
    """Larger, smaller, one axis, a square of the centre, padded, high; mirrored or not; both filters and orders."""
    skip_without_interpreter()
    command = [sys.executable, "-m", "tests.support.crop_kernel_oracle"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    differences = json.loads(done.stdout.splitlines()[-1])
    assert len(differences) == 28
    assert set(differences.values()) == {0}, differences


POINTERS = {"crops": "*i32", "firsts": "*i32", "weights": "*i32", "addresses": "*i64", "plane_sizes": "*i64"}
TYPES = {**POINTERS, "begins": "*i64", "narrow": "*u8", "images": "*u8", "size": "i32", "taps": "i32"}


@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(other, marks=pytest.mark.slow) for other in SHARED_MEMORY_BYTES if other != 90)]
)
@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        ("_weights_kernel", {"cubic": True, "block": 128}),
        ("_rows_kernel", {"block_rows": 4, "block": 128}),
        ("_columns_kernel", {"block_rows": 4, "block": 128}),
    ],
)
def test_kernels_compile_for_a_gpu(
    kernel: str, constants: dict[str, Any], capability: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """Compiled for A100, H100 or B200, which needs no GPU. Registers suffice without spills to memory."""
    pytest.importorskip("triton")
    from podscale.data.loaders import crop_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"fields": crop_kernels.FIELDS, **constants}
    found = compile_kernel(getattr(crop_kernels, kernel), TYPES, constants, capability, tmp_path, warps=4)
    assert found.shared <= SHARED_MEMORY_BYTES[capability]
    assert found.registers <= REGISTERS // 128
    assert found.spilled == 0


@pytest.mark.parametrize("reason", KERNEL_FAILURES)
def test_images_are_cropped_one_by_one_if_triton_cannot_compile(reason: str, monkeypatch: Any, caplog: Any) -> None:
    pytest.importorskip("triton")
    from podscale.data.loaders import crop_kernels, nvjpeg

    monkeypatch.setattr(crop_kernels, "crop_batch", Mock(side_effect=kernel_failure(reason)))
    assert not nvjpeg.has_crop_kernels.__wrapped__("cpu")
    assert str(kernel_failure(reason)) in caplog.text


def test_kernels_with_other_pixels_are_not_used(monkeypatch: Any, caplog: Any) -> None:
    pytest.importorskip("triton")
    from podscale.data.loaders import crop_kernels, nvjpeg

    monkeypatch.setattr(crop_kernels, "crop_batch", lambda pixels, crops, interpolation, images: images.zero_())
    assert not nvjpeg.has_crop_kernels.__wrapped__("cpu")
    assert logged(caplog, module="nvjpeg") == [()]


def test_kernels_with_the_pixels_of_single_crops_are_used(monkeypatch: Any) -> None:
    pytest.importorskip("triton")
    from podscale.data.loaders import crop_kernels, nvjpeg

    def one_by_one(pixels: Any, crops: Any, interpolation: Any, images: Any) -> None:
        for slot, image in enumerate(pixels):
            images[slot] = nvjpeg.crop_and_resize(image, crops[slot], images.shape[1], interpolation)

    monkeypatch.setattr(crop_kernels, "crop_batch", one_by_one)
    assert nvjpeg.has_crop_kernels.__wrapped__("cpu")


def test_the_table_of_weights_is_as_wide_as_the_largest_shrinkage() -> None:
    pytest.importorskip("triton")
    import numpy as np

    from podscale.data.crop import CropParams, CropParamsBatch
    from podscale.data.loaders.crop_kernels import largest_taps

    crops = [CropParams(0, 0, 100, 30, 10, 20, 0, 0, False), CropParams(0, 0, 900, 30, 10, 20, 0, 0, False)]
    batch = CropParamsBatch(*(np.array(column) for column in zip(*crops, strict=True)))
    assert largest_taps(batch, 1, "bilinear") == 21
    assert largest_taps(batch, 1, "bicubic") == 41
    assert largest_taps(batch, 2, "bilinear") == 181
    assert torch.iinfo(torch.int32).max > 2**22 * 255  # a sum of weights and pixels fits


@pytest.mark.parametrize(
    ("order", "high", "very_high"), [("fewest values first", True, True), ("rows first", False, True)]
)
def test_high_crops_are_resized_vertically_first_as_pil_does(order: Any, high: bool, very_high: bool) -> None:
    """Swapped rows and columns: steps, sides, corners, and the axis that is mirrored."""
    pytest.importorskip("triton")
    import numpy as np

    from podscale.data.crop import CropParams, CropParamsBatch
    from podscale.data.loaders.crop_kernels import FIELDS, describe_crops

    crops = {
        CropParams(5, 1, 13, 34, 12, 11, -2, 3, True): high,
        CropParams(5, 1, 2, 202, 12, 11, -2, 3, True): very_high,
        CropParams(5, 1, 12, 34, 12, 11, -2, 3, True): False,  # one axis
        CropParams(5, 1, 34, 34, 12, 12, -2, 3, True): False,  # both shrink alike
        CropParams(5, 1, 2, 202, 12, 303, -2, 3, True): False,  # the height grows
    }
    batch = CropParamsBatch(*(np.array(column) for column in zip(*crops, strict=True)))
    table = describe_crops(batch, np.full(len(crops), 44), order)
    assert table.shape == (len(crops), FIELDS)
    assert table[:, -1].tolist() == [int(swapped) for swapped in crops.values()]
    assert table[2].tolist() == [44, 1, 5, 1, 12, 34, 12, 11, -2, 3, 1, 0, 0]
    assert table[1].tolist() == [1, 44, 1, 5, 202, 2, 11, 12, 3, -2, 0, 1, 1]
