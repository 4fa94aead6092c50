"""Choice of the form in which the decoded cache keeps images: pixels or coefficients.

Pixels are faster to crop, coefficients need a fraction of the memory, so more images fit. A few images are packed and
cropped in both forms at the start. The rate of a form follows from the fraction of the images that fit, and from the
times of a crop with and without the cache.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from podscale.data.batch_plan import BatchPlan
from podscale.data.decode import BadRecord, Pixels, decode_rows
from podscale.data.native import Coefficients, CropDecoder
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
    heights, widths = (split.column(name).astype(np.int64) for name in ("height", "width"))
    sampled = _sample(split.column("shard"), rows)
    records = [split.read_to_keep(row) for row in sampled.tolist()]
    limits = (3 * heights[sampled] * widths[sampled]).tolist()
    packed = decoder.pack(records, limits)
    decoded: list[Pixels] = []
    slots: list[int] = []
    for slot, row in enumerate(sampled.tolist()):
        height, width = int(heights[row]), int(widths[row])
        if packed[slot] is not None:
            try:
                decoded.append(decode_rows(records[slot], height, width, height).copy())
                slots.append(slot)
            except BadRecord:  # of another size than in the index; the loader will find it
                pass
    if not slots:
        return None
    own = sampled[slots]
    crops = batch_plan.crops_of(0, own, np.zeros_like(own))
    size = batch_plan.image_size_at(0)
    images = np.empty((len(own), size, size, 3), dtype=np.uint8)
    files, coefficients = [records[slot] for slot in slots], [one for slot in slots if (one := packed[slot])]

    def seconds(sources: Sequence[Pixels | Coefficients]) -> float:
        indexes = split.decode_indexes(own) if sources is files else None
        arguments = (heights[own], widths[own], crops, images, batch_plan.interpolation, indexes)
        return _least_seconds(lambda: decoder.decode(sources, *arguments)) / len(own)

    pixel_bytes = 3.0 * float((heights[rows] * widths[rows]).sum())
    growth = sum(one.nbytes for one in coefficients) / sum(map(len, files))
    packed_bytes = growth * float(split.column("size")[rows].sum())
    miss = seconds(files)
    return (
        FormEstimate(pixel_bytes, seconds(decoded), miss, limit_bytes),
        FormEstimate(packed_bytes, seconds(coefficients), miss, limit_bytes),
    )


def _sample(shards: npt.NDArray[np.integer], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return some rows of the first shard, because each shard of a remote set is a download."""
    first = rows[shards[rows] == shards[rows[0]]]
    found: npt.NDArray[np.int64] = first[
        np.linspace(0, len(first) - 1, min(SAMPLE_IMAGES, len(first))).astype(np.int64)
    ]
    return found


def _least_seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of this thread, in which a decoder of one thread works."""
    times = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return min(times)
