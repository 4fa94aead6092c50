"""Where images come from. A new source is one small class with `items` and `read`, and one line in `open_source`."""

from podscale.config.model import DataSection
from podscale.shards.sources.base import Item, Source, SourceMissing, Where
from podscale.shards.sources.digits import Digits
from podscale.shards.sources.imagefolder import ImageFolder
from podscale.shards.sources.imagenet import LABELS, TRAIN_TAR, ImageNet
from podscale.shards.sources.members import is_compressed_tar_name, is_tar_name
from podscale.shards.sources.storage import Storage, open_storage
from podscale.shards.sources.table import Table, is_table_name
from podscale.shards.sources.tar import Tar

__all__ = ["Item", "Source", "SourceMissing", "open_source"]


def open_source(data: DataSection) -> Source:
    """The source of a data section; raises InputError where there is none at `data.source`."""
    form: str = data.format
    if form == "digits" or (form == "auto" and data.source == "digits"):
        return Digits()
    storage = open_storage(data.source)
    if form == "auto":
        form = _form(storage)
    if form == "table":
        return Table(storage)
    if form == "tar":
        return Tar(storage)
    return ImageNet(storage) if form == "imagenet" else ImageFolder(storage)


def _form(storage: Storage) -> str:
    """What a location looks like: by its name where it is a file, else by what is directly in it."""
    if is_table_name(storage.location):
        return "table"
    if is_tar_name(storage.location.encode()) or is_compressed_tar_name(storage.location.encode()):
        return "tar"
    names = storage.top()
    if any(LABELS.search(name) for name in names) and (
        any(TRAIN_TAR.search(name) for name in names) or b"train" in names
    ):
        return "imagenet"
    if any(is_tar_name(name) for name in names):
        return "tar"
    if names == [b""]:
        raise Where(storage.location).refusal(
            "a single file that is neither .tar, .csv nor .jsonl", "Give a directory of images, an archive or a table."
        )
    return "imagefolder"
