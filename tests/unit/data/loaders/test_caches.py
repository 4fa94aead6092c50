"""Input caches: the same samples and pixels as without them, within their limits, on each host only its own shards."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podscale.config.preflight.host import input_cache_bytes
from podscale.data.loaders import cpu
from podscale.data.loaders.decoded_cache import OwnImages
from podscale.data.memory_cache import MemoryCache
from podscale.data.shard_set import LocalShardMapper, ShardSet
from tests.support.loading import assert_same_batches, document, open_loader, train_and_close
from tests.support.logs import logged
from tests.support.polling import until
from tests.support.refusals import invalid, refused

LARGE = 2**40
CACHES = {
    "records": {"record_cache_bytes": LARGE},
    "some records": {"record_cache_bytes": 80_000},
    "decoded": {"decoded_cache_bytes": LARGE},
    "some decoded": {"decoded_cache_bytes": 100_000},
    "both": {"record_cache_bytes": LARGE, "decoded_cache_bytes": 100_000},
}
BLOCKED = {"order": "blocked", "groups": 4}


@pytest.mark.parametrize("order", [{}, BLOCKED], ids=["global", "blocked"])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("cache", CACHES)
def test_the_same_batches_as_without_a_cache(cache, workers, order, mixed) -> None:
    """Three epochs, from the start and from the middle; damaged records are counted and substituted in the same way."""
    plain = document(input={"max_bad_rate": 1.0, **order})
    cached = document(input={"max_bad_rate": 1.0, "workers": workers, **order, **CACHES[cache]})
    expected, reference = train_and_close(plain, mixed, 0, 18)
    found, loader = train_and_close(cached, mixed, 0, 18)
    assert_same_batches(expected, found)
    assert loader.bad_records == reference.bad_records == 9
    assert_same_batches(expected[9:], train_and_close(cached, mixed, 9, 18)[0])
    for name, limit in (("records", "record_cache_bytes"), ("decoded", "decoded_cache_bytes")):
        asked = CACHES[cache].get(limit, 0)
        until(lambda name=name, asked=asked: bool(loader.cached_bytes[name]) == bool(asked), 60)
        assert loader.cached_bytes[name] <= asked
    assert not any(reference.cached_bytes.values())


def test_processes_with_caches_make_up_the_same_global_batches(mixed) -> None:
    config = document(input={"max_bad_rate": 1.0, **BLOCKED, **CACHES["both"]}, launch={"nodes": 2})
    plain = document(input={"max_bad_rate": 1.0, **BLOCKED})
    whole = train_and_close(plain, mixed, 0, 12)[0]
    parts = [
        train_and_close(config, mixed, 0, 12, ranks=range(2 * host, 2 * host + 2), world=4)[0] for host in range(2)
    ]
    for batch, *pieces in zip(whole, *parts, strict=True):
        by_key = {key: image for piece in pieces for key, image in zip(piece.keys.tolist(), piece.images, strict=True)}
        assert sorted(by_key) == sorted(set(batch.keys.tolist()))
        assert all(
            np.array_equal(by_key[key], image) for key, image in zip(batch.keys.tolist(), batch.images, strict=True)
        )


class Spy:
    """Decoder that records how many rows of each image were decoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[tuple[int, int]] = []
        decode_rows, lock = cpu.decode_rows, threading.Lock()

        def spy(record: Any, height: int, width: int, rows: int, buffer: Any) -> Any:
            with lock:
                self.rows.append((rows, height))
            return decode_rows(record, height, width, rows, buffer)

        monkeypatch.setattr(cpu, "decode_rows", spy)


def test_a_cached_image_is_decoded_once(make_shard_set, monkeypatch) -> None:
    spy = Spy(monkeypatch)
    directory = make_shard_set()
    sizes = ShardSet.open(directory).split("train")
    pixels = 3 * int((sizes.column("height").astype(int) * sizes.column("width")).sum())
    alone = {"decoded_cache_bytes": pixels, "workers": 1}  # two threads may decode an image at the same time
    _, loader = train_and_close(document(input=alone), directory, 0, 18)
    assert len(spy.rows) == 48
    assert all(rows == height for rows, height in spy.rows), "it is kept whole, whatever crop comes first"
    assert loader.cached_bytes["decoded"] == pixels


def test_what_does_not_fit_is_decoded_as_far_as_its_crop(make_shard_set, monkeypatch) -> None:
    spy = Spy(monkeypatch)
    _, loader = train_and_close(document(input={"decoded_cache_bytes": 40_000}), make_shard_set(), 0, 18)
    kept = sum(rows == height for rows, height in spy.rows[:48])
    assert 20_000 < loader.cached_bytes["decoded"] <= 40_000
    assert kept > 0
    assert 96 < len(spy.rows) < 144, "three epochs, less what was kept"
    assert sum(rows < height for rows, height in spy.rows) > 60


def test_uncached_images_share_one_decode_buffer(make_shard_set) -> None:
    """An image that is not kept is in a buffer of its thread, which the next image overwrites."""
    split = ShardSet.open(make_shard_set()).split("train")
    decoded = cpu.CachingDecoder(split)
    first = decoded(int(np.argmax(split.column("height").astype(int) * split.column("width"))))
    second = decoded(3)
    assert np.shares_memory(first, second)
    kept = cpu.CachingDecoder(split, OwnImages(LARGE))
    assert not np.shares_memory(kept(3), kept(4))
    assert kept(3) is kept(3)


class Opened(LocalShardMapper):
    """Local shards that record which paths are mapped and which are read."""

    def __init__(self) -> None:
        super().__init__()
        self.mapped: set[str] = set()
        self.brought: list[str] = []

    def __call__(self, path: Path) -> Any:
        self.mapped.add(path.name)
        return super().__call__(path)

    def read(self, path: Path) -> Any:
        self.brought.append(path.name)
        return super().read(path)


