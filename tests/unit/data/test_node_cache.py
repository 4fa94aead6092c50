"""The node-local cache against a real HTTP server that truncates, delays and corrupts its answers."""

import fcntl
import gc
import hashlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podscale.config.run_config import RunConfig
from podscale.data.loaders.build_loader import open_shard_set
from podscale.data.manifest import Shard
from podscale.data.node_cache import ShardCache
from podscale.data.remote_files import ReadRetryPolicy
from podscale.data.sampler import build_sampler
from podscale.data.shard_set import ShardSet
from podscale.errors import PodscaleError
from podscale.util.processes import call_with_timeout
from tests.support.polling import until
from tests.support.refusals import refused
from tests.support.store import QUICK, Store, serve


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with serve(tmp_path) as served:
        yield served


def tars(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("*/train/*.tar"))


def read_all(split: Any) -> list[bytes]:
    return [split.read(i).tobytes() for i in range(len(split))]


def shard_bytes(directory: Path) -> list[int]:
    return [shard.bytes for shard in ShardSet.open(directory).manifest.splits["train"].shards]


def test_a_remote_set_reads_like_the_local_one(store, make_shard_set, tmp_path) -> None:
    local = ShardSet.open(make_shard_set(shards=3))
    cache = tmp_path / "cache"
    remote = ShardCache(cache, 10**9, QUICK).open(f"{store.url}/shards")
    assert remote.classes == local.classes
    assert tars(cache) == []
    for name in ("train", "validation"):
        assert read_all(remote.split(name)) == read_all(local.split(name))
        assert remote.split(name).source(3) == local.split(name).source(3)
    sent = store.bytes_sent.copy()
    again = ShardCache(cache, 10**9, QUICK).open(f"{store.url}/shards/")
    assert read_all(again.split("train")) == read_all(local.split("train"))
    assert [name for name in store.bytes_sent if store.bytes_sent[name] != sent[name]] == ["manifest.json"]


def test_shards_that_fit_into_memory_are_not_written_to_disk(store, make_shard_set, tmp_path) -> None:
    local, sizes = ShardSet.open(make_shard_set(shards=3)), shard_bytes(tmp_path / "shards")
    cache = tmp_path / "cache"
    split = ShardCache(cache, 10**9, QUICK).open(f"{store.url}/shards", memory_bytes=sizes[0] + sizes[1]).split("train")
    split.prefetch(np.arange(len(split)))
    for _ in range(2):
        assert read_all(split) == read_all(local.split("train"))
    assert split.cached_bytes == sizes[0] + sizes[1]
    assert tars(cache) == [split.shard_names[2]]
    until(lambda: [store.bytes_sent[name] for name in split.shard_names] == sizes, 10)  # each was sent once
    again = ShardCache(cache, 10**9, QUICK).open(f"{store.url}/shards", memory_bytes=10**9).split("train")
    again.prefetch(np.flatnonzero(again.column("shard") == 2))
    until(lambda: again.cached_bytes == sizes[2], 60)
    assert read_all(again) == read_all(local.split("train"))
    assert store.bytes_sent[split.shard_names[2]] == sizes[2], "a shard on the disk is copied from there"


def test_shards_in_memory_are_compared_with_the_manifest(store, make_shard_set, tmp_path) -> None:
    local = ShardSet.open(make_shard_set(shards=1))
    for faults, good in ((1, True), (1000, False)):
        store.faults = {("corrupt", ".tar"): faults}
        split = (
            ShardCache(tmp_path / "cache", 10**9, QUICK).open(f"{store.url}/shards", memory_bytes=10**9).split("train")
        )
        split.prefetch(np.arange(len(split)))
        if good:
            assert read_all(split) == read_all(local.split("train"))
            continue
        with refused("sha256", kind=PodscaleError):
            split.read(0)
        assert split.cached_bytes == 0
    assert tars(tmp_path / "cache") == []


@pytest.mark.parametrize("kind", ["cut", "slow", "corrupt", "error"])
def test_bad_responses_are_retried(kind, store, make_shard_set, tmp_path) -> None:
    local = ShardSet.open(make_shard_set(shards=1))
    store.faults = {(kind, ".tar"): 1, (kind, "train/index"): 1, (kind, "manifest.json"): kind != "corrupt"}
    store.timeout = 0.4
    policy = replace(QUICK, timeout_seconds=store.timeout, max_attempts=8) if kind == "slow" else QUICK
    remote = ShardCache(tmp_path / "cache", 10**9, policy).open(f"{store.url}/shards")
    assert read_all(remote.split("train")) == read_all(local.split("train"))
    assert not any(store.faults.values())
    assert not list((tmp_path / "cache").rglob("*.part"))


