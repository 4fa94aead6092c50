"""Sources of images that are sharded: one archive of originals, and a listing of files that do not exist."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from podscale.data.sharding.shard_plan import ShardPlan
from podscale.data.sources import SourceItem
from podscale.data.sources.base import Where
from podscale.data.sources.storage import LocalStorage
from podscale.data.sources.tar import tar_members


class Originals:
    """Images of one archive, each `repeat` times, by synset (name: <synset>_<anything>.JPEG)."""

    def __init__(self, archive: Path, repeat: int) -> None:
        self.archive, self._storage, self._repeat = archive, LocalStorage(str(archive)), repeat

    def items(self) -> Iterator[SourceItem]:
        with self._storage.open(b"") as file:
            for member in tar_members(file, Where(str(self.archive))):
                synset = member.name.rpartition(b"/")[2].partition(b"_")[0].decode()
                for copy in range(self._repeat):
                    # every synset in both splits, so that it is a data set; only train is packed here
                    split = "validation" if copy == 0 else "train"
                    yield SourceItem(b"%d/" % copy + member.name, synset, member.size, split, b"", member.offset)

    def read(self, item: SourceItem) -> bytes:
        return self._storage.read(b"", item.offset, item.size)


class Synthetic:
    """A listing like ImageNet's, of files that do not exist."""

    def __init__(self, count: int) -> None:
        self._count, self._classes = count, min(1000, max(1, count // 100))

    def items(self) -> Iterator[SourceItem]:
        for i in range(self._count):
            synset = f"n{i % self._classes * 7919:08d}"
            yield SourceItem(f"train/{synset}/{synset}_{i}.JPEG".encode(), synset, 60_000 + i * 31 % 100_000)

    def read(self, item: SourceItem) -> bytes:
        raise OSError("nowhere")


def entries(plan: ShardPlan) -> Iterator[Any]:
    """Entries of the training split, shard by shard."""
    for shard in range(plan.shard_count("train")):
        yield from plan.entries("train", shard)
