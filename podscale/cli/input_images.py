"""Images that `podscale bench input` measures: a shard set, that of the run, or a part of a source, packed for it."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from podscale.bench.images import copy_from_source, copy_without_labels, pack_class_folders
from podscale.config import RunConfig
from podscale.config.preflight.storage import shard_set_counts
from podscale.data.loaders.build_loader import open_shard_set
from podscale.runs import dataset_directory
from podscale.util.terminal import ProgressLine

if TYPE_CHECKING:
    from podscale.data.shard_set import Split


class InputImages(NamedTuple):
    """Training images to measure.

    Args:
        origin: Origin of the images, for readers.
        training_images: Training images of the whole set; None if unknown.
    """

    split: "Split"
    origin: str
    training_images: int | None


def find_images(run: RunConfig, source: str | None, shard_set: str | None, folder: Path, limit: int) -> InputImages:
    """Return the training images of a shard set, else of a source, else of the run.

    Args:
        source: Folder or .tar of images without labels, or `digits`.
        folder: Temporary folder for a packed part of a source.
        limit: Most images to pack.
    """
    if shard_set is not None:
        return _open(shard_set, run, "of the shard set")
    if source is None and shard_set_counts(run):
        return _open(dataset_directory(run.run.workspace, run.data), run, "of the shard set of this run")
    data = run.data if source is None else run.data.model_copy(update={"source": source})
    copies = folder / "images"
    if source is not None and data.source_is_location:
        copied = copy_without_labels(source, copies, limit)
    else:
        copied = copy_from_source(data, copies, limit)
    progress = ProgressLine(sys.stderr)
    packed = pack_class_folders(copies, folder / "packed", data, progress)
    progress.clear()
    shutil.rmtree(copies, ignore_errors=True)
    split, whole = packed.split("train"), copied.training_images
    name = "data.source" if source is None else "--source"
    part = f" (of about {whole:,} training images)" if whole is not None and whole > copied.count else ""
    return InputImages(split, f"of {name}{part}", whole)


def _open(location: str, run: RunConfig, origin: str) -> InputImages:
    split = open_shard_set(location, run).split("train")
    return InputImages(split, origin, len(split))