@pytest.mark.parametrize(
    ("kind", "expected"), [("error", "in 4 attempts"), ("corrupt", "sha256 differs from the manifest after 4 attempts")]
)
def test_lasting_failures_end_with_one_clear_error(kind, expected, store, make_shard_set, tmp_path) -> None:
    make_shard_set(shards=1)
    remote = ShardCache(tmp_path / "cache", 10**9, QUICK).open(f"{store.url}/shards")
    store.faults = {(kind, ".tar"): 1000}
    with refused(expected, kind=PodscaleError) as refusal:
        remote.split("train").read(0)
    assert refusal.error.field.startswith(f"{store.url}/shards/")
    assert tars(tmp_path / "cache") == []
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_permanent_failures_are_not_retried(store, make_shard_set, tmp_path) -> None:
    directory = make_shard_set(shards=1)
    with refused(field=f"{store.url}/nothing"):
        ShardCache(tmp_path / "cache", 10**9, QUICK).open(f"{store.url}/nothing")
    with refused(field="input.cache_bytes", got=1000):
        ShardCache(tmp_path / "cache", 1000, QUICK).open(f"{store.url}/shards").split("train").read(0)
    cache = ShardCache(tmp_path / "cache", 10**9, QUICK)
    store.faults = {("whole", ".tar"): 1000}
    with refused("range requests"):
        cache.open(f"{store.url}/shards").split("train").read(0)
    store.faults = {}
    shard = next((directory / "train").glob("*.tar"))
    shard.unlink()
    with refused("`podscale shard`", field=f"{store.url}/shards/train/{shard.name}"):
        cache.open(f"{store.url}/shards").split("train").read(0)
    with refused(field="nosuch://bucket/set"):
        cache.open("nosuch://bucket/set")


