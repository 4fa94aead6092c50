"""Memory cache of whole shards: compressed records that a host reads again in every epoch.

It is for shards at a URL or on a mounted volume, where a page that the kernel dropped costs a network request. For
shards on a local disk the kernel's page cache does the same, once for all processes.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from podscale.data.decode_index import DecodeIndex
from podscale.data.manifest import Shard
from podscale.data.shard_set import ShardMapper
from podscale.errors import InputError, PodscaleError
from podscale.util.formatting import format_bytes

log = logging.getLogger("podscale.data")


class ReadableShardMapper(ShardMapper, Protocol):
    """Mapper that also reads whole shards."""

    def is_local(self, path: Path) -> bool:
        """Return whether a shard can be mapped without a download."""
        ...

    def size(self, path: Path) -> int: ...

    def read(self, path: Path) -> npt.NDArray[np.uint8]:
        """Return a copy of a shard."""
        ...

    def fetch_index(self, path: Path) -> None:
        """Download the decode index of a shard, if it has one."""
        ...


class MemoryCache:
    """Keep the first shards that fit into `limit_bytes`; map the others from `backing`.

    Nothing is evicted: records come in random order, so an eviction would mean reading a whole shard for one record.
    Shards are read one by one in the background. A shard that is needed before it was read is mapped from `backing` if
    it `is_local`, else read at once.
    """

    def __init__(self, backing: ReadableShardMapper, limit_bytes: int) -> None:
        self._backing, self._limit_bytes = backing, limit_bytes
        self._free_bytes = limit_bytes
        self._planned: set[Path] = set()
        self._kept: dict[Path, npt.NDArray[np.uint8]] = {}
        self._lock = threading.Lock()
        self._reads: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)

    @property
    def cached_bytes(self) -> int:
        return sum(len(kept) for kept in tuple(self._kept.values()))

    @property
    def is_remote(self) -> bool:
        return self._backing.is_remote

    def __call__(self, path: Path) -> npt.NDArray[np.uint8]:
        kept = self._kept.get(path)
        if kept is not None:
            return kept
        if path in self._planned and not self._backing.is_local(path):
            return self._load(path)
        return self._backing(path)

    def prefetch(self, paths: Sequence[Path], *, with_indexes: bool = False) -> None:
        """Read the shards that fit into memory, in this order; raises InputError if the limit is below one shard."""
        with self._lock:
            chosen = [path for path in paths if path not in self._planned and self._reserve(path)]
            if paths and not self._planned:
                raise InputError(
                    f"smaller than one shard of {self._backing.size(paths[0])} bytes",
                    field="input.record_cache_bytes",
                    got=self._limit_bytes,
                    hint="Raise it, or set it to 0.",
                )
        rest = [path for path in paths if path not in self._planned]
        if rest:
            log.info(
                "%d of %d shards fit into input.record_cache_bytes (%s); the others are not kept in memory",
                len(paths) - len(rest),
                len(paths),
                format_bytes(self._limit_bytes),
            )
            self._backing.prefetch(rest, with_indexes=with_indexes)
        arguments = (chosen, with_indexes)
        threading.Thread(target=self._load_all, args=arguments, name="podscale-records", daemon=True).start()

    def decode_index(self, path: Path, shard: Shard) -> DecodeIndex | None:
        return self._backing.decode_index(path, shard)

    def _reserve(self, path: Path) -> bool:
        size = self._backing.size(path)
        if size > self._free_bytes:
            return False
        self._free_bytes -= size
        self._planned.add(path)
        return True

    def _load_all(self, paths: Sequence[Path], with_indexes: bool) -> None:
        for path in paths:
            try:
                self._load(path)
                if with_indexes:
                    self._backing.fetch_index(path)
            except (PodscaleError, OSError, MemoryError) as error:  # the next read of the shard raises it again
                log.warning("%s: cannot read the shard into memory: %s", path.name, error)
                return

    def _load(self, path: Path) -> npt.NDArray[np.uint8]:
        with self._lock:
            read = self._reads[path]
        with read:
            if path not in self._kept:
                content = self._backing.read(path)
                content.flags.writeable = False
                self._kept[path] = content
            return self._kept[path]
