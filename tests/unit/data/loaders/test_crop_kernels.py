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
    """Larger, smaller, one axis, a square of the centre, padded; mirrored or not; both filters."""
    skip_without_interpreter()
    command = [sys.executable, "-m", "tests.support.crop_kernel_oracle"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    differences = json.loads(done.stdout.splitlines()[-1])
    assert len(differences) == 20
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
    constants = {"fields": len(crop_kernels.FIELDS), **constants}
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
    assert "other pixels" in caplog.text


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
