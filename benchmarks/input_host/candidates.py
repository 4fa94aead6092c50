"""The loaders that are compared, and their rates on some cores."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image

from benchmarks.measure import cpu_seconds, median_ratio, rate
from podscale.config.run_config import RunConfig
from podscale.data.crop import CropParams
from podscale.data.decode import Pixels, crop_and_resize, decode
from podscale.data.loaders import pillow
from podscale.data.loaders.base import Batch, Loader
from podscale.data.loaders.build_loader import build_loader, open_shard_set
from podscale.data.loaders.pillow import DecodedCache, PillowLoader
from podscale.data.sampler import build_sampler
from podscale.data.shard_set import Split
from podscale.errors import InputError
from podscale.training.schedules import image_phases

NEEDED = 4102
"""Images/s of one of the 256 hosts that fed 1.05 million images/s to 2,048 TPU cores (Ying et al. 2018)."""
BATCH = 32
LARGE = 2**40
AS_IT_WAS = "as it was: decoded whole, cut and mirrored by NumPy"
CANDIDATES: dict[str, dict[str, Any]] = {
    AS_IT_WAS: {},
    "no cache": {},
    "records in memory": {"record_cache_bytes": LARGE},
    "decoded images kept": {"decoded_cache_bytes": LARGE},
    "dali (decodes only the crop; other pixels)": {"loader": "dali"},
}


class WholeImages(DecodedCache):
    """The decoder as it was: every image whole, into fresh memory."""

    def __init__(self, split: Split) -> None:
        super().__init__(split)
        self._records = split

    def __call__(self, row: int, rows: int | None = None) -> Pixels:
        return decode(self._records.read(row))


def cut_by_numpy(pixels: Pixels, view: CropParams, size: int) -> Pixels:
    """Cut a view as it was done before."""
    part = pixels[view.top : view.top + view.height, view.left : view.left + view.width]
    image = Image.fromarray(part)
    if part.shape[:2] != (view.out_height, view.out_width):
        image = image.resize((view.out_width, view.out_height), Image.Resampling.BILINEAR)
    square = np.asarray(image)[view.out_top : view.out_top + size, view.out_left : view.out_left + size]
    return square[:, ::-1] if view.flip else square


def cutting(by: Callable[[Pixels, CropParams, int], object]) -> AbstractContextManager[object]:
    """The loader cuts views by this function for the time of the block."""
    return mock.patch.object(pillow, "crop_and_resize", by)


class Turn:
    """One candidate: resumes its batches at each turn, and leaves nothing running between turns."""

    def __init__(self, name: str, directory: str, cores: int, size: int) -> None:
        section = {"loader": "torchvision", "workers": cores, "image_size": size, **CANDIDATES[name]}
        config = RunConfig.model_validate({"input": section, "train": {"global_batch": BATCH}})
        split = open_shard_set(directory, config).split("train")
        order, phases = build_sampler(config, split), image_phases(config, len(split))
        self.loader: Loader = build_loader(
            config, split, order, phases=phases, ranks=range(1), world_size=1, device="cpu"
        )
        self._cut: Callable[[Pixels, CropParams, int], object] = crop_and_resize
        if name == AS_IT_WAS:
            assert isinstance(self.loader, PillowLoader)
            self.loader._images, self._cut = WholeImages(split), cut_by_numpy
        self._step = 0
        self.first = [np.array(batch.images) for batch in self._take(2)]
        if "decoded_cache_bytes" in section:
            list(self._take(-(-len(split) // BATCH)))  # an epoch fills the cache

    def _take(self, steps: int) -> Iterator[Batch]:
        begin, self._step = self._step, self._step + steps
        with cutting(self._cut):
            yield from self.loader.batches(begin, self._step)

    def measure(self, images: int) -> float:
        """Images per CPU-second."""
        cpu = cpu_seconds()
        count = sum(len(batch) for batch in self._take(images // BATCH))
        return rate(count, cpu_seconds() - cpu)


def loaders(directory: str, cores: int, images: int, rounds: int, size: int) -> list[str]:
    """Rows of all candidates with so many threads; the caller pins the process to as many cores."""
    turns: dict[str, Turn] = {}
    lines = []
    for name in CANDIDATES:
        try:
            turns[name] = Turn(name, directory, cores, size)
        except (ImportError, InputError) as error:
            if "dali" not in name:
                raise
            lines.append(f"| {cores} | {name} | not measured: {error} | | |")
    for name, turn in turns.items():
        if "dali" not in name:
            assert all(map(np.array_equal, turn.first, turns[AS_IT_WAS].first)), f"{name}: other pixels"
    found: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            found[name].append(turn.measure(images))
    for name, turn in turns.items():
        turn.loader.close()
        middle, ratio = statistics.median(found[name]), median_ratio(found[name], found[AS_IT_WAS])
        lines.append(f"| {cores} | {name} | {middle:.0f} | {ratio:.2f} | {NEEDED / middle:.1f} |")
    return lines
