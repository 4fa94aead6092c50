"""Reader of a shard set: memory-mapped tars, zero-copy records. podscale.data.node_cache downloads remote shards."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from podscale.data import index
from podscale.data.decode_index import NO_INDEX, DecodeIndex, ImageIndex
from podscale.data.manifest import MANIFEST_FILE, Shard, ShardSetManifest, classes_sha256
from podscale.data.sharding.file_formats import map_file
from podscale.errors import InputError

_READ_BYTES = 8 * 2**20  # size of one read, bytes


class ShardMapper(Protocol):
    """Map a tar file by its path on this machine, now or after its download."""

    def __call__(self, path: Path) -> npt.NDArray[np.uint8]: ...

    def prefetch(self, paths: Sequence[Path], *, with_indexes: bool = False) -> None: ...

    def decode_index(self, path: Path, shard: Shard) -> DecodeIndex | None:
        """Return the decode index of a shard, if need be after its download; None if it has no usable one."""
        ...

    @property
    def cached_bytes(self) -> int:
        """Bytes of records in this process's own memory, without the pages of mapped files."""
        ...

    @property
    def is_remote(self) -> bool:
        """Return True if shards are downloaded to a cache, which cannot evict a shard while a record refers to it."""
        ...


class LocalShardMapper:
    """Shards in a local directory, each mapped once per process."""

    cached_bytes = 0
    is_remote = False

    def __init__(self) -> None:
        self._maps: dict[Path, npt.NDArray[np.uint8]] = {}
        self._indexes: dict[Path, DecodeIndex | None] = {}

    def __call__(self, path: Path) -> npt.NDArray[np.uint8]:
        mapped = self._maps.get(path)
        if mapped is None:
            try:
                with path.open("rb") as file:
                    mapped = map_file(file)
            except (OSError, ValueError) as error:
                raise _read_error(path, error) from error
            self._maps[path] = mapped
        return mapped

    def prefetch(self, paths: Sequence[Path], *, with_indexes: bool = False) -> None:
        """Do nothing: the shards are local."""

    def fetch_index(self, path: Path) -> None:
        """Do nothing: the indexes are local."""

    def decode_index(self, path: Path, shard: Shard) -> DecodeIndex | None:
        if path not in self._indexes:
            self._indexes[path] = DecodeIndex.read_if_usable(path, shard.sha256, shard.count)
        return self._indexes[path]

    def is_local(self, path: Path) -> bool:
        return True

    def size(self, path: Path) -> int:
        return _shard_bytes(path)

    def read(self, path: Path) -> npt.NDArray[np.uint8]:
        """Return a copy of a shard, read from front to back, which is fastest on a mounted volume."""
        content = np.empty(_shard_bytes(path), dtype=np.uint8)
        view, filled = content.data, 0
        try:
            with path.open("rb", buffering=0) as file:
                while filled < len(view) and (count := file.readinto(view[filled : filled + _READ_BYTES])):
                    filled += count
        except OSError as error:
            raise _read_error(path, error) from error
        if filled < len(view):
            raise InputError("the shard is truncated", field=str(path), hint="Run `podscale shard --verify`")
        return content


def _shard_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise _read_error(path, error) from error


def _read_error(path: Path, error: Exception) -> InputError:
    return InputError(f"cannot read the shard: {error}", field=str(path), hint="Run `podscale shard --verify`")


