"""Podscale's pipelines from a shard set to batches of crops."""

from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from podscale.bench.input_rates import BatchSizes, loader_batches
from podscale.config.run_config import RunConfig
from podscale.config.schedule import CropSection
from podscale.data.crop import CropParamsBatch, training_crops
from podscale.data.loaders.build_loader import unavailable_reason
from podscale.data.native import CropDecoder
from podscale.data.shard_set import Split
from podscale.errors import InputError

Pipeline = Callable[[Split, int, int], BatchSizes]
"""Reads batches; arguments: split, images of a batch, side in pixels."""
KEPT = {"decoded_cache_bytes": 2**40, "decoded_cache_form": "coefficients"}
"""Input options that keep the coefficients of all images."""


def podscale_loader(name: str, interpolation: str = "bilinear", options: Mapping[str, Any] | None = None) -> Pipeline:
    """Return the pipeline of one of Podscale's loaders, with one worker and these `input` options."""

    def run(split: Split, batch: int, size: int) -> BatchSizes:
        if reason := unavailable_reason(name, "cpu"):
            raise InputError(reason)
        section: dict[str, Any] = {"loader": name, "workers": 1, "image_size": size, "interpolation": interpolation}
        section |= options or {}
        return loader_batches(RunConfig.model_validate({"input": section, "train": {"global_batch": batch}}), split)

    return run


def kept_coefficients(interpolation: str = "bilinear") -> Pipeline:
    """Return the pipeline of the loader native with the coefficients of all images in memory."""
    opened: dict[Split, BatchSizes] = {}

    def run(split: Split, batch: int, size: int) -> BatchSizes:
        if split not in opened:
            opened.clear()
            opened[split] = podscale_loader("native", interpolation, KEPT)(split, batch, size)
            for _ in range(-(-len(split) // batch)):
                next(opened[split])
        while True:
            yield next(opened[split])

    return run


def crops_alone(kernels: str) -> Pipeline:
    """Return the pipeline of the extension's crops with a version of its kernels, without the loader around it."""

    def run(split: Split, batch: int, size: int) -> BatchSizes:
        decoder, images = CropDecoder(1, kernels=kernels), np.empty((batch, size, size, 3), dtype=np.uint8)
        for rows in batches(split, batch):
            widths, heights, views = draw_crops(split, rows, size)
            records = [split.read(row) for row in rows.tolist()]
            decoder.decode(records, heights, widths, views, images, "bilinear", split.decode_indexes(rows))
            yield batch

    return run


def draw_crops(
    split: Split, rows: npt.NDArray[np.int64], size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], CropParamsBatch]:
    """Return widths, heights and random resized crops of these rows."""
    widths, heights = (split.column(name)[rows].astype(np.int64) for name in ("width", "height"))
    crops = training_crops(0, np.zeros_like(rows), split.keys[rows], widths, heights, crop=CropSection(), size=size)
    return widths, heights, crops


def batches(split: Split, batch: int) -> Generator[npt.NDArray[np.int64], None, None]:
    """Yield the rows of batches in random order, without end."""
    if len(split) < batch:
        raise InputError(
            f"--batch: larger than the shard set (got {batch} of {len(split)})", hint="Give a smaller --batch."
        )
    while True:
        rows = np.random.default_rng(0).permutation(len(split))
        for start in range(0, len(rows) - batch + 1, batch):
            yield rows[start : start + batch]
