"""Images per CPU-second of the loaders, and CPU time of decoding, cropping and resizing an image."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image

from benchmarks.measure import cpu_seconds, median_ratio, rate
from benchmarks.samples import require_native
from podscale.config.data import Interpolation
from podscale.config.run_config import RunConfig
from podscale.config.schedule import CropSection
from podscale.data.crop import CropParams, training_crops
from podscale.data.decode import RESAMPLING, Pixels, crop_and_resize, decode, decode_rows
from podscale.data.loaders.base import Batch, Loader
from podscale.data.loaders.build_loader import build_loader, open_shard_set
from podscale.data.loaders.cpu import CachingDecoder, PillowLoader
from podscale.data.sampler import build_sampler
from podscale.data.shard_set import ShardSet, Split
from podscale.errors import InputError
from podscale.training.schedules import image_phases

NEEDED_RATE = 4102
"""Images/s of one of the 256 hosts that fed 1.05 million images/s to 2,048 TPU cores (Ying et al. 2018)."""
BATCH = 32
ROUNDS = 3
"""Rounds of the operations' times."""
UNLIMITED = 2**40
BASELINE = "baseline: decoded whole, cropped and flipped by NumPy"
KEPT = {"decoded_cache_bytes": UNLIMITED}
LOADERS: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "reference": {},
    "reference, records in memory": {"record_cache_bytes": UNLIMITED},
    "reference, decoded images in memory": KEPT,
    "native": {"loader": "native"},
    "native, decoded images in memory": {"loader": "native", **KEPT, "decoded_cache_form": "pixels"},
    "native, coefficients in memory": {"loader": "native", **KEPT, "decoded_cache_form": "coefficients"},
    "dali (decodes only the crop; other pixels)": {"loader": "dali"},
}


class WholeImages(CachingDecoder):
    """Decoder of the baseline: decodes every image as a whole, into new memory."""

    def __init__(self, split: Split) -> None:
        super().__init__(split)
        self._records = split

    def __call__(self, row: int, rows: int | None = None) -> Pixels:
        return decode(self._records.read(row))


def numpy_crop_and_resize(
    pixels: Pixels, view: CropParams, size: int, interpolation: Interpolation = "bilinear"
) -> Pixels:
    part = pixels[view.top : view.top + view.height, view.left : view.left + view.width]
    image = Image.fromarray(part)
    if part.shape[:2] != (view.out_height, view.out_width):
        image = image.resize((view.out_width, view.out_height), RESAMPLING[interpolation])
    square = np.asarray(image)[view.out_top : view.out_top + size, view.out_left : view.out_left + size]
    return square[:, ::-1] if view.flip else square


CropFunction = Callable[[Pixels, CropParams, int, Interpolation], object]


def cropping_by(function: CropFunction) -> AbstractContextManager[object]:
    """Replace the crop function of the loader during the block."""
    return mock.patch("podscale.data.loaders.cpu.crop_and_resize", function)