@pytest.mark.parametrize("limit", [0, LARGE])
def test_a_host_opens_its_own_shards_and_no_other(limit, make_shard_set) -> None:
    directory = make_shard_set(shards=4)
    config = document(input=BLOCKED, launch={"nodes": 2})
    seen = []
    for host in range(2):
        opened = Opened()
        shards = MemoryCache(opened, limit) if limit else opened
        split = ShardSet.open(directory, shards).split("train")
        with open_loader(config, split, ranks=range(host, host + 1), world=2) as loader:
            list(loader.batches(0, 18))
            if limit:
                until(lambda opened=opened: len(opened.brought) == 2, 60)
                assert len(set(opened.brought)) == 2, "each is read once"
                assert opened.mapped <= set(opened.brought)
        seen.append(opened.mapped | set(opened.brought))
    assert [len(names) for names in seen] == [2, 2]
    assert not seen[0] & seen[1]


def test_shards_that_fit_are_cached_and_the_others_are_mapped(make_shard_set) -> None:
    directory = make_shard_set(shards=4)
    plain = ShardSet.open(directory)
    sizes = [shard.bytes for shard in plain.manifest.splits["train"].shards]
    opened = Opened()
    shards = MemoryCache(opened, sizes[0] + sizes[2])
    split = ShardSet.open(directory, shards).split("train")
    split.prefetch(np.flatnonzero(np.isin(split.column("shard"), [0, 2, 3])))
    until(lambda: split.cached_bytes == sizes[0] + sizes[2], 60)
    assert opened.brought == [split.shard_names[0], split.shard_names[2]]
    reference = plain.split("train")
    assert all(np.array_equal(split.read(i), reference.read(i)) for i in range(len(split)))
    assert opened.mapped == {split.shard_names[1], split.shard_names[3]}
    assert not split.read(0).flags.writeable


def test_a_shard_that_cannot_be_brought_is_read_where_it_is(make_shard_set, caplog) -> None:
    directory = make_shard_set(shards=2)

    slow = OSError("the volume is slow today")

    class Failing(Opened):
        def read(self, path: Path) -> Any:
            raise slow

    opened = Failing()
    split = ShardSet.open(directory, MemoryCache(opened, LARGE)).split("train")
    split.prefetch(np.arange(len(split)))
    until(lambda: any(slow in arguments for arguments in logged(caplog)), 60)
    assert all(len(split.read(i)) for i in range(len(split)))
    assert split.cached_bytes == 0


def test_a_cut_short_shard_is_an_error(make_shard_set, monkeypatch) -> None:
    directory = make_shard_set(shards=1)
    path = directory / "train" / ShardSet.open(directory).split("train").shard_names[0]
    size = path.stat().st_size
    monkeypatch.setattr("podscale.data.shard_set._shard_bytes", lambda _: size + 1)
    with refused("truncated", field=path):
        LocalShardMapper().read(path)
    with refused(os.strerror(errno.ENOENT), field=path.with_name("no.tar")):
        LocalShardMapper().read(path.with_name("no.tar"))


def test_limits_that_make_no_sense(make_shard_set, monkeypatch) -> None:
    directory = make_shard_set(shards=1)
    with refused(field="input.record_cache_bytes", got=10):
        train_and_close(document(input={"record_cache_bytes": 10}), directory, 0, 1)
    for name in ("record_cache_bytes", "decoded_cache_bytes"):
        with invalid(field=f"input.{name}", got=-1):
            document(input={name: -1})
    for name in ("dali", "nvjpeg"):
        with invalid(f"input.loader={name}", field="input.decoded_cache_bytes", got=1):
            document(name, input={"decoded_cache_bytes": 1})
    monkeypatch.setattr("podscale.data.loaders.build_loader.resolve_loader", lambda name, device, **_: "nvjpeg")
    with refused("nvjpeg", field="input.decoded_cache_bytes", got=1):
        train_and_close(document("auto", input={"decoded_cache_bytes": 1}), directory, 0, 1)
    both = document(input={"record_cache_bytes": 5, "decoded_cache_bytes": 7})
    assert input_cache_bytes(both, 4) == 48
    large = document(input={"decoded_cache_bytes": 2**30})
    page_tables = 8 * (8 * 2**30) // 512  # 8 processes map 8 GiB
    assert input_cache_bytes(large, 8) == 8 * 2**30 + page_tables


def test_hosts_without_torch_can_read(make_shard_set) -> None:
    """A TPU image has neither torch nor torchvision nor DALI."""
    program = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'torchvision', 'nvidia', 'jax'):\n"
        "            raise ImportError(f'{name} is not in this image')\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from podscale.config.run_config import RunConfig\n"
        "from podscale.data import build_evaluation_loader, build_loader, open_shard_set\n"
        "from podscale.data.sampler import build_sampler\n"
        "from podscale.training.schedules import image_phases\n"
        f"config = RunConfig.model_validate({document(input=CACHES['both']).model_dump()!r})\n"
        f"shards = open_shard_set({str(make_shard_set())!r}, config)\n"
        "split = shards.split('train')\n"
        "order, phases = build_sampler(config, split), image_phases(config, len(split))\n"
        "loader = build_loader(config, split, order, phases=phases, ranks=range(1), world_size=1, device='cpu')\n"
        "print(sum(len(batch) for batch in loader.batches(0, 3)))\n"
        "loader.close()\n"
        "split = shards.split('validation')\n"
        "loader = build_evaluation_loader(config, split, ranks=range(1), world_size=1, device='cpu')\n"
        "print(sum(len(batch) for batch in loader.batches(0, 2)))\n"
        "loader.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["24", "12"]
