"""Synthetic photographs for the small forms: JPEGs of noise in an archive, and a shard set of them."""

import io
import tarfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from podscale.config import DataSection
from podscale.data import native
from podscale.errors import InputError
from podscale.stages import local


def write_archive(path: Path, *, images: int, side: int = 96) -> Path:
    """Write an archive of JPEGs with a folder, named like a synset, for each of two classes."""
    generator = np.random.default_rng(0)
    with tarfile.open(path, "w") as archive:
        for number in range(images):
            synset = f"n{number % 2:08d}"
            coarse = Image.fromarray(generator.integers(0, 256, (side // 8, side // 6, 3), dtype=np.uint8))
            file = io.BytesIO()
            coarse.resize((side * 4 // 3, side), Image.Resampling.BICUBIC).save(file, "JPEG")
            member = tarfile.TarInfo(f"{synset}/{synset}_{number}.JPEG")
            member.size = file.tell()
            file.seek(0)
            archive.addfile(member, file)
    return path


def read_archive(path: Path, count: int) -> Iterator[bytes]:
    """Yield the first `count` files of an archive."""
    with tarfile.open(path) as archive:
        files = (archive.extractfile(member) for member in archive if member.isfile())
        yield from (file.read() for file in islice(files, count) if file is not None)


def make_shards(folder: Path, *, images: int) -> Path:
    """Pack synthetic photographs; return the shard set's directory."""
    data = DataSection(source=str(write_archive(folder / "samples.tar", images=images)))
    sharded = local.shard(data, str(folder))
    assert sharded is not None, "a call without `part` packs the whole shard set"
    return Path(sharded.location)


def require_native() -> None:
    """Raise InputError if the loader `native` would be the reference loader."""
    if not native.is_available():
        raise InputError("the native extension is not usable", hint="`podscale doctor` prints the reason.")