class MeasuredLoader:
    """Loader that continues with the next batches at each measurement, and is idle in between."""

    def __init__(self, name: str, directory: str, cores: int, size: int) -> None:
        if LOADERS[name].get("loader") == "native":
            require_native()
        section = {"loader": "reference", "workers": cores, "image_size": size, **LOADERS[name]}
        config = RunConfig.model_validate({"input": section, "train": {"global_batch": BATCH}})
        split = open_shard_set(directory, config).split("train")
        order, phases = build_sampler(config, split), image_phases(config, len(split))
        self.loader: Loader = build_loader(
            config, split, order, phases=phases, ranks=range(1), world_size=1, device="cpu"
        )
        self._crop: CropFunction = crop_and_resize
        if name == BASELINE:
            assert isinstance(self.loader, PillowLoader)
            self.loader._images, self._crop = WholeImages(split), numpy_crop_and_resize
        self._step = 0
        self.first = [np.array(batch.images) for batch in self._batches(2)]
        if "decoded_cache_bytes" in section:
            list(self._batches(-(-len(split) // BATCH)))  # an epoch fills the cache

    def _batches(self, steps: int) -> Iterator[Batch]:
        start, self._step = self._step, self._step + steps
        with cropping_by(self._crop):
            yield from self.loader.batches(start, self._step)

    def measure(self, images: int) -> float:
        """Return images per CPU-second."""
        cpu = cpu_seconds()
        count = sum(len(batch) for batch in self._batches(images // BATCH))
        return rate(count, cpu_seconds() - cpu)


def loader_rows(directory: str, cores: int, images: int, rounds: int, size: int) -> list[str]:
    """Return the rows of all loaders with a thread for each core that the process is pinned to."""
    loaders: dict[str, MeasuredLoader] = {}
    lines = []
    for name in LOADERS:
        try:
            loaders[name] = MeasuredLoader(name, directory, cores, size)
        except (ImportError, InputError) as error:
            if "dali" not in name and "native" not in name:
                raise
            lines.append(f"| {cores} | {name} | not measured: {error} | | |")
    for name, loader in loaders.items():
        if "dali" not in name:
            assert all(map(np.array_equal, loader.first, loaders[BASELINE].first)), f"{name}: pixels differ"
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(rounds):
        for name, loader in loaders.items():
            rates[name].append(loader.measure(images))
    for name, loader in loaders.items():
        loader.loader.close()
        median, ratio = statistics.median(rates[name]), median_ratio(rates[name], rates[BASELINE])
        lines.append(f"| {cores} | {name} | {median:.0f} | {ratio:.2f} | {NEEDED_RATE / median:.1f} |")
    return lines


def operation_table(directory: str, images: int, size: int) -> list[str]:
    """Return the CPU time of each operation for an image, in one thread: the least of some rounds."""
    split = ShardSet.open(directory).split("train")
    rows = np.random.default_rng(0).permutation(len(split))[:images]
    widths, heights = (split.column(name)[rows].astype(np.int64) for name in ("width", "height"))
    views = training_crops(0, np.zeros_like(rows), split.keys[rows], widths, heights, crop=CropSection(), size=size)
    jobs = [
        (split.read(row), int(height), int(width), views[slot])
        for slot, (row, height, width) in enumerate(zip(rows.tolist(), heights, widths, strict=True))
    ]
    buffer = np.empty(3 * int((widths * heights).max()), dtype=np.uint8)
    decoded = [decode(record) for record, *_ in jobs]
    operations: dict[str, Callable[[], object]] = {
        "decoding, baseline": lambda: [decode(record) for record, *_ in jobs],
        "decoding, whole, into reused memory": lambda: [decode(record, buffer) for record, *_ in jobs],
        "decoding, down to the end of the crop": lambda: [
            decode_rows(record, height, width, view.top + view.height, buffer) for record, height, width, view in jobs
        ],
        "cropping, resizing, flipping, baseline": lambda: [
            numpy_crop_and_resize(pixels, job[3], size).copy() for pixels, job in zip(decoded, jobs, strict=True)
        ],
        "cropping, resizing, flipping": lambda: [
            np.array(crop_and_resize(pixels, job[3], size, "bilinear"))
            for pixels, job in zip(decoded, jobs, strict=True)
        ],
        "cropping, resizing (bicubic), flipping": lambda: [
            np.array(crop_and_resize(pixels, job[3], size, "bicubic"))
            for pixels, job in zip(decoded, jobs, strict=True)
        ],
    }
    microseconds: dict[str, list[float]] = {name: [] for name in operations}
    for _ in range(ROUNDS):
        for name, operation in operations.items():
            cpu = cpu_seconds()
            operation()
            microseconds[name].append((cpu_seconds() - cpu) / len(jobs) * 1e6)
    share = float(np.mean((views.top + views.height) / heights))
    lines = [f"Crops end at {share:.0%} of the height on average. Microseconds of CPU for one image:", ""]
    lines += ["| operation | µs |", "|---|---:|"]
    return [*lines, *(f"| {name} | {min(values):.0f} |" for name, values in microseconds.items()), ""]
