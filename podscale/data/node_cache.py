"""Node-local cache of the shards of remote sets: one copy per node, shared by all its processes.

Layout: <cache>/<first 16 digits of the manifest's sha256>/ has the small files of a set and the tar files read so far.
Processes synchronise by file locks, which the kernel releases when the process that holds them exits:

- `<shard>.lock`, exclusive, while one process downloads the shard or its decode index;
- the shard itself, shared, while any process maps it: such a shard is never evicted;
- `<part>`, exclusive, while it is written: an unlocked part was left by a killed process and is removed;
- `<cache>/lock`, exclusive, while space is freed and reserved.

A download is renamed to the shard once its sha256 matches the manifest. The modification time is the last use; the
least recently used shards are evicted first. Decode indexes count towards the limit, and are evicted like shards.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from podscale.data.cached_shards import CachedShardMapper
from podscale.data.decode_index import SUFFIX
from podscale.data.manifest import MANIFEST_FILE, Shard, ShardSetManifest
from podscale.data.memory_cache import MemoryCache
from podscale.data.remote_files import ReadRetryPolicy, RemoteFiles
from podscale.data.shard_set import ShardSet
from podscale.data.sharding.file_formats import map_file
from podscale.errors import InputError, PodscaleError
from podscale.util.files import file_lock, is_same_file, remove_unused, write_atomically

_EVICTABLE = (".tar", SUFFIX)  # endings of the files that the cache may remove


class ShardCache:
    """Directory with at most `limit_bytes` of shards.

    Args:
        directory: Directory of the cache; None for one of this user in the system's temporary directory.
    """

    def __init__(
        self, directory: str | Path | None, limit_bytes: int, retry_policy: ReadRetryPolicy | None = None
    ) -> None:
        self.limit_bytes = limit_bytes
        self.retry_policy = retry_policy or ReadRetryPolicy()
        try:
            self.directory = Path(directory) if directory is not None else _default_directory()
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot create the shard cache: {error}",
                field="input.cache_dir",
                got=directory and str(directory),
                hint="Set it to a writable directory.",
            ) from error

    def open(self, location: str, memory_bytes: int = 0) -> ShardSet:
        """Open the shard set at a URL: download its small files now, its shards when they are read.

        Raises InputError if there is no complete shard set.

        Args:
            memory_bytes: Size of the first shards that are kept in this process's memory (see `MemoryCache`).
        """
        remote = RemoteFiles(location, self.retry_policy)
        try:
            text = remote.read(MANIFEST_FILE)
            manifest = ShardSetManifest.parse(text.decode(), f"{location}/{MANIFEST_FILE}")
            directory = self.directory / hashlib.sha256(text).hexdigest()[:16]
            for split, summary in manifest.splits.items():
                (directory / split).mkdir(parents=True, exist_ok=True)
                _fetch_small_file(remote, directory, f"{split}/index", summary.index_sha256)
                _fetch_small_file(remote, directory, f"{split}/sources")
            _fetch_small_file(remote, directory, "classes.json")
        except FileNotFoundError as error:
            raise InputError(f"no complete shard set: {error}", field=location, hint="Run `podscale shard`") from error
        except (PermissionError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read the shard set: {error}", field=location) from error
        write_atomically(directory / MANIFEST_FILE, text)
        shards = CachedShardMapper(self, remote, directory, manifest)
        return ShardSet.open(directory, MemoryCache(shards, memory_bytes) if memory_bytes else shards)

    def map_if_cached(self, path: Path, shard: Shard) -> npt.NDArray[np.uint8] | None:
        """Map a shard into memory if it is cached, else return None. A mapped shard is not evicted."""
        while True:
            try:
                file = path.open("rb")
            except FileNotFoundError:
                return None
            with file:
                fcntl.flock(file, fcntl.LOCK_SH)  # the mapping below keeps the file open, and with it the lock
                if not is_same_file(file, path):
                    continue  # evicted between open and lock
                if os.fstat(file.fileno()).st_size != shard.bytes:
                    path.unlink(missing_ok=True)  # truncated, as after a crash of the node
                    return None
                os.utime(file.fileno())  # the last use, for the eviction
                return map_file(file)

    def download(self, remote: RemoteFiles, name: str, path: Path, shard: Shard, *, evict: bool) -> bool:
        """Download one shard to `path`. Returns False if there is no space for it and `evict` is off."""
        return self._write(
            path,
            shard.bytes,
            lambda file: remote.copy(name, shard.bytes, shard.sha256, partial(_write_at, file)),
            evict=evict,
        )

    def write_if_space(self, path: Path, content: bytes) -> bool:
        """Write a file beside the shards. Returns False if there is no space for it; evicts nothing."""
        return self._write(path, len(content), lambda file: file.write(content), evict=False)

    def _write(self, path: Path, size: int, fill: Callable[[BinaryIO], object], *, evict: bool) -> bool:
        """Write a file of `size` bytes through a part. Returns False if there is no space for it and `evict` is off."""
        part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
        file = self._reserve(part, size, evict=evict)
        if file is None:
            return False
        try:
            with file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
                part.replace(path)
        except OSError as error:
            raise PodscaleError(
                f"cannot write the shard: {error}", field=str(part), hint="Free space or lower input.cache_bytes."
            ) from error
        finally:
            part.unlink(missing_ok=True)
        return True

    def _reserve(self, part: Path, size: int, *, evict: bool) -> BinaryIO | None:
        """Return a new locked part file of `size` bytes, or None if there is no space and `evict` is off.

        With `evict`, wait until a shard is no longer in use.
        """
        if size > self.limit_bytes:
            raise InputError(
                f"smaller than one shard of {size} bytes",
                field="input.cache_bytes",
                got=self.limit_bytes,
                hint="Raise it.",
            )
        end = time.monotonic() + self.retry_policy.timeout_seconds
        while True:
            with file_lock(self.directory / "lock"):
                if self._free_space(size, evict=evict):
                    file = part.open("wb")
                    fcntl.flock(file, fcntl.LOCK_EX)
                    os.ftruncate(file.fileno(), size)
                    return file
            if not evict:
                return None
            if time.monotonic() > end:
                raise PodscaleError(
                    f"no space for {size} bytes more in {self.directory}, where all shards are in use",
                    field="input.cache_bytes",
                    got=self.limit_bytes,
                    hint="Raise it, or set input.order=blocked so that a host reads only its own shards.",
                )
            time.sleep(0.1)

    def _free_space(self, size: int, *, evict: bool) -> bool:
        """Remove leftover parts and, if `evict`, unused files. Returns True if `size` bytes fit then."""
        for part in self.directory.glob("*/*/*.part"):
            remove_unused(part)
        files = sorted(entry for ending in _EVICTABLE for entry in _file_sizes(self.directory.glob(f"*/*/*{ending}")))
        used = sum(size for _, size, _ in files) + sum(
            size for _, size, _ in _file_sizes(self.directory.glob("*/*/*.part"))
        )
        for _, freed, path in files:
            if used + size <= self.limit_bytes or not evict:
                break
            if remove_unused(path):
                used -= freed
        return used + size <= self.limit_bytes


def _fetch_small_file(remote: RemoteFiles, directory: Path, name: str, sha256: str | None = None) -> None:
    """Download a file unless it is there, again while it differs from `sha256`, up to the policy's attempts."""
    path = directory / name
    if path.exists():
        return
    for _ in range(remote.retry_policy.max_attempts):
        content = remote.read(name)
        if sha256 is None or hashlib.sha256(content).hexdigest() == sha256:
            write_atomically(path, content)
            return
    raise PodscaleError(
        "differs from its sha256 in the manifest", field=f"{remote.location}/{name}", hint="Run `podscale shard` again."
    )


def _write_at(file: BinaryIO, offset: int, block: bytes) -> None:
    file.seek(offset)
    file.write(block)


def _file_sizes(paths: Iterator[Path]) -> Iterator[tuple[float, int, Path]]:
    """Yield (modification time, bytes, path) of the files that still exist."""
    for path in paths:
        with suppress(FileNotFoundError):
            stat = path.stat()
            yield stat.st_mtime, stat.st_size, path


def _default_directory() -> Path:
    """Return this user's cache under the system's temporary directory, the same for all processes of the node."""
    directory = Path(tempfile.gettempdir()) / f"podscale-cache-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.is_symlink() or directory.stat().st_uid != os.getuid():
        raise InputError("belongs to another user", field=str(directory), hint="Set input.cache_dir")
    return directory
