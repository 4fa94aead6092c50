"""Images for checks and calibration: a random sample of the run's shard set or of images that the user names."""

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from podscale.config import data_fingerprint
from podscale.data.decode import Pixels
from podscale.data.manifest import MANIFEST_FILE
from podscale.data.sources.digits import DigitsSource
from podscale.errors import InputError
from podscale.prediction.image_inputs import EncodedImage, ImageItem, iter_items, open_inputs
from podscale.prediction.model import PredictionModel
from podscale.prediction.preparation import ChunkDecoder, ImagePreparer
from podscale.prediction.reservoir import Reservoir
from podscale.runs import dataset_directory
from podscale.runs.model_files import run_of
from podscale.util.host_info import cpu_count

_CHUNK = 64
"""Images that are decoded at a time."""


@dataclass(frozen=True)
class ImageSample:
    """Prepared images.

    Args:
        images: uint8 [n, size, size, 3].
        labels: int64 [n], true classes by index; None if they are not known.
        source: the images' origin, for users.
    """

    images: Pixels
    labels: npt.NDArray[np.int64] | None
    source: str

    def __len__(self) -> int:
        return len(self.images)


def load_sample(model: PredictionModel, locations: Sequence[str], split: str, limit: int) -> ImageSample:
    """Return at most `limit` images, the same ones at each call.

    They are from `locations`, else from a split of the run's shard set if it is on this machine, else the embedded
    digits. Raises InputError if no image is usable.

    Args:
        locations: files, folders, tars, shard sets and fsspec URLs.
        split: "train" or "validation".
    """
    if not locations and (shard_set := _find_shard_set(model)) is not None:
        locations = [f"{shard_set}/{split}"]
    return _load_inputs(model, locations, limit) if locations else _load_digits(model, limit)


def _find_shard_set(model: PredictionModel) -> Path | None:
    """Return the shard set of the model's run in its workspace; None if it is not there or is remote."""
    run = run_of(model.files.directory)
    if run is None:
        return None
    moved = run.path.parent.parent / "datasets" / data_fingerprint(model.config.data)
    places = [Path(dataset_directory(model.config.run.workspace, model.config.data)), moved]
    return next((place for place in places if (place / MANIFEST_FILE).exists()), None)


def _load_inputs(model: PredictionModel, locations: Sequence[str], limit: int) -> ImageSample:
    inputs = open_inputs(locations, model.config)
    items = sample_items(iter_items(inputs), limit)
    chunks = (items[begin : begin + _CHUNK] for begin in range(0, len(items), _CHUNK))
    images: list[Pixels] = []
    used: list[ImageItem] = []
    with closing(ChunkDecoder(inputs, ImagePreparer(model.config), cpu_count())) as decoder:
        for chunk in decoder.decode(chunks):
            images.append(chunk.images[chunk.usable])
            used += [chunk.items[slot] for slot in chunk.usable]
    if not used:
        raise InputError("no image is usable", field="--images", got=" ".join(locations))
    index_of = {name: index for index, name in enumerate(model.classes)}
    labels = [index_of.get(item.label, -1) if item.label is not None else -1 for item in used]
    known = np.array(labels, dtype=np.int64) if min(labels) >= 0 else None
    return ImageSample(np.concatenate(images), known, " ".join(locations))


def _load_digits(model: PredictionModel, limit: int) -> ImageSample:
    source, prepare = DigitsSource(), ImagePreparer(model.config)
    items = list(source.items())
    chosen = items[:: max(1, len(items) // limit)][:limit]
    images = [prepare(item.name, EncodedImage(source.read(item))) for item in chosen]
    return ImageSample(np.stack(images), None, "the embedded digits, resized")


def sample_items(items: Iterable[ImageItem], count: int) -> list[ImageItem]:
    """Return `count` of the items at random, in their order, with memory for no more."""
    chosen = Reservoir[tuple[int, ImageItem]](count)
    for numbered in enumerate(items):
        chosen.add(numbered)
    return [item for _, item in sorted(chosen.items, key=lambda numbered: numbered[0])]
