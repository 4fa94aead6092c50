"""Microseconds of CPU of the parts of reading one image."""

from collections.abc import Callable

import numpy as np

from benchmarks.input_host.candidates import cut_by_numpy
from benchmarks.measure import cpu_seconds
from podscale.config.schedule import CropSection
from podscale.data.crop import training_crops
from podscale.data.decode import crop_and_resize, decode, decode_rows
from podscale.data.shard_set import ShardSet

ROUNDS = 3


def parts(directory: str, images: int, size: int) -> list[str]:
    """Table of the parts, in one thread; the least of some rounds."""
    split = ShardSet.open(directory).split("train")
    rows = np.random.default_rng(0).permutation(len(split))[:images]
    widths, heights = (split.column(name)[rows].astype(np.int64) for name in ("width", "height"))
    views = training_crops(0, np.zeros_like(rows), split.keys[rows], widths, heights, crop=CropSection(), size=size)
    jobs = [
        (split.read(row), int(height), int(width), views[slot])
        for slot, (row, height, width) in enumerate(zip(rows.tolist(), heights, widths, strict=True))
    ]
    buffer = np.empty(3 * int((widths * heights).max()), dtype=np.uint8)
    whole = [decode(record) for record, *_ in jobs]
    measured: dict[str, Callable[[], object]] = {
        "decoding, as it was": lambda: [decode(record) for record, *_ in jobs],
        "decoding, whole, into memory used again": lambda: [decode(record, buffer) for record, *_ in jobs],
        "decoding, as far as the crop": lambda: [
            decode_rows(record, height, width, view.top + view.height, buffer) for record, height, width, view in jobs
        ],
        "cutting, resizing, mirroring, as it was": lambda: [
            cut_by_numpy(pixels, job[3], size).copy() for pixels, job in zip(whole, jobs, strict=True)
        ],
        "cutting, resizing, mirroring": lambda: [
            np.array(crop_and_resize(pixels, job[3], size)) for pixels, job in zip(whole, jobs, strict=True)
        ],
    }
    microseconds: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(ROUNDS):
        for name, work in measured.items():
            cpu = cpu_seconds()
            work()
            microseconds[name].append((cpu_seconds() - cpu) / len(jobs) * 1e6)
    share = float(np.mean((views.top + views.height) / heights))
    lines = [f"Crops end at {share:.0%} of the height on average. Microseconds of CPU for one image:", ""]
    lines += ["| part | µs |", "|---|---:|"]
    return [*lines, *(f"| {name} | {min(values):.0f} |" for name, values in microseconds.items()), ""]