@pytest.mark.parametrize("is_default", [True, False])
def test_a_directory_that_cannot_be_created_is_refused(is_default, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    directory = None if is_default else tmp_path / "file" / "cache"
    with refused(field="input.cache_dir", got=directory and str(directory)):
        ShardCache(directory, 10**9)


def test_a_damaged_or_shortened_copy_is_downloaded_again(store, make_shard_set, tmp_path) -> None:
    local = ShardSet.open(make_shard_set(shards=1))
    cache = ShardCache(tmp_path / "cache", 10**9, QUICK)
    cache.open(f"{store.url}/shards").split("train").read(0)
    gc.collect()
    (copy,) = (tmp_path / "cache").glob("*/train/*.tar")
    with copy.open("r+b") as file:
        file.truncate(1000)
    assert read_all(cache.open(f"{store.url}/shards").split("train")) == read_all(local.split("train"))


def test_a_shard_that_is_evicted_while_it_is_being_opened_is_not_mapped(tmp_path, monkeypatch) -> None:
    """A removed file would be neither counted nor locked. The next attempt finds that the shard is gone."""
    path = tmp_path / "shard.tar"
    path.write_bytes(b"x" * 64)
    lock = fcntl.flock

    def evicted_first(file: Any, operation: int) -> None:
        path.unlink(missing_ok=True)
        lock(file, operation)

    monkeypatch.setattr("podscale.data.node_cache.fcntl.flock", evicted_first)
    cache = ShardCache(tmp_path / "cache", 10**9, QUICK)
    assert cache.map_if_cached(path, Shard("shard.tar", 1, 64, "")) is None


def test_eviction_takes_the_least_recently_used_and_never_one_in_use(store, make_shard_set, tmp_path) -> None:
    directory = make_shard_set(shards=6)
    sizes = shard_bytes(directory)
    cache = ShardCache(tmp_path / "cache", sum(sorted(sizes)[-3:]), QUICK)
    split = cache.open(f"{store.url}/shards").split("train")
    first_of = [int(np.flatnonzero(split.column("shard") == shard)[0]) for shard in range(6)]
    held = split.read(first_of[0])
    before = held.tobytes()
    other = cache.open(f"{store.url}/shards").split("train")  # as another process of the node would
    for shard in (1, 2, 3, 4, 5, 1, 2):
        other.read(first_of[shard])
        other._shards._maps.clear()
        gc.collect()
        time.sleep(0.01)
        names = tars(tmp_path / "cache")
        assert split.shard_names[0] in names
        assert split.shard_names[shard] in names
        assert sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.tar")) <= cache.limit_bytes
    assert set(names) >= {split.shard_names[i] for i in (0, 1, 2)}
    assert held.tobytes() == before


def test_a_cache_full_of_shards_in_use_is_one_readable_error(store, make_shard_set, tmp_path) -> None:
    sizes = shard_bytes(make_shard_set(shards=6))
    cache = ShardCache(tmp_path / "cache", sum(sorted(sizes)[-2:]), ReadRetryPolicy(0.3, 2, 0.01, 2**20))
    split = cache.open(f"{store.url}/shards").split("train")
    first_of = [int(np.flatnonzero(split.column("shard") == shard)[0]) for shard in range(3)]
    views = [split.read(first_of[0]), split.read(first_of[1])]
    with refused("input.order=blocked", field="input.cache_bytes", got=cache.limit_bytes, kind=PodscaleError):
        split.read(first_of[2])
    assert len(views) == 2


def test_a_set_larger_than_the_cache_can_be_read_in_any_order(store, make_shard_set, tmp_path) -> None:
    directory = make_shard_set(shards=12)
    local = ShardSet.open(directory).split("train")
    cache = ShardCache(tmp_path / "cache", sum(sorted(shard_bytes(directory))[-6:]), QUICK)
    split = cache.open(f"{store.url}/shards").split("train")
    for row in np.random.default_rng(0).permutation(len(split)).tolist():
        assert split.read(row).tobytes() == local.read(row).tobytes()


def test_partial_files_of_killed_processes_are_removed_and_those_of_running_ones_kept(
    store, make_shard_set, tmp_path
) -> None:
    make_shard_set(shards=1)
    cache = ShardCache(tmp_path / "cache", 10**9, QUICK)
    split = cache.open(f"{store.url}/shards").split("train")
    dead, alive = (split.directory / f"shard.tar.{name}.part" for name in ("dead", "alive"))
    dead.write_bytes(b"x")
    with alive.open("wb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        split.read(0)
        assert not dead.exists()
        assert alive.exists()


def test_several_processes_download_each_shard_once(store, make_shard_set, tmp_path) -> None:
    directory = make_shard_set(shards=4)
    local = ShardSet.open(directory).split("train")
    store.faults = {("corrupt", ".tar"): 1}
    program = (
        "import sys, hashlib\n"
        "from podscale.data.node_cache import ShardCache\n"
        "from podscale.data.remote_files import ReadRetryPolicy\n"
        f"cache = ShardCache({str(tmp_path / 'cache')!r}, 10**9, ReadRetryPolicy(2.0, 6, 0.01, 2**20))\n"
        f"split = cache.open('{store.url}/shards').split('train')\n"
        "print(hashlib.sha256(b''.join(split.read(i).tobytes() for i in range(len(split)))).hexdigest())\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert answers == {hashlib.sha256(b"".join(read_all(local))).hexdigest()}
    sizes = shard_bytes(directory)
    sent = sum(store.bytes_sent[name] for name in local.shard_names)
    assert sent - sum(sizes) in sizes  # each shard once, and the corrupted one a second time


def test_a_killed_downloader_leaves_no_shard_and_no_lock(store, make_shard_set, tmp_path) -> None:
    local = ShardSet.open(make_shard_set(shards=1))
    cache_dir = tmp_path / "cache"
    store.faults = {("slow", ".tar"): 1}
    program = (
        "from podscale.data.node_cache import ShardCache\n"
        f"split = ShardCache({str(cache_dir)!r}, 10**9).open('{store.url}/shards').split('train')\n"
        "split.read(0)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    while not list(cache_dir.glob("*/train/*.part")):
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert tars(cache_dir) == []
    split = ShardCache(cache_dir, 10**9, QUICK).open(f"{store.url}/shards").split("train")
    assert read_all(split) == read_all(local.split("train"))
    assert not list(cache_dir.glob("*/train/*.part"))


def test_open_shard_set_and_prefetch_download_a_hosts_own_shards(store, make_shard_set, tmp_path) -> None:
    directory = make_shard_set(shards=4)
    config = RunConfig.model_validate(
        {
            "input": {"order": "blocked", "groups": 2, "cache_dir": str(tmp_path / "cache")},
            "train": {"global_batch": 8},
            "launch": {"nodes": 2},
        }
    )
    assert isinstance(open_shard_set(str(directory), config), ShardSet)
    assert len(open_shard_set(f"file://{directory}", config).split("train")) == 48
    split = open_shard_set(f"{store.url}/shards", config).split("train")
    rows = build_sampler(config, split).rows_of_host(1)
    expected = sorted({split.shard_names[shard] for shard in split.column("shard")[rows]})
    assert len(expected) == 2
    split.prefetch(rows)
    end = time.monotonic() + 20
    while tars(tmp_path / "cache") != expected and time.monotonic() < end:
        time.sleep(0.02)
    assert tars(tmp_path / "cache") == expected
    sent = store.bytes_sent.copy()
    for row in rows.tolist():
        split.read(row)
    assert store.bytes_sent == sent


def test_prefetch_never_evicts(store, make_shard_set, tmp_path) -> None:
    directory = make_shard_set(shards=4)
    cache = ShardCache(tmp_path / "cache", sum(sorted(shard_bytes(directory))[-2:]), QUICK)
    split = cache.open(f"{store.url}/shards").split("train")
    split._shards._prefetch([split.directory / name for name in split.shard_names], with_indexes=False)
    assert tars(tmp_path / "cache") == split.shard_names[:2]


def test_call_with_timeout_returns_raises_and_times_out() -> None:
    assert call_with_timeout(5, lambda: 7) == 7
    with pytest.raises(KeyError):
        call_with_timeout(5, lambda: {}["a"])
    with pytest.raises(TimeoutError):
        call_with_timeout(0.05, lambda: time.sleep(1))
