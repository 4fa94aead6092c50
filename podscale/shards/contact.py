"""Contact sheets: one picture of a split with images of every class, so that a person can look."""

import io
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from podscale.shards.shardset import ShardSet, Split

CELL_PIXELS, GAP_PIXELS, CAPTION_PIXELS = 96, 4, 14
"""Pixels: side of one picture, space between two, height of a class name."""
MIN_SMOOTHED_SIDE = 32
"""Pictures with a shorter side are enlarged without smoothing, as their pixels are what there is to see."""


def contact_sheet(directory: Path, split: str, path: Path, *, classes: int = 20, per_class: int = 10) -> Path:
    """Writes a PNG with up to `per_class` images of up to `classes` classes, a row each; returns `path`.

    Classes are taken at equal distances over the class map, images in the order of the shards.
    """
    shard_set = ShardSet.open(directory)
    samples = shard_set.split(split)
    count = min(classes, len(shard_set.classes))
    rows = np.linspace(0, len(shard_set.classes) - 1, count).round().astype(int)
    step = CELL_PIXELS + GAP_PIXELS
    sheet = Image.new("RGB", (GAP_PIXELS + per_class * step, GAP_PIXELS + count * (step + CAPTION_PIXELS)), "white")
    draw = ImageDraw.Draw(sheet)
    for line, label in enumerate(rows):
        top = GAP_PIXELS + line * (step + CAPTION_PIXELS)
        name = shard_set.classes[label].encode("latin-1", "replace").decode("latin-1")
        draw.text((GAP_PIXELS, top), name, fill="black")
        for column, i in enumerate(np.flatnonzero(samples.labels == label)[:per_class]):
            sheet.paste(_thumbnail(samples, int(i)), (GAP_PIXELS + column * step, top + CAPTION_PIXELS))
    sheet.save(path, "PNG")
    return path


def _thumbnail(samples: Split, i: int) -> Image.Image:
    with Image.open(io.BytesIO(samples.read(i).tobytes()), formats=("JPEG", "PNG")) as picture:
        picture.draft("RGB", (CELL_PIXELS, CELL_PIXELS))
        small = min(picture.size) < MIN_SMOOTHED_SIDE
        method = Image.Resampling.NEAREST if small else Image.Resampling.BILINEAR
        return ImageOps.pad(picture.convert("RGB"), (CELL_PIXELS, CELL_PIXELS), method=method, color="#e0e0e0")
