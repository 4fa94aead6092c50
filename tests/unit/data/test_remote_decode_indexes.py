"""Decode indexes of remote sets: fetched beside their shards from a real HTTP server, and never in the way."""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podscale.config.run_config import RunConfig
from podscale.data import native
from podscale.data.decode_index import SUFFIX, decode_index_path, write_decode_index
from podscale.data.loaders.build_loader import open_shard_set
from podscale.data.node_cache import ShardCache
from podscale.data.remote_files import ReadRetryPolicy
from podscale.data.shard_set import ShardSet
from tests.support.loading import add_indexes, assert_same_batches, document, needs_native, open_loader
from tests.support.polling import until
from tests.support.store import QUICK, Store, serve

pytestmark = needs_native

LARGE = 10**9


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with serve(tmp_path) as served:
        yield served


@pytest.fixture
def directory(make_shard_set) -> Path:
    """Make a set of three shards a split with decode indexes."""
    made: Path = make_shard_set(shards=3)
    add_indexes(made)
    return made


def opened(store: Store, cache: Path, *, limit: int = LARGE, memory: int = 0, policy: ReadRetryPolicy = QUICK) -> Any:
    return ShardCache(cache, limit, policy).open(f"{store.url}/shards", memory).split("train")


def cached(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob(f"*{SUFFIX}"))


def requests(store: Store) -> dict[str, int]:
    return {name: count for name, count in store.requests.items() if name.endswith(SUFFIX)}


def read_all(split: Any) -> list[int]:
    """Read all records; return the length of each image's index."""
    rows = np.arange(len(split))
    for row in rows.tolist():
        split.read(row)
    return [len(index) for index in split.decode_indexes(rows)]


def lengths(directory: Path) -> list[int]:
    return read_all(ShardSet.open(directory).split("train"))


@pytest.mark.parametrize("memory", [0, LARGE])
def test_indexes_are_fetched_beside_their_shards_once(memory, store, directory, tmp_path) -> None:
    cache = tmp_path / "cache"
    split = opened(store, cache, memory=memory)
    split.prefetch(np.arange(len(split)), with_indexes=True)
    assert read_all(split) == lengths(directory)
    assert min(lengths(directory)) > 0
    names = [decode_index_path(Path(name)).name for name in split.shard_names]
    until(lambda: cached(cache) == names, 10)
    assert requests(store) == dict.fromkeys(names, 1)
    assert read_all(opened(store, cache, memory=memory)) == lengths(directory)
    assert requests(store) == dict.fromkeys(names, 1), "the next process of the node finds them"


@pytest.mark.parametrize("memory", [0, LARGE])
def test_prefetching_a_shard_fetches_its_index(memory, store, directory, tmp_path) -> None:
    split = opened(store, tmp_path / "cache", memory=memory)
    split.prefetch(np.flatnonzero(split.column("shard") == 1), with_indexes=True)
    until(lambda: cached(tmp_path / "cache") == [decode_index_path(Path(split.shard_names[1])).name], 10)


def test_a_remote_training_decodes_from_its_indexes(store, directory, tmp_path) -> None:
    batches, refusals = [], []
    for name in ("reference", "native"):
        cache = tmp_path / name
        config: RunConfig = document(name, input={"cache_dir": str(cache)})
        split = open_shard_set(f"{store.url}/shards", config).split("train")
        with open_loader(config, split) as loader:
            batches.append(list(loader.batches(0, 6)))
            refusals.append(loader.native_refusals)
        assert len(cached(cache)) == (3 if name == "native" else 0), "the reference loader wants none"
    assert_same_batches(*batches)
    assert refusals[1]["index"] == 0


def test_only_the_loader_that_uses_indexes_prefetches_them(store, directory, tmp_path) -> None:
    for name, count in (("reference", 0), ("native", 3)):
        cache = tmp_path / name
        config = document(name, input={"cache_dir": str(cache)})
        with open_loader(config, open_shard_set(f"{store.url}/shards", config).split("train")):
            until(lambda cache=cache: len(list(cache.rglob("*.tar"))) == 3, 10)
            until(lambda cache=cache, count=count: len(cached(cache)) == count, 10)
        assert sum(requests(store).values()) == count


def test_the_indexes_that_the_store_has_are_used(store, directory, tmp_path) -> None:
    """Entries with a right checksum for other images: the extension refuses each, so they reached it."""
    local = ShardSet.open(directory)
    for split_name, summary in local.manifest.splits.items():
        for number, shard in enumerate(summary.shards):
            rows = np.flatnonzero(local.split(split_name).column("shard") == number)
            images = [index.tobytes() for index in local.split(split_name).decode_indexes(rows)]
            write_decode_index(directory / split_name / shard.name, shard.sha256, 2, images[1:] + images[:1])
    config = document("native", input={"cache_dir": str(tmp_path / "cache")})
    with open_loader(config, open_shard_set(f"{store.url}/shards", config).split("train")) as loader:
        assert len(list(loader.batches(0, 6))) == 6
        assert loader.native_refusals["index"] == 48


def test_a_set_without_indexes_costs_one_request(store, make_shard_set, tmp_path, caplog) -> None:
    caplog.set_level(logging.DEBUG, "podscale.data")
    make_shard_set(shards=6)
    assert not any(read_all(opened(store, tmp_path / "cache")))
    assert sum(requests(store).values()) == 1
    assert caplog.text.count("does not exist: decoding without indexes") == 1


