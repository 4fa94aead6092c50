"""Parts of a prediction: ranges of one list of images, each predicted by a process or pod of its own, in one folder.

Every part lists all images, so that all of them agree on the list. A part ends at the end of a batch: its rows are, to
the bit, those of one process that predicts the whole list. A finished part is not predicted again.
"""

import fcntl
import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from podscale.data.manifest import classes_sha256
from podscale.errors import InputError
from podscale.prediction.predict import predict_items
from podscale.prediction.predictor import PredictedItem, Predictor
from podscale.prediction.writers import line_of
from podscale.runs.model_files import inference_options_of, preprocessing_of
from podscale.util.files import file_sha256, open_atomically, remove_unused, write_json
from podscale.util.formatting import one_line
from podscale.util.progress_reports import ProgressCallback, ProgressReporter, ignore_progress
from podscale.version import VERSION

SCHEMA_VERSION = 1
MAX_PARTS = 99_999


@dataclass(frozen=True)
class Part:
    """Part `index` of `count`, from 0."""

    index: int
    count: int

    @property
    def name(self) -> str:
        """Name of the part's files, without the suffix."""
        return f"part-{self.index:05d}-of-{self.count:05d}"

    def images(self, total: int, batch: int) -> range:
        """Return the numbers of its images: whole batches, and equally many of them for each part."""
        batches = -(-total // batch)
        first, end = (batches * index // self.count for index in (self.index, self.index + 1))
        return range(first * batch, min(end * batch, total))


class ImageList(NamedTuple):
    """Number of images, and hash of their names, sizes, places and labels."""

    images: int
    sha256: str


@dataclass(frozen=True)
class PartManifest:
    """Description of a part, beside its rows.

    `identity` is the same for all parts of a prediction; rows with another one do not belong to it. `sha256` is the
    hash of the file of rows.
    """

    identity: dict[str, Any]
    part: int
    rows: int
    sha256: str
    podscale: str = VERSION
    schema_version: int = SCHEMA_VERSION


def parse_part(text: str) -> Part:
    """Return the part of a text such as 0/8. Raises InputError."""
    index, slash, count = text.partition("/")
    if slash and index.isascii() and index.isdigit() and count.isascii() and count.isdigit():
        part = Part(int(index), int(count))
        if part.index < part.count <= MAX_PARTS:
            return part
    hint = "Give INDEX/COUNT with an index from 0: the parts of four are 0/4, 1/4, 2/4 and 3/4."
    raise InputError("not a part", field="--part", got=text, hint=hint)


def list_images(predictor: Predictor) -> ImageList:
    """List all images of a prediction, without reading them."""
    digest, count = hashlib.sha256(), 0
    for item in predictor.items():
        failed = item.failure is not None
        digest.update(json.dumps([item.name, item.size, item.offset, item.label, failed]).encode())
        count += 1
    return ImageList(count, digest.hexdigest())


def identity_of(predictor: Predictor, images: ImageList, parts: int) -> dict[str, Any]:
    """Return what the rows depend on: the images, the model, its preprocessing, and the options."""
    model = predictor.model
    identity = {
        "images": images.images,
        "list_sha256": images.sha256,
        "weights_sha256": model.weights_sha256,
        "exported_sha256": model.exported_sha256,
        "classes_sha256": classes_sha256(model.files.description["classes"]),
        "preprocessing": preprocessing_of(model.config),
        "inference": inference_options_of(model.config),
        "top": predictor.top,
        "batch": predictor.batch,
        "convert": predictor.options.convert,
        "temperature": model.temperature,
        "parts": parts,
    }
    return dict(json.loads(json.dumps(identity)))  # as a manifest has it


def rows_path(folder: Path, part: Part) -> Path:
    return folder / f"{part.name}.jsonl"


def manifest_path(folder: Path, part: Part) -> Path:
    return folder / f"{part.name}.json"


def read_manifest(path: Path) -> PartManifest | None:
    """Return the manifest of a part; None if there is none. Raises InputError if it is unreadable."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema_version"] != SCHEMA_VERSION:
            hint = "Use that version, or delete the folder and predict again."
            raise InputError("of another version of Podscale", field=str(path), got=content["podscale"], hint=hint)
        return PartManifest(**content)
    except FileNotFoundError:
        return None
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"not the manifest of a part ({one_line(str(error))})"
        raise InputError(problem, field=str(path), hint="Delete it and predict the part again.") from error


def differences(one: dict[str, Any], other: dict[str, Any]) -> Sequence[str]:
    """Return the names of the values in which two identities differ."""
    return [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]


def finished_part(folder: Path, part: Part, identity: dict[str, Any]) -> PartManifest | None:
    """Return the manifest of a part whose rows are complete; None if it is to be predicted.

    Raises InputError if the folder has this part of another prediction.
    """
    manifest = read_manifest(manifest_path(folder, part))
    if manifest is None:
        return None
    if changed := differences(manifest.identity, identity):
        raise InputError(
            f"has this part of another prediction: {', '.join(changed)} differ",
            field=str(folder),
            got=part.name,
            hint="Name another folder, or delete this one.",
        )
    rows = rows_path(folder, part)
    return manifest if rows.exists() and file_sha256(rows) == manifest.sha256 else None


def predict_part(
    predictor: Predictor, part: Part, folder: Path, progress: ProgressCallback = ignore_progress
) -> tuple[PartManifest, bool]:
    """Predict a part unless the folder has it; return its manifest, and True if it was there.

    Rows and manifest appear complete, or not at all; the manifest last. Raises InputError if they cannot be written.
    """
    images = list_images(predictor)
    identity = identity_of(predictor, images, part.count)
    if (manifest := finished_part(folder, part, identity)) is not None:
        return manifest, True
    chosen = part.images(images.images, predictor.batch)
    items = itertools.islice(predictor.items(), chosen.start, chosen.stop)
    reporter = ProgressReporter("predict", progress, len(chosen))
    try:
        rows, digest = _write_rows(rows_path(folder, part), predict_items(predictor, items), len(chosen), reporter)
        manifest = PartManifest(identity, part.index, rows, digest)
        write_json(manifest_path(folder, part), asdict(manifest))
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", field="--out", got=str(folder)) from error
    reporter.close()
    return manifest, False


def _write_rows(
    path: Path, items: Iterator[PredictedItem], expected: int, reporter: ProgressReporter
) -> tuple[int, str]:
    """Write the rows to a file, which appears complete or not at all; return their number and the hash of the file.

    Two pods may predict one part for a while; the last one replaces the file.
    """
    _remove_leftovers(path)
    written, digest = 0, hashlib.sha256()
    with open_atomically(path) as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for _, prediction in items:
            line = line_of(prediction).encode()
            file.write(line)
            digest.update(line)
            written += 1
            reporter.add(1, rejects=int(prediction.failure is not None))
        if written != expected:
            hint = "Predict the images when none are added or removed."
            raise InputError("the list of images changed during the prediction", field=path.stem, hint=hint)
    return written, digest.hexdigest()


def _remove_leftovers(path: Path) -> None:
    """Delete temporary files of killed processes; a living process holds a lock on its own."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        with suppress(OSError):  # a file system without locks
            remove_unused(leftover)


def missing_parts(folder: Path, count: int) -> list[Part]:
    """Return the parts of which the folder has no manifest."""
    return [part for part in (Part(index, count) for index in range(count)) if not manifest_path(folder, part).exists()]


class SpooledLines:
    """Lines of a stream that can be read once, kept in a temporary file so that they can be read again."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines: Iterable[str] | None = lines
        self._file = tempfile.TemporaryFile("w+", encoding="utf-8", errors="surrogateescape", newline="\n")  # noqa: SIM115

    def __iter__(self) -> Iterator[str]:
        if self._lines is not None:
            self._file.writelines(self._lines)
            self._lines = None
        self._file.seek(0)
        return iter(self._file)
