"""Decode index of a shard: states of the entropy decoder from which the native loader starts at a crop.

The file is beside its shard. It is optional: it saves time and never changes pixels. It is a column file with the byte
string of each image, in the order of the shard; native/src/index.rs describes that. An image without one has an empty
string. The header has the sha256 of the shard, so that the index of another or an older shard is not used. Each byte
string has a checksum of the image's bytes, which the extension compares whenever it uses the string.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from podscale.data.sharding import file_formats
from podscale.errors import InputError

log = logging.getLogger("podscale.data")

KIND = "decode index"
VERSION = 1
SUFFIX = ".decode"

ImageIndex = npt.NDArray[np.uint8]
MAX_INDEX_PERCENT = 3
"""Largest decode index of an image by default, percent of the image's bytes."""
CHECKSUM_BYTES = 8
"""Length of the checksum at the start of an image's index, bytes."""
REMEDY = "podscale shard RUN --verify --decode-index"
"""Command that repairs any damage of the indexes."""
NO_INDEX: ImageIndex = np.empty(0, dtype=np.uint8)
"""Decode index of an image that has none."""


def decode_index_path(shard: Path) -> Path:
    return shard.with_suffix(SUFFIX)


class DecodeIndex:
    """Decode index of one shard, memory-mapped: the byte string of each image, uint8 [bytes].

    `interval` is the number of MCUs between two entries; images whose index would be too large have larger intervals.
    """

    def __init__(self, interval: int, columns: file_formats.Columns) -> None:
        self.interval = interval
        self._ends: list[int] = columns["image_ends"].tolist()
        self._text = columns["image_text"]

    @classmethod
    def read(cls, shard: Path, sha256: str, images: int) -> "DecodeIndex | None":
        """Read the index of a shard with this sha256; None if it has none.

        Raises InputError if the file is damaged, of another version, or of another shard.
        """
        path = decode_index_path(shard)
        try:
            with path.open("rb") as file:
                raw = file_formats.map_file(file)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise _unusable(str(path), f"cannot be read: {error}") from error
        return cls.parse(raw, sha256, images, str(path))

    @classmethod
    def read_if_usable(cls, shard: Path, sha256: str, images: int) -> "DecodeIndex | None":
        """Read the index of a shard as `read` does; None and a warning if it is not usable, as it only saves time."""
        try:
            return cls.read(shard, sha256, images)
        except InputError as error:
            log.warning("decoding without an index: %s", error)
            return None

    @classmethod
    def parse(cls, raw: npt.NDArray[np.uint8], sha256: str, images: int, where: str) -> "DecodeIndex":
        """Return the index in a file's bytes; raises InputError as `read` does.

        Args:
            raw: uint8 [bytes], content of the file.
            where: Path or URL of the file, for the error.
        """
        try:
            header, columns = file_formats.parse_columns(raw, KIND, where)
        except InputError as error:
            raise _unusable(where, error.problem) from error
        if (version := header.get("version")) != VERSION:
            raise _unusable(where, f"of version {version}; this Podscale reads version {VERSION}")
        if header.get("shard_sha256") != sha256:
            raise _unusable(where, "the decode index of another shard")
        try:
            index = cls(int(header["interval"]), columns)
            is_sound = index._has_sound_ends()
        except (KeyError, TypeError, ValueError):
            is_sound = False
        if not is_sound:
            raise _unusable(where, "damaged: its header or the lengths of its entries are wrong")
        if len(index) != images:
            raise _unusable(where, f"has {len(index)} images, and the shard has {images}")
        return index

    def _has_sound_ends(self) -> bool:
        begins = [0, *self._ends]
        is_typed = self._text.dtype == np.uint8 and isinstance(begins[-1], int)
        return is_typed and begins == sorted(begins) and begins[-1] == len(self._text)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> ImageIndex:
        """Return the index of an image by its number in the shard."""
        index: ImageIndex = self._text[self._ends[number - 1] if number else 0 : self._ends[number]]
        return index

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Bytes of each image's index, int64 [images]."""
        ends = np.array([0, *self._ends], dtype=np.int64)
        return ends[1:] - ends[:-1]

    @property
    def size(self) -> int:
        """Bytes of all images' indexes."""
        return len(self._text) + 8 * len(self)


def write_decode_index(shard: Path, sha256: str, interval: int, images: Sequence[bytes]) -> None:
    """Write the index of a shard with this sha256; `images` has the byte string of each image."""
    header = {"kind": KIND, "version": VERSION, "shard_sha256": sha256, "interval": interval}
    file_formats.write_columns(decode_index_path(shard), header, file_formats.pack_byte_strings("image", images))


def is_index_of(index: ImageIndex, record: npt.NDArray[np.uint8]) -> bool:
    """Return True if an image's index has the checksum of itself and of the encoded image `record`, uint8 [bytes].

    The extension compares it too; this comparison verifies sets on machines without the extension.
    """
    rest = xxhash.xxh3_64_intdigest(index[CHECKSUM_BYTES:].data)
    found = int.from_bytes(index[:CHECKSUM_BYTES].tobytes(), "little")
    return len(index) > CHECKSUM_BYTES and found == xxhash.xxh3_64_intdigest(record.data, seed=rest)


def _unusable(where: str, problem: str) -> InputError:
    return InputError(problem, field=where, hint=f"`{REMEDY}` writes it again.")
