"""nvJPEG loader: torchvision's JPEG decoder on a GPU, for machines without DALI.

Whole images are decoded in batches. Crop, resize and mirror follow on the GPU, for a batch at once by Triton's kernels
(see `crop_kernels`), or image by image if Triton cannot compile. Pixels differ from the reference, because nvJPEG
rounds its transform differently and interpolates colours otherwise: on an H200 by 2.3 grey levels in the mean for small
images with subsampled colours. Images that nvJPEG cannot decode (PNG, CMYK, damaged ones) go to the reference decoder,
so that the same records count as bad.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import simplejpeg
import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.io import ImageReadMode, decode_jpeg

from podscale.config.data import Interpolation
from podscale.data.batch_plan import BatchPlan, BatchRequest
from podscale.data.crop import CropParams, CropParamsBatch
from podscale.data.decode import CMYK_SPACES, BadRecord, decode
from podscale.data.loaders.base import BadRecordGuard, Batch
from podscale.util.kernel_errors import kernel_errors

log = logging.getLogger("podscale.data")

MOST_DIFFERENCE = 2
"""Largest difference between crops in fixed point, rounded after each axis, and in fp32, grey levels."""


class NvjpegLoader:
    """Loader that decodes `prefetch` batches ahead, in as many threads, each with its own CUDA stream.

    A new stream per batch would soon be one that the training uses, because torch hands out 32 streams in turn.
    """

    def __init__(self, batch_plan: BatchPlan, guard: BadRecordGuard, *, prefetch: int, device: str) -> None:
        self._batch_plan, self._guard, self._prefetch = batch_plan, guard, prefetch
        self._device = torch.device(device)
        self._thread_local = threading.local()
        self._window: deque[Future[tuple[BatchRequest, Tensor]]] = deque()
        self._pool = ThreadPoolExecutor(prefetch, thread_name_prefix="podscale-nvjpeg")

    @property
    def bad_records(self) -> int:
        return self._guard.bad_records

    @property
    def queued_batches(self) -> int:
        return sum(batch.done() for batch in tuple(self._window))

    @property
    def native_refusals(self) -> Mapping[str, int]:
        return {}

    @property
    def cached_bytes(self) -> Mapping[str, int]:
        return {"records": self._batch_plan.split.cached_bytes}

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        window = self._window = deque[Future[tuple[BatchRequest, Tensor]]]()
        try:
            for step in range(start, stop):
                while len(window) <= self._prefetch and step + len(window) < stop:
                    request = self._batch_plan.request_at(step + len(window))
                    window.append(self._pool.submit(self._load_batch, request))
                request, images = window.popleft().result()
                yield self._batch_plan.make_batch(request, images if self._device.type != "cpu" else images.numpy())
        finally:
            for pending in window:
                pending.cancel()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _load_batch(self, request: BatchRequest) -> tuple[BatchRequest, Tensor]:
        """Return the request with substitutes for bad rows, and its images, complete on the device."""
        if self._device.type == "cpu":
            return self._fill(request)
        if not hasattr(self._thread_local, "stream"):
            self._thread_local.stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._thread_local.stream):
            batch = self._fill(request)
        self._thread_local.stream.synchronize()
        return batch

    @torch.no_grad()
    def _fill(self, request: BatchRequest) -> tuple[BatchRequest, Tensor]:
        size, rows = self._batch_plan.image_size_at(request.step), request.rows.copy()
        images = torch.zeros(len(rows), size, size, 3, dtype=torch.uint8, device=self._device)
        decoded = self._decode(rows[: request.sample_count])
        for slot, image in enumerate(decoded):
            if image is None:
                rows[slot], decoded[slot] = self._substitute(int(rows[slot]), int(request.epochs[slot]))
        pixels = [image.contiguous() for image in decoded if image is not None]
        crops = self._batch_plan.crops_of(request.step, rows, request.epochs)
        self._crop(pixels, crops, images[: len(pixels)])
        return replace(request, rows=rows), images

    def _crop(self, pixels: list[Tensor], crops: CropParamsBatch, images: Tensor) -> None:
        """Write the crops of decoded images to `images`."""
        interpolation = self._batch_plan.interpolation
        if self._device.type == "cuda" and has_crop_kernels(str(self._device)):
            from podscale.data.loaders import crop_kernels  # needs Triton

            crop_kernels.crop_batch(pixels, crops, interpolation, images)
            return
        for slot, image in enumerate(pixels):
            images[slot] = crop_and_resize(image, crops[slot], images.shape[1], interpolation)

    def _decode(self, rows: Any) -> list[Tensor | None]:
        """Return uint8 [3, height, width] on the device for each row; None if its size is not that of the index."""
        split = self._batch_plan.split
        records = [np.array(split.read(row)) for row in rows.tolist()]
        easy = [slot for slot, record in enumerate(records) if _is_plain_jpeg(record)]
        decoded: list[Tensor | None] = [None] * len(records)
        for slot, pixels in zip(easy, self._decode_jpegs([records[slot] for slot in easy]), strict=True):
            decoded[slot] = pixels
        for slot, record in enumerate(records):
            if decoded[slot] is None:
                decoded[slot] = self._decode_on_cpu(record)
        sizes = zip(split.column("height")[rows].tolist(), split.column("width")[rows].tolist(), strict=True)
        return [
            pixels if pixels is not None and tuple(pixels.shape[1:]) == size else None
            for pixels, size in zip(decoded, sizes, strict=True)
        ]

    def _decode_jpegs(self, records: list[Any]) -> list[Tensor | None]:
        """Decode all records at once, or one by one if that fails."""
        if not records:
            return []
        try:
            encoded = [torch.from_numpy(record) for record in records]
            return list(decode_jpeg(encoded, mode=ImageReadMode.RGB, device=self._device))
        except RuntimeError:
            if len(records) == 1:
                return [None]
            return [pixels for record in records for pixels in self._decode_jpegs([record])]

    def _decode_on_cpu(self, record: Any) -> Tensor | None:
        try:
            pixels = np.array(decode(record))
        except BadRecord:
            return None
        return torch.from_numpy(pixels).permute(2, 0, 1).to(self._device)

    def _substitute(self, row: int, epoch: int) -> tuple[int, Tensor]:
        """Return the substitute for a bad row, and its pixels."""
        while True:
            self._guard.mark_bad(row, epoch, "not an image, or not of the size in the index")
            row = self._guard.substitute(row, epoch)
            (pixels,) = self._decode(np.array([row]))
            if pixels is not None:
                return row, pixels


def crop_and_resize(pixels: Tensor, crop: CropParams, size: int, interpolation: Interpolation) -> Tensor:
    """Return the crop of a decoded image, uint8 [size, size, 3], from `pixels`, uint8 [3, height, width].

    torch's antialiased bicubic filter is PIL's, with a = -0.5; the one without antialiasing has -0.75.
    """
    part = pixels[:, crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
    if part.shape[1:] != (crop.out_height, crop.out_width):
        shape = (crop.out_height, crop.out_width)
        resized = F.interpolate(part[None].float(), shape, mode=interpolation, antialias=True)[0]
        part = resized.round_().clamp_(0, 255).to(torch.uint8)
    right, bottom = crop.out_left + size - crop.out_width, crop.out_top + size - crop.out_height
    # Negative amounts cut, positive ones add black.
    square = F.pad(part, (-crop.out_left, right, -crop.out_top, bottom))
    return (square.flip(2) if crop.flip else square).permute(1, 2, 0)


@cache
def has_crop_kernels(device: str) -> bool:
    """Return whether Triton's kernels crop as `crop_and_resize` does on this GPU; logs a warning if they cannot."""
    if find_spec("triton") is None:
        return False
    from podscale.data.loaders import crop_kernels

    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 37, 53)).astype(np.uint8)).to(device)
    crops = [
        CropParams(3, 2, 45, 30, 12, 12, 0, 0, flip=True),
        CropParams(0, 0, 53, 37, 9, 15, -2, 1, flip=False),
        CropParams(20, 1, 14, 35, 12, 12, 0, 0, flip=True),  # vertically first in PIL 13
    ]
    batch = CropParamsBatch(*(np.array(column) for column in zip(*crops, strict=True)))
    found = torch.empty(len(crops), 12, 12, 3, dtype=torch.uint8, device=device)
    try:
        crop_kernels.crop_batch([pixels] * len(crops), batch, "bilinear", found)
    except kernel_errors() as error:
        log.warning("images are cropped one by one: Triton cannot compile the kernels for a batch: %s", error)
        return False
    expected = torch.stack([crop_and_resize(pixels, crop, 12, "bilinear") for crop in crops])
    if (found.int() - expected.int()).abs().max() > MOST_DIFFERENCE:
        log.warning("images are cropped one by one: the kernels for a batch compute other pixels on this GPU")
        return False
    return True


@cache
def is_available_on(device: str) -> bool:
    """Return whether torchvision decodes a small image on this device."""
    if not (torch.cuda.is_available() and torch.device(device).type == "cuda"):
        return False
    encoded = torch.frombuffer(bytearray(simplejpeg.encode_jpeg(np.zeros((16, 16, 3), np.uint8))), dtype=torch.uint8)
    try:
        return tuple(decode_jpeg([encoded], mode=ImageReadMode.RGB, device=device)[0].shape) == (3, 16, 16)
    except RuntimeError:
        return False


def _is_plain_jpeg(record: Any) -> bool:
    """Return whether this is a complete gray or colour JPEG; a decoder may invent the rest of a truncated one."""
    if bytes(record[:2]) != b"\xff\xd8" or bytes(record[-2:]) != b"\xff\xd9":
        return False
    try:
        return simplejpeg.decode_jpeg_header(record.data, strict=False)[2] not in CMYK_SPACES
    except (ValueError, KeyError):
        return False
