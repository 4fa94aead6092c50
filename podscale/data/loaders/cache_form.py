"""Choice of the form in which the decoded cache keeps images: pixels or coefficients.

Pixels are faster to crop, coefficients need a fraction of the memory, so more images fit. A few images are packed and
cropped in both forms at the start. The rate of a form follows from the fraction of the images that fit, and from the
times of a crop with and without the cache.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from podscale.data.batch_plan import BatchPlan
from podscale.data.decode import BadRecord, Pixels, decode_rows
from podscale.data.decode_index import ImageIndex
from podscale.data.native import Coefficients, CropDecoder
from podscale.data.shard_set import Split
from podscale.util.formatting import format_bytes

log = logging.getLogger("podscale.data")

CacheForm = Literal["pixels", "coefficients"]

SAMPLE_IMAGES = 24
ROUNDS = 3
"""Rounds of the times, of which the least counts."""


@dataclass(frozen=True)
class FormEstimate:
    """Estimate for one form.

    Args:
        bytes: Size of all images in this form.
        hit_seconds: CPU time of a crop of an image that is kept.
        miss_seconds: CPU time of a crop of an image that is not kept.
        limit_bytes: Size of the cache.
    """

    bytes: float
    hit_seconds: float
    miss_seconds: float
    limit_bytes: int

    @property
    def kept(self) -> float:
        """Fraction of the images that fit."""
        return min(1.0, self.limit_bytes / max(self.bytes, 1))

    @property
    def seconds(self) -> float:
        """Mean CPU time of a crop."""
        return self.kept * self.hit_seconds + (1 - self.kept) * self.miss_seconds

    def __str__(self) -> str:
        return f"{self.kept:.0%} of {format_bytes(self.bytes)} fit, {self.seconds * 1e6:.0f} us a crop"


def choose_cache_form(batch_plan: BatchPlan, rows: npt.NDArray[np.int64], limit_bytes: int) -> CacheForm:
    """Return the form with the higher rate, and log why.

    Args:
        rows: Images that the process may read, int64 [n].
        limit_bytes: Size of the cache.
    """
    estimates = estimate_forms(batch_plan, rows, limit_bytes)
    if estimates is None:
        log.info("the decoded cache keeps pixels: the native extension packs none of the first images")
        return "pixels"
    pixels, coefficients = estimates
    form: CacheForm = "coefficients" if coefficients.seconds < pixels.seconds else "pixels"
    log.info("the decoded cache keeps %s. As pixels, %s; as coefficients, %s", form, pixels, coefficients)
    return form


def estimate_forms(
    batch_plan: BatchPlan, rows: npt.NDArray[np.int64], limit_bytes: int
) -> tuple[FormEstimate, FormEstimate] | None:
    """Return the estimates for pixels and for coefficients; None if no sampled image can be packed.

    Images that cannot be packed are kept as pixels in both forms, so they do not count.

    Args:
        rows: Images that the process may read, int64 [n].
        limit_bytes: Size of the cache.
    """
    split, decoder = batch_plan.split, CropDecoder(1)
    sampled = _sample_images(split, rows, decoder)
    if not sampled:
        return None
    own = np.array([image.row for image in sampled])
    files, coefficients = [image.file for image in sampled], [image.coefficients for image in sampled]
    heights, widths = split.column("height"), split.column("width")
    crops = batch_plan.crops_of(0, own, np.zeros_like(own))
    size = batch_plan.image_size_at(0)
    images = np.empty((len(own), size, size, 3), dtype=np.uint8)
    filters = batch_plan.filters_of(own, np.zeros_like(own))

    def seconds(records: Sequence[Pixels | Coefficients], indexes: Sequence[ImageIndex] | None = None) -> float:
        arguments = (heights[own], widths[own], crops, images, filters, indexes)
        return _least_seconds(lambda: decoder.decode(records, *arguments)) / len(own)

    pixel_bytes = 3.0 * float((heights[rows].astype(np.int64) * widths[rows]).sum())
    growth = sum(one.nbytes for one in coefficients) / sum(map(len, files))
    packed_bytes = growth * float(split.column("size")[rows].sum())
    miss = seconds(files, split.decode_indexes(own))
    return (
        FormEstimate(pixel_bytes, seconds([image.pixels for image in sampled]), miss, limit_bytes),
        FormEstimate(packed_bytes, seconds(coefficients), miss, limit_bytes),
    )


class _SampledImage(NamedTuple):
    row: int
    file: Pixels
    pixels: Pixels
    coefficients: Coefficients


def _sample_images(split: Split, rows: npt.NDArray[np.int64], decoder: CropDecoder) -> list[_SampledImage]:
    """Return some images that can be packed, of one shard only: each shard of a remote set is a download."""
    shards, heights, widths = (split.column(name) for name in ("shard", "height", "width"))
    first = rows[shards[rows] == shards[rows[0]]]
    chosen = first[np.linspace(0, len(first) - 1, min(SAMPLE_IMAGES, len(first))).astype(np.int64)].tolist()
    files = [split.read_to_keep(row) for row in chosen]
    sizes = [(int(heights[row]), int(widths[row])) for row in chosen]
    packed = decoder.pack(files, [3 * height * width for height, width in sizes])
    sampled = []
    for row, file, (height, width), coefficients in zip(chosen, files, sizes, packed, strict=True):
        if coefficients is not None:
            with suppress(BadRecord):  # of another size than in the index; the loader will find it
                pixels = decode_rows(file, height, width, height)
                sampled.append(_SampledImage(row, file, pixels, coefficients))
    return sampled


def _least_seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of this thread, in which a decoder of one thread works."""
    times = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return min(times)
