"""Memory mapping of the shards of one remote set, and of their decode indexes, in the node cache."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from podscale.data.decode_index import DecodeIndex, decode_index_path
from podscale.data.manifest import Shard, ShardSetManifest
from podscale.data.remote_files import RemoteFiles
from podscale.errors import InputError, PodscaleError
from podscale.util.files import file_lock

log = logging.getLogger("podscale.data")

_MAX_MAPPED_SHARDS = 4  # shards that a process keeps mapped if the set is larger than the cache
_INDEX_ATTEMPTS = 2  # attempts of one request for a decode index: a training waits for it


class Cache(Protocol):
    """Directory of cached shards, `podscale.data.node_cache.ShardCache`."""

    limit_bytes: int

    def map_if_cached(self, path: Path, shard: Shard) -> npt.NDArray[np.uint8] | None: ...

    def download(self, remote: RemoteFiles, name: str, path: Path, shard: Shard, *, evict: bool) -> bool: ...

    def write_if_space(self, path: Path, content: bytes) -> bool: ...


class CachedShardMapper:
    """Memory mapping of the shards of one remote set; missing shards are downloaded (a `ShardMapper`)."""

    cached_bytes = 0  # all records are in mapped files
    is_remote = True

    def __init__(self, cache: Cache, remote: RemoteFiles, directory: Path, manifest: ShardSetManifest) -> None:
        self._cache, self._remote = cache, remote
        self._remote_indexes = _RemoteDecodeIndexes(cache, remote)
        self._shards = {
            directory / split / shard.name: (f"{split}/{shard.name}", shard)
            for split, summary in manifest.splits.items()
            for shard in summary.shards
        }
        total_bytes = sum(shard.bytes for _, shard in self._shards.values())
        self._max_maps = len(self._shards) if total_bytes <= cache.limit_bytes else _MAX_MAPPED_SHARDS
        self._maps: OrderedDict[Path, npt.NDArray[np.uint8]] = OrderedDict()
        self._indexes: OrderedDict[Path, DecodeIndex | None] = OrderedDict()
        self._lock = threading.Lock()
        self._download_locks: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)

    def __call__(self, path: Path) -> npt.NDArray[np.uint8]:
        """Return the bytes of a mapped shard. Waits for its download if it is not cached."""
        with self._lock:
            if path in self._maps:
                self._maps.move_to_end(path)
                return self._maps[path]
            download_lock = self._download_locks[path]
        with download_lock:
            mapped = self._fetch(path)
        with self._lock:
            self._maps[path] = mapped
            while len(self._maps) > self._max_maps:
                self._maps.popitem(last=False)  # unmapped once no batch refers to it
        return mapped

    def prefetch(self, paths: Sequence[Path], *, with_indexes: bool = False) -> None:
        """Download shards in the background while there is free space; skip those that other processes download."""
        arguments = (list(paths), with_indexes)
        threading.Thread(target=self._prefetch, args=arguments, name="podscale-prefetch", daemon=True).start()

    def is_local(self, path: Path) -> bool:
        return path.exists()

    def size(self, path: Path) -> int:
        return self._shards[path][1].bytes

    def read(self, path: Path) -> npt.NDArray[np.uint8]:
        """Return a copy of a shard, from the cache or else from the store."""
        name, shard = self._shards[path]
        mapped = self._cache.map_if_cached(path, shard)
        if mapped is not None:
            return mapped.copy()
        content = np.empty(shard.bytes, dtype=np.uint8)
        self._remote.copy(name, shard.bytes, shard.sha256, partial(_set_at, content.data))
        return content

    def decode_index(self, path: Path, shard: Shard) -> DecodeIndex | None:
        with self._lock:
            if path in self._indexes:
                self._indexes.move_to_end(path)
                return self._indexes[path]
        self.fetch_index(path)
        with suppress(FileNotFoundError):
            os.utime(decode_index_path(path))  # the last use, for the eviction
        index = DecodeIndex.read_if_usable(path, shard.sha256, shard.count)
        if index is None:
            decode_index_path(path).unlink(missing_ok=True)  # damaged here: the next start downloads it again
        with self._lock:
            self._indexes[path] = index
            while len(self._indexes) > self._max_maps:
                self._indexes.popitem(last=False)
        return index

    def fetch_index(self, path: Path) -> None:
        """Download the decode index of a shard, unless it is cached or the set has no usable one."""
        name, shard = self._shards[path]
        if not decode_index_path(path).exists():
            with file_lock(_lock_path(path)):
                self._remote_indexes.fetch(name, path, shard)

    def _fetch(self, path: Path) -> npt.NDArray[np.uint8]:
        name, shard = self._shards[path]
        while (mapped := self._cache.map_if_cached(path, shard)) is None:
            with file_lock(_lock_path(path)):
                if not path.exists():
                    self._cache.download(self._remote, name, path, shard, evict=True)
        return mapped

    def _prefetch(self, paths: list[Path], with_indexes: bool) -> None:
        for path in paths:
            name, shard = self._shards[path]
            try:
                with file_lock(_lock_path(path), wait=False):
                    if not path.exists() and not self._cache.download(self._remote, name, path, shard, evict=False):
                        return
                if with_indexes:
                    self.fetch_index(path)
            except BlockingIOError:
                continue
            except (PodscaleError, OSError) as error:
                log.warning("%s: prefetching stopped: %s", path.name, error)  # the next read raises it again
                return


class _RemoteDecodeIndexes:
    """Decode indexes of one remote set, beside their shards in the cache. Safe from several threads.

    They are optional, so nothing here raises an error of the store or of the disk. Either all shards of a set have an
    index or none. So the first missing index, or the first request that fails, ends the requests of this process.
    """

    def __init__(self, cache: Cache, remote: RemoteFiles) -> None:
        self._cache = cache
        self._remote = RemoteFiles(remote.location, replace(remote.retry_policy, max_attempts=_INDEX_ATTEMPTS))
        self._is_open = True
        self._unusable: set[Path] = set()

    def fetch(self, name: str, path: Path, shard: Shard) -> None:
        """Download the index of a shard unless it is cached, or known to be missing or unusable.

        Args:
            name: Name of the shard in the set.
            path: Path of the shard in the cache.
        """
        target = decode_index_path(path)
        if not self._is_open or target in self._unusable or target.exists():
            return
        file = str(decode_index_path(Path(name)))
        where = f"{self._remote.location}/{file}"
        try:
            content = self._remote.read(file)
            DecodeIndex.parse(np.frombuffer(content, dtype=np.uint8), shard.sha256, shard.count, where)
            if not self._cache.write_if_space(target, content):
                self._close(logging.INFO, "no space for decode indexes in the cache: raise input.cache_bytes")
        except (FileNotFoundError, PermissionError):  # stores without the right to list answer that there is no right
            self._close(logging.DEBUG, f"{where} does not exist: decoding without indexes")
        except InputError as error:
            self._unusable.add(target)
            log.warning("decoding without an index: %s", error)
        except (PodscaleError, OSError) as error:
            self._close(logging.WARNING, f"decoding without indexes: {error}")

    def _close(self, level: int, message: str) -> None:
        if self._is_open:
            self._is_open = False
            log.log(level, "%s", message)


def _lock_path(shard: Path) -> Path:
    return shard.with_name(shard.name + ".lock")


def _set_at(content: memoryview, offset: int, block: bytes) -> None:
    content[offset : offset + len(block)] = block
