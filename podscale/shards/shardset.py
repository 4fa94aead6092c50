"""Reading a local shard set: memory-mapped tars, zero-copy records, one row per sample in use.

Remote sets are brought to the node first (see `cache`); after that they are read by the same class.
"""

import json
import mmap
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from podscale.errors import InputError
from podscale.shards import index
from podscale.shards.manifest import NAME, Manifest, classes_sha256


class Split:
    """The samples of one split. `i` below counts samples in use, from 0; duplicates that were dropped have none."""

    def __init__(self, directory: Path, name: str, shard_names: list[str]) -> None:
        self.name = name
        self.directory = directory / name
        self.shard_names = shard_names
        columns = index.read(self.directory / "index")
        self._rows = np.flatnonzero((columns["flags"] & index.Flag.DROPPED) == 0)
        everything = len(self._rows) == len(columns["key"])
        self._columns = columns if everything else {name: column[self._rows] for name, column in columns.items()}
        self._maps: dict[int, npt.NDArray[np.uint8]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def keys(self) -> npt.NDArray[np.uint64]:
        return self._columns["key"]

    @property
    def labels(self) -> npt.NDArray[np.int32]:
        return self._columns["label"]

    def column(self, name: str) -> npt.NDArray[Any]:
        """One column of the index (see `index.COLUMNS`), restricted to samples in use."""
        return self._columns[name]

    def record(self, i: int) -> npt.NDArray[np.uint8]:
        """The encoded image of sample `i`: a read-only view of the mapped shard, nothing is copied."""
        offset, size = int(self._columns["offset"][i]), int(self._columns["size"][i])
        return self._shard(int(self._columns["shard"][i]))[offset : offset + size]

    def source(self, i: int) -> bytes:
        """Where sample `i` came from, as the source named it."""
        return self._sources[int(self._rows[i])]

    @cached_property
    def _sources(self) -> index.Sources:
        return index.Sources(self.directory / "sources", len(index.read(self.directory / "index")["key"]))

    def _shard(self, shard: int) -> npt.NDArray[np.uint8]:
        mapped = self._maps.get(shard)
        if mapped is None:
            path = self.directory / self.shard_names[shard]
            try:
                with path.open("rb") as file:
                    mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
            except (OSError, ValueError) as error:
                raise InputError(f"{path}: cannot read the shard: {error}; run `podscale shard --verify`") from error
            self._maps[shard] = mapped
        return mapped

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}  # maps are made again in the process that receives a pickled split


class ShardSet:
    """A complete shard set in a local directory."""

    def __init__(self, directory: Path, manifest: Manifest, classes: list[str]) -> None:
        self.directory = directory
        self.manifest = manifest
        self.classes = classes
        self._splits: dict[str, Split] = {}

    @classmethod
    def open(cls, directory: Path | str) -> "ShardSet":
        """Raises InputError where there is no complete shard set or its class map does not match its manifest."""
        directory = Path(directory)
        try:
            manifest = Manifest.parse((directory / NAME).read_text(encoding="utf-8"), str(directory / NAME))
            classes = json.loads((directory / "classes.json").read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            missing = Path(error.filename).name
            raise InputError(
                f"{directory}: no complete shard set ({missing} is missing); run `podscale shard`"
            ) from error
        except (OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{directory}: cannot read the shard set: {error}") from error
        if classes_sha256(classes) != manifest.classes_sha256:
            raise InputError(f"{directory}/classes.json: does not belong to the manifest beside it; shard again")
        return cls(directory, manifest, classes)

    def split(self, name: str) -> Split:
        """The split `train` or `validation`."""
        if name not in self.manifest.splits:
            raise InputError(f"{self.directory}: has no split {name!r}, only {', '.join(self.manifest.splits)}")
        if name not in self._splits:
            shards = [shard.name for shard in self.manifest.splits[name].shards]
            self._splits[name] = Split(self.directory, name, shards)
        return self._splits[name]