def test_without_the_extension_none_is_fetched(store, directory, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(native, "_native", None)
    config = document("native", input={"cache_dir": str(tmp_path / "cache")})
    with open_loader(config, open_shard_set(f"{store.url}/shards", config).split("train")) as loader:
        assert len(list(loader.batches(0, 6))) == 6
    assert requests(store) == {}


@pytest.mark.parametrize("kind", ["error", "slow", "cut"])
def test_a_store_that_fails_does_not_end_the_training(kind, store, directory, tmp_path, caplog) -> None:
    store.faults, store.timeout = {(kind, SUFFIX): 1000}, 0.3
    policy = ReadRetryPolicy(store.timeout, 4, 0.01, 2**20)
    split = opened(store, tmp_path / "cache", policy=policy)
    with open_loader(document("native"), split) as loader:
        batches = list(loader.batches(0, 6))
    with open_loader(document(), ShardSet.open(directory).split("train")) as loader:
        assert_same_batches(list(loader.batches(0, 6)), batches)
    assert caplog.text.count("decoding without indexes") == 1
    assert cached(tmp_path / "cache") == []
    assert not list((tmp_path / "cache").rglob("*.part"))
    assert sum(requests(store).values()) <= 2 * 2, "two attempts, of two threads at most"


def test_a_transient_failure_is_retried(store, directory, tmp_path) -> None:
    store.faults = {("error", SUFFIX): 1}
    assert read_all(opened(store, tmp_path / "cache")) == lengths(directory)


@pytest.mark.parametrize("problem", ["damaged", "of another shard"])
def test_an_unusable_index_is_not_stored_and_hides_no_other(problem, store, directory, tmp_path, caplog) -> None:
    first, second = (decode_index_path(directory / "train" / f"shard-0000{number}-of-00003.tar") for number in (0, 1))
    first.write_bytes(second.read_bytes() if problem == "of another shard" else second.read_bytes()[:100])
    split = opened(store, tmp_path / "cache")
    found = read_all(split)
    assert [length > 0 for length in found] == (split.column("shard") > 0).tolist()
    assert cached(tmp_path / "cache") == ["shard-00001-of-00003.decode", "shard-00002-of-00003.decode"]
    assert f"{store.url}/shards/train/{first.name}" in caplog.text
    assert read_all(split) == found
    assert requests(store)[first.name] == 1


def test_an_index_that_was_added_later_is_fetched_for_cached_shards(store, make_shard_set, tmp_path) -> None:
    directory, cache = make_shard_set(shards=3), tmp_path / "cache"
    read_all(opened(store, cache))
    add_indexes(directory)
    sent = {name: count for name, count in store.bytes_sent.items() if name.endswith(".tar")}
    assert read_all(opened(store, cache)) == lengths(directory)
    assert {name: store.bytes_sent[name] for name in sent} == sent, "the shards are not downloaded again"


def test_a_damaged_copy_is_fetched_again_by_the_next_start(store, directory, tmp_path) -> None:
    cache = tmp_path / "cache"
    read_all(opened(store, cache))
    next(cache.rglob(f"*00001-of-*{SUFFIX}")).write_bytes(b"damaged")
    split = opened(store, cache)
    assert [length > 0 for length in read_all(split)] == (split.column("shard") != 1).tolist()
    assert read_all(opened(store, cache)) == lengths(directory)


def test_indexes_count_towards_the_limit_and_evict_nothing(store, directory, tmp_path) -> None:
    """A cache that holds the shards and one index: it keeps both limits, and the images without an index are read."""
    cache = tmp_path / "cache"
    shards = [shard.bytes for shard in ShardSet.open(directory).manifest.splits["train"].shards]
    size = max(path.stat().st_size for path in directory.glob(f"train/*{SUFFIX}"))
    split = opened(store, cache, limit=sum(shards) + size)
    split._shards._prefetch([split.directory / name for name in split.shard_names], with_indexes=True)
    read_all(split)
    assert len(list(cache.rglob("*.tar"))) == 3
    assert len(cached(cache)) == 1
    files = [path for ending in (".tar", SUFFIX) for path in cache.rglob(f"*{ending}")]
    assert sum(path.stat().st_size for path in files) <= sum(shards) + size


def test_indexes_give_way_to_shards(store, directory, tmp_path) -> None:
    cache = tmp_path / "cache"
    shards = [shard.bytes for shard in ShardSet.open(directory).manifest.splits["train"].shards]
    split = opened(store, cache, limit=sum(shards))
    for number in range(3):
        split.read(int(np.flatnonzero(split.column("shard") == number)[0]))
    assert len(list(cache.rglob("*.tar"))) == 3
    assert cached(cache) == []


def test_threads_fetch_an_index_once(store, directory, tmp_path) -> None:
    splits = [opened(store, tmp_path / "cache") for _ in range(4)]  # as processes of one node
    with ThreadPoolExecutor(4) as pool:
        assert set(map(tuple, pool.map(read_all, splits))) == {tuple(lengths(directory))}
    assert set(requests(store).values()) == {1}
