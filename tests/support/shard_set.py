"""Writer of a tiny valid shard set with Python's tarfile, so that tests need no packer."""

import hashlib
import io
import json
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from PIL import Image

from podscale.data import index
from podscale.data.manifest import SCHEMA_VERSION, Shard, ShardSetManifest, SplitSummary, classes_sha256


@dataclass(frozen=True)
class Sample:
    """One encoded image and its class; its size is read from the bytes unless given (for damaged records)."""

    image: bytes
    label: int
    size: tuple[int, int] | None = None  # height, width
    key: int | None = None
    source: bytes | None = None


def encode_image(pixels: np.ndarray, *, kind: str = "JPEG", **options: object) -> bytes:
    """Encode uint8 pixels [h, w], [h, w, 3] or [h, w, 4] (RGBA for PNG, CMYK for JPEG)."""
    mode = "CMYK" if kind == "JPEG" and pixels.ndim == 3 and pixels.shape[2] == 4 else None
    image = Image.frombytes(mode, pixels.shape[1::-1], pixels.tobytes()) if mode else Image.fromarray(pixels)
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def smooth_pixels(seed: int, height: int, width: int, channels: int = 3) -> np.ndarray:
    """Return a random picture with structure at several scales, uint8 [height, width, channels] or [height, width]."""
    generator = np.random.default_rng(seed)
    small = generator.integers(0, 256, (4, 5, channels), dtype=np.uint8)
    layers = [
        Image.fromarray(small[..., channel]).resize((width, height), Image.Resampling.BICUBIC)
        for channel in range(channels)
    ]
    noise = generator.integers(-20, 21, (height, width, channels))
    pixels = np.clip(np.stack([np.asarray(layer) for layer in layers], -1) + noise, 0, 255).astype(np.uint8)
    return pixels[..., 0] if channels == 1 else pixels


def write_split(directory: Path, samples: Sequence[Sample], classes: int, shards: int, first_key: int) -> SplitSummary:
    directory.mkdir(parents=True)
    rows: dict[str, list[int]] = {name: [] for name in index.INDEX_COLUMNS}
    sources = []
    described = []
    for shard in range(shards):
        name = f"shard-{shard:05d}-of-{shards:05d}.tar"
        chosen = range(shard * len(samples) // shards, (shard + 1) * len(samples) // shards)
        with tarfile.open(directory / name, "w", format=tarfile.USTAR_FORMAT) as tar:
            for i in chosen:
                sample = samples[i]
                key = first_key + i if sample.key is None else sample.key
                png = sample.image.startswith(b"\x89PNG")
                sources.append(sample.source or f"image-{key}".encode())
                member = tarfile.TarInfo(f"{key:08d}.{'png' if png else 'jpg'}")
                member.size = len(sample.image)
                offset = tar.offset + 512  # offset of this member's bytes, after its header
                tar.addfile(member, io.BytesIO(sample.image))
                label = tarfile.TarInfo(f"{key:08d}.cls")
                label.size = len(str(sample.label))
                tar.addfile(label, io.BytesIO(str(sample.label).encode()))
                height, width = sample.size or image_size(sample.image)
                values = (key, offset, len(sample.image), shard, sample.label, height, width)
                is_progressive = not png and b"\xff\xc2" in sample.image[:1000]  # marker of such a frame
                values += (index.PNG if png else index.JPEG, index.ImageFlag.PROGRESSIVE if is_progressive else 0)
                for column, value in zip(index.INDEX_COLUMNS, values, strict=True):
                    rows[column].append(value)
        content = (directory / name).read_bytes()
        described.append(Shard(name, len(chosen), len(content), hashlib.sha256(content).hexdigest()))
    index.write_index(directory / "index", rows)
    (directory / "sources").write_bytes(index.SourceNames.encode(sources))
    return SplitSummary(
        count=len(samples),
        bytes=sum(shard.bytes for shard in described),
        class_counts=tuple(np.bincount(rows["label"], minlength=classes).tolist()),
        index_sha256=hashlib.sha256((directory / "index").read_bytes()).hexdigest(),
        shards=tuple(described),
    )


def finish(
    directory: Path,
    summaries: dict[str, SplitSummary],
    classes: list[str],
    *,
    source: str = "",
    rejects: Sequence[tuple[str, str]] = (),
    duplicates: Mapping[str, int] | None = None,
) -> None:
    """Complete a set of written splits; `rejects` are (source, reason) of training images."""
    (directory / "classes.json").write_text(json.dumps(classes))
    lines = [{"source": name, "reason": reason, "detail": "", "split": "train"} for name, reason in rejects]
    (directory / "rejects.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {"source": source} if source else {}
    counts = dict(Counter(reason for _, reason in rejects))
    checksum = classes_sha256(classes)
    ShardSetManifest(
        SCHEMA_VERSION, "d" * 16, "e" * 16, options, checksum, summaries, rejects=counts, duplicates=duplicates or {}
    ).write(directory)


@lru_cache(maxsize=4096)
def image_size(data: bytes) -> tuple[int, int]:
    """Return (height, width) of an encoded image."""
    width, height = Image.open(io.BytesIO(data)).size
    return height, width


def make_shard_set(
    directory: Path,
    splits: Mapping[str, Sequence[Sample]] | None = None,
    *,
    shards: int = 2,
    classes: Sequence[str] = ("ant", "bee", "cat", "dog"),
) -> Path:
    """Write a complete shard set of these samples by split; return its directory. Keys are numbered over all splits.

    The default has 48 training and 20 validation JPEGs of varied sizes in 4 classes.
    """
    if splits is None:
        splits = {split: varied_samples(count, len(classes)) for split, count in SIZES.items()}
    summaries, key = {}, 0
    for split, samples in splits.items():
        summaries[split] = write_split(directory / split, samples, len(classes), shards, key)
        key += len(samples)
    finish(directory, summaries, list(classes))
    return directory


SIZES = {"train": 48, "validation": 20}


@cache  # most tests of loaders ask for the same ones
def varied_samples(count: int, classes: int) -> tuple[Sample, ...]:
    """Return JPEGs of 24 to 90 px a side, every fifth one gray."""
    generator = np.random.default_rng(0)
    samples = []
    for i in range(count):
        height, width = generator.integers(24, 91, 2).tolist()
        pixels = smooth_pixels(i, height, width, 1 if i % 5 == 4 else 3)
        samples.append(Sample(encode_image(pixels, quality=90), i % classes))
    return tuple(samples)
