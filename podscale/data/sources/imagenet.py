"""ImageNet as distributed: training images by synset, validation images in one folder with a label file.

Training: ILSVRC2012_img_train.tar (a tar of one tar per synset), those inner tars, or folders train/<synset>/.
Validation: ILSVRC2012_img_val.tar or a flat folder val/, with one label file: a synset per line
(imagenet_2012_validation_synset_labels.txt), rows of image,synset (LOC_val_solution.csv), or the development kit's
numbers (ILSVRC2012_validation_ground_truth.txt with meta.mat).
"""

import io
import re
from collections.abc import Iterator
from typing import IO

from podscale.data.sources.base import TRAIN, VALIDATION, SourceItem, Where, decode_name, is_image_name
from podscale.data.sources.storage import Storage, StorageFile
from podscale.data.sources.tar import tar_members

SYNSET = re.compile(rb"(?:^|/)(n\d{8})\.tar$")
TRAIN_FOLDER = re.compile(rb"(?:^|/)train/(n\d{8})/[^/]+$")
TRAIN_TAR = re.compile(rb"(?:^|/)(?:ILSVRC\d+_img_)?train\.tar$")
VALIDATION_TAR = re.compile(rb"(?:^|/)(?:ILSVRC\d+_img_)?val\.tar$")
VALIDATION_FOLDER = re.compile(rb"(?:^|/)val/[^/]+$")
VALIDATION_LABELS = re.compile(rb"(?:^|/)[^/]*val[^/]*\.(?:txt|csv)$", re.IGNORECASE)
_SYNSET_NAME = re.compile(r"n\d{8}")


class ImageNetSource:
    """Source in ImageNet's own layout."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._where = Where(storage.location)

    def items(self) -> Iterator[SourceItem]:
        files = sorted(self._storage.files())
        validation = sorted(self._validation(files))
        synsets = self._validation_synsets(files, [_file_stem(item.name) for item in validation])
        yield from (item._replace(label=synset) for item, synset in zip(validation, synsets, strict=True))
        for file in files:
            yield from self._training(file)

    def read(self, item: SourceItem) -> bytes:
        if item.container:
            return self._storage.read(item.container, item.offset, item.size)
        return self._storage.read(item.name)

    def _training(self, file: StorageFile) -> Iterator[SourceItem]:
        if (match := TRAIN_FOLDER.search(file.path)) and is_image_name(file.path):
            yield SourceItem(file.path, decode_name(match[1]), file.size, TRAIN)
        elif match := SYNSET.search(file.path):
            with self._storage.open(file.path) as archive:
                yield from self._synset(file.path, archive, decode_name(match[1]), 0)
        elif TRAIN_TAR.search(file.path):
            with self._storage.open(file.path) as archive:
                for outer in tar_members(archive, self._where.below(file.path)):
                    if match := SYNSET.search(outer.name):
                        part: IO[bytes] = io.BufferedReader(_Window(archive, outer.offset, outer.size))
                        yield from self._synset(file.path, part, decode_name(match[1]), outer.offset)

    def _synset(self, path: bytes, archive: IO[bytes], synset: str, start: int) -> Iterator[SourceItem]:
        for member in tar_members(archive, self._where.below(path).below(synset.encode())):
            if is_image_name(member.name):
                name = path + b"!" + synset.encode() + b"/" + member.name
                yield SourceItem(name, synset, member.size, TRAIN, path, start + member.offset)

    def _validation(self, files: list[StorageFile]) -> Iterator[SourceItem]:
        for file in files:
            if VALIDATION_TAR.search(file.path):
                with self._storage.open(file.path) as archive:
                    for member in tar_members(archive, self._where.below(file.path)):
                        if is_image_name(member.name):
                            name = file.path + b"!" + member.name
                            yield SourceItem(name, "", member.size, VALIDATION, file.path, member.offset)
            elif VALIDATION_FOLDER.search(file.path) and is_image_name(file.path):
                yield SourceItem(file.path, "", file.size, VALIDATION)

    def _validation_synsets(self, files: list[StorageFile], images: list[str]) -> list[str]:
        """Return the synset of each validation image; `images` are in name order."""
        label_files = [file.path for file in files if VALIDATION_LABELS.search(file.path)]
        if len(label_files) != 1:
            names = ", ".join(decode_name(path) for path in label_files) or "none"
            raise self._where.refusal(f"needs one label file for the validation images, found {names}")
        where = self._where.below(label_files[0])
        text = self._storage.read(label_files[0]).decode("utf-8", "replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if lines and re.match(r"[^,\s]+[,\s]+n\d{8}", lines[-1]):
            return _by_name(lines, images, where)
        if len(lines) != len(images):
            raise where.refusal(f"{len(lines)} labels for {len(images)} validation images", "Download both again.")
        if all(_SYNSET_NAME.fullmatch(line) for line in lines):
            return lines
        return self._by_number(files, lines, where)

    def _by_number(self, files: list[StorageFile], lines: list[str], where: Where) -> list[str]:
        """Return the synsets of the development kit's class numbers, which meta.mat defines."""
        meta = next((file.path for file in files if _file_stem(file.path) == "meta"), None)
        if meta is None or not all(line.isdigit() for line in lines):
            raise where.refusal("no synsets such as n01440764", "Class numbers need the kit's meta.mat in the source.")
        from scipy.io import loadmat  # type: ignore[import-untyped]

        synsets = loadmat(io.BytesIO(self._storage.read(meta)), squeeze_me=True)["synsets"]
        names = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
        missing = next((line for line in lines if int(line) not in names), None)
        if missing is not None:
            raise where.refusal(f"label {missing} is not in {decode_name(meta)}", "Take both from one kit.")
        return [names[int(line)] for line in lines]


def _by_name(lines: list[str], images: list[str], where: Where) -> list[str]:
    """Return the synset of each image from rows of image,synset in any order, with or without header and suffixes."""
    rows = (re.match(r"([^,\s]+)[,\s]+(n\d{8})", line) for line in lines)
    synsets = {row[1].rsplit("/")[-1].partition(".")[0]: row[2] for row in rows if row}
    missing = next((image for image in images if image not in synsets), None)
    if missing is not None:
        raise where.refusal(f"no label for {missing}", "Every validation image needs one.")
    return [synsets[image] for image in images]


def _file_stem(path: bytes) -> str:
    """Return the file name without directories and suffix."""
    return decode_name(re.split(rb"[/!]", path)[-1]).partition(".")[0]


class _Window(io.RawIOBase):
    """Byte range of a file as a file."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        self._file, self._start, self._size, self._position = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = {0: 0, 1: self._position, 2: self._size}[whence] + offset
        return self._position

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        self._file.seek(self._start + self._position)
        content = self._file.read(max(0, min(len(view), self._size - self._position)))
        view[: len(content)] = content
        self._position += len(content)
        return len(content)
