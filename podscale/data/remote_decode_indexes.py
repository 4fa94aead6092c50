"""Download of the decode indexes of a remote shard set to the node cache, beside their shards.

The indexes are optional, so nothing here raises an error of the store or of the disk. Either all shards of a set have
an index or none. So the first missing index, or the first request that fails, ends the requests of this process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from podscale.data.decode_index import DecodeIndex, decode_index_path
from podscale.data.manifest import Shard
from podscale.data.remote_files import RemoteFiles
from podscale.errors import InputError, PodscaleError

log = logging.getLogger("podscale.data")

MAX_ATTEMPTS = 2
"""Attempts of one request: a training waits for it."""
WriteIfSpace = Callable[[Path, bytes], bool]
"""Writes a file of the cache; returns False if there is no space for it."""


class RemoteDecodeIndexes:
    """Decode indexes of one remote set. Safe from several threads.

    Args:
        remote: Files of the set.
        write: Writes an index to the cache.
    """

    def __init__(self, remote: RemoteFiles, write: WriteIfSpace) -> None:
        self._remote = RemoteFiles(remote.location, replace(remote.retry_policy, max_attempts=MAX_ATTEMPTS))
        self._write = write
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
            if not self._write(target, content):
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
