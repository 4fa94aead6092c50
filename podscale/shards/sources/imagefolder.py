"""A tree of class folders: train/ and val/ of them, or one tree of which a share is held out."""

from collections.abc import Iterator

from podscale.shards.sources.base import SourceItem, Where
from podscale.shards.sources.layout import classify_paths, is_image_name
from podscale.shards.sources.storage import Storage


class ImageFolderSource:
    """<class>/.../<image>, optionally below train/ and val/; local or any fsspec URL."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def items(self) -> Iterator[SourceItem]:
        files = [file for file in self._storage.files() if is_image_name(file.path)]
        where = Where(self._storage.location)
        for number, (split, label) in classify_paths([file.path for file in files], where):
            yield SourceItem(files[number].path, label, files[number].size, split)

    def read(self, item: SourceItem) -> bytes:
        return self._storage.read(item.name)