class Split:
    """Samples of one split. A `row` is the number of a sample in use, from 0; dropped duplicates have no row."""

    def __init__(self, directory: Path, name: str, shards_of_split: Sequence[Shard], shards: ShardMapper) -> None:
        self.name = name
        self.directory = directory / name
        self.shard_names = [shard.name for shard in shards_of_split]
        self._shards_of_split = shards_of_split
        columns = index.read_index(self.directory / "index")
        self._rows = np.flatnonzero((columns["flags"] & index.ImageFlag.DROPPED) == 0)
        all_in_use = len(self._rows) == len(columns["key"])
        self._columns = columns if all_in_use else {name: column[self._rows] for name, column in columns.items()}
        self._first_rows = np.searchsorted(columns["shard"], np.arange(len(shards_of_split)))
        self._paths = [self.directory / name for name in self.shard_names]
        self._shards = shards

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def keys(self) -> npt.NDArray[np.uint64]:
        return self._columns["key"]

    @property
    def labels(self) -> npt.NDArray[np.int32]:
        return self._columns["label"]

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return one column of the index (see `index.INDEX_COLUMNS`) for the samples in use."""
        return self._columns[name]

    def read(self, row: int) -> npt.NDArray[np.uint8]:
        """Return the encoded image as a read-only view of the mapped shard."""
        offset, size = int(self._columns["offset"][row]), int(self._columns["size"][row])
        return self._shards(self._paths[int(self._columns["shard"][row])])[offset : offset + size]

    def read_to_keep(self, row: int) -> npt.NDArray[np.uint8]:
        """Return the encoded image for as long as a batch needs it: a copy if its shard must stay evictable."""
        record = self.read(row)
        return record.copy() if self.is_remote else record

    def decode_indexes(self, rows: npt.NDArray[np.int64]) -> list[ImageIndex]:
        """Return the decode index of each of `rows`, int64 [n]; `NO_INDEX` for one that has none."""
        found = zip(self._columns["shard"][rows].tolist(), self.numbers_in_shard(rows).tolist(), strict=True)
        return [NO_INDEX if (own := self.decode_index(shard)) is None else own[number] for shard, number in found]

    def numbers_in_shard(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the number of each of `rows` in its shard, with dropped images counted; both int64 [n]."""
        numbers: npt.NDArray[np.int64] = self._rows[rows] - self._first_rows[self._columns["shard"][rows]]
        return numbers

    def rows_of_shard(self, shard: int) -> npt.NDArray[np.int64]:
        """Return the rows in a shard of this number, int64 [n]."""
        begin, end = np.searchsorted(self._columns["shard"], (shard, shard + 1))
        return np.arange(begin, end)

    def decode_index(self, shard: int) -> DecodeIndex | None:
        """Return the decode index of a shard by its number; None if it has none, or no usable one."""
        return self._shards.decode_index(self._paths[shard], self._shards_of_split[shard])

    @property
    def is_remote(self) -> bool:
        """Return True if reading a record may download its shard."""
        return self._shards.is_remote

    @property
    def cached_bytes(self) -> int:
        """Bytes of records in this process's own memory, of all splits of the set."""
        return self._shards.cached_bytes

    def prefetch(self, rows: npt.NDArray[np.int64], *, with_indexes: bool = False) -> None:
        """Prefetch the shards of these `rows`, if the set is remote or kept in memory.

        Args:
            with_indexes: Download the decode index of each shard too, if it has one.
        """
        paths = [self._paths[shard] for shard in np.unique(self._columns["shard"][rows])]
        self._shards.prefetch(paths, with_indexes=with_indexes)

    def source(self, row: int) -> bytes:
        """Return the name of a sample in its source."""
        return self._sources[int(self._rows[row])]

    @cached_property
    def _sources(self) -> index.SourceNames:
        return index.SourceNames(self.directory / "sources", len(index.read_index(self.directory / "index")["key"]))


class ShardSet:
    """Complete shard set in a local directory; its tar files may be downloaded later (see `ShardMapper`)."""

    def __init__(self, directory: Path, manifest: ShardSetManifest, classes: list[str], shards: ShardMapper) -> None:
        self.directory = directory
        self.manifest = manifest
        self.classes = classes
        self._shards = shards
        self._splits: dict[str, Split] = {}

    @classmethod
    def open(cls, directory: Path | str, shards: ShardMapper | None = None) -> "ShardSet":
        """Open a shard set; raises InputError if it is incomplete or its class map does not match its manifest."""
        directory = Path(directory)
        try:
            manifest = ShardSetManifest.parse(
                (directory / MANIFEST_FILE).read_text(encoding="utf-8"), str(directory / MANIFEST_FILE)
            )
            classes = json.loads((directory / "classes.json").read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            missing = Path(error.filename).name
            raise InputError(
                f"no complete shard set: {missing} is missing", field=str(directory), hint="Run `podscale shard`"
            ) from error
        except (OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"cannot read the shard set: {error}", field=str(directory)) from error
        if classes_sha256(classes) != manifest.classes_sha256:
            raise InputError(
                "differs from its sha256 in the manifest", field=f"{directory}/classes.json", hint="Shard again."
            )
        return cls(directory, manifest, classes, shards or LocalShardMapper())

    def split(self, name: str) -> Split:
        """Return the split `train` or `validation`."""
        if name not in self.manifest.splits:
            raise InputError(
                f"has only the splits {', '.join(self.manifest.splits)}", field=str(self.directory), got=name
            )
        if name not in self._splits:
            self._splits[name] = Split(self.directory, name, self.manifest.splits[name].shards, self._shards)
        return self._splits[name]
