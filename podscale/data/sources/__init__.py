"""Sources of images. A new source is a class with `items` and `read`, and one line in `open_source`."""

from podscale.config.data import DataSection
from podscale.data.sources.base import Source, SourceItem, SourceMissing, Where
from podscale.data.sources.digits import DigitsSource
from podscale.data.sources.imagenet import TRAIN_TAR, VALIDATION_LABELS, ImageNetSource
from podscale.data.sources.storage import ImageFolderSource, Storage, open_storage
from podscale.data.sources.table import TableSource, is_table_name
from podscale.data.sources.tar import TarSource, is_compressed_tar_name, is_tar_name
from podscale.errors import InputError
from podscale.util.plugins import PREFIX, call_plugin, find_plugin, plugin_name

__all__ = ["Source", "SourceItem", "SourceMissing", "open_source"]


def open_source(data: DataSection) -> Source:
    """Open the source of a data section; raises InputError if there is none at `data.source`."""
    form = data.format
    if (name := plugin_name(form)) is not None:
        return _open_plugin(name, data.source)
    if form == "digits" or (form == "auto" and data.source == "digits"):
        return DigitsSource()
    storage = open_storage(data.source)
    if form == "auto":
        form = _detect_format(storage)
    if form == "table":
        return TableSource(storage)
    if form == "tar":
        return TarSource(storage)
    return ImageNetSource(storage) if form == "imagenet" else ImageFolderSource(storage)


def _open_plugin(name: str, location: str) -> Source:
    """Open the source of a plug-in, which gets the location of the images."""
    plugin = find_plugin("data.format", name)
    source = call_plugin(plugin, location, options={}, options_field="data.format")
    if not (callable(getattr(source, "items", None)) and callable(getattr(source, "read", None))):
        problem = f"{plugin} returns {type(source).__name__}, which has no methods items and read"
        raise InputError(problem, field="data.format", got=f"{PREFIX}{name}")
    opened: Source = source
    return opened


def _detect_format(storage: Storage) -> str:
    """Detect the format by the location's name if it is a file, else by the names directly in it."""
    if is_table_name(storage.location):
        return "table"
    if is_tar_name(storage.location.encode()) or is_compressed_tar_name(storage.location.encode()):
        return "tar"
    names = storage.top_level_names()
    if any(VALIDATION_LABELS.search(name) for name in names) and (
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
