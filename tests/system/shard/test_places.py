"""Targets that cannot be written: a full disk and a read-only one, on real mounts (these need root)."""

import ctypes
import errno
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from podscale.config.data import DataSection
from podscale.data.manifest import MANIFEST_FILE
from podscale.data.sharding.build_shard_set import build_shard_set
from podscale.data.sharding.pack import Packer, PackTask
from podscale.data.sharding.shard_plan import plan_shards
from podscale.data.sharding.validate_image import ImageRules
from podscale.data.sources import open_source
from tests.support.refusals import refused

LIBC = ctypes.CDLL(None, use_errno=True)
READ_ONLY, REMOUNT = 1, 32
Mount = Callable[[Path, str], None]


@pytest.fixture
def mount() -> Iterator[Mount]:
    """Mount a tmpfs with the given options; skip if this process may not mount."""
    mounted: list[Path] = []

    def tmpfs(path: Path, options: str) -> None:
        path.mkdir(parents=True, exist_ok=True)
        if LIBC.mount(b"tmpfs", bytes(path), b"tmpfs", 0, options.encode()) != 0:
            pytest.skip(f"cannot mount a tmpfs here: {os.strerror(ctypes.get_errno())}")
        mounted.append(path)

    yield tmpfs
    for path in mounted:
        LIBC.umount2(bytes(path), 2)  # MNT_DETACH


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    noise = np.random.default_rng(0).integers(0, 256, (300, 320, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, "JPEG", quality=93)
    for number in range(40):
        path = tmp_path / "images" / "ab"[number % 2] / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(out.getvalue() + b"%d" % number)
    return tmp_path / "images"


def files(directory: Path) -> list[str]:
    return [path.name for path in directory.rglob("*") if path.is_file()]


def test_too_little_disk_space_is_refused_before_packing(folder: Path, tmp_path: Path, mount: Mount) -> None:
    mount(tmp_path / "small", "size=2m")
    out = tmp_path / "small" / "set"
    with refused("4 MiB", "2 MiB", field=out):
        build_shard_set(DataSection(source=str(folder)), out, workers=1)
    assert files(out) == ["plan"]


def test_a_disk_that_fills_up_keeps_what_is_finished(folder: Path, tmp_path: Path, mount: Mount) -> None:
    mount(tmp_path / "small", "size=3m")
    out = tmp_path / "small" / "set"
    data = DataSection(source=str(folder), shard_bytes=2**20)
    source = open_source(data)
    plan = plan_shards(source, data)
    for name in ("train", "records/train"):
        (out / name).mkdir(parents=True)
    packer = Packer(out, data, ImageRules.from_section(data))

    def pack_until_full() -> None:
        for shard in range(plan.shard_count("train")):
            packer.pack(plan, source, PackTask("train", shard), lambda progress: None)

    with refused(os.strerror(errno.ENOSPC)):
        pack_until_full()
    shards = [name for name in files(out) if name.endswith(".tar")]
    assert shards
    assert all(name.endswith((".tar", ".record", ".decode")) for name in files(out)), "a temporary file is left"
    assert LIBC.mount(b"tmpfs", bytes(tmp_path / "small"), b"tmpfs", REMOUNT, b"size=20m") == 0
    result = build_shard_set(data, out, workers=1)  # with enough space, the same set continues
    assert result.existing_shards >= len(shards)
    assert result.manifest.count == 40


def test_a_read_only_target(folder: Path, tmp_path: Path, mount: Mount) -> None:
    mount(tmp_path / "fixed", "ro")
    with refused(os.strerror(errno.EROFS)):
        build_shard_set(DataSection(source=str(folder)), tmp_path / "fixed" / "set", workers=1)


def test_a_complete_set_on_a_read_only_mount_is_used(folder: Path, tmp_path: Path, mount: Mount) -> None:
    mount(tmp_path / "disk", "size=20m")
    data = DataSection(source=str(folder))
    first = build_shard_set(data, tmp_path / "disk" / "set", workers=1)
    assert LIBC.mount(b"tmpfs", bytes(tmp_path / "disk"), b"tmpfs", REMOUNT | READ_ONLY, b"") == 0
    again = build_shard_set(data, tmp_path / "disk" / "set", workers=1)
    assert again.reused
    assert again.manifest == first.manifest


def test_a_file_in_the_way(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "set").write_text("not a directory")
    with refused(tmp_path / "set"):
        build_shard_set(DataSection(source=str(folder)), tmp_path / "set", workers=1)
    assert not (tmp_path / "set" / MANIFEST_FILE).exists()
