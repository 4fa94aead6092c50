"""Decode index of a shard: states of the entropy decoder from which the native loader starts at a crop.

The file is beside its shard. It is optional: it saves time and never changes pixels. It is a column file with the byte
string of each image, in the order of the shard; native/src/index.rs describes that. An image without one has an empty
string. The header has the sha256 of the shard, so that the index of another or an older shard is not used. Each byte
string has a checksum of the image's bytes, which the extension compares whenever it uses the string.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from podscale.data.sharding import file_formats
from podscale.errors import InputError

KIND = "decode index"
VERSION = 1
SUFFIX = ".decode"

ImageIndex = npt.NDArray[np.uint8]
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
        # Plain arrays and integers: an element of a memory map takes microseconds.
        self._ends, self._text = np.asarray(columns["image_ends"]).tolist(), np.asarray(columns["image_text"])

    @classmethod
    def read(cls, shard: Path, sha256: str, images: int) -> "DecodeIndex | None":
        """Read the index of a shard with this sha256; None if it has none.

        Raises InputError if the file is damaged, of another version, or of another shard.
        """
        path = decode_index_path(shard)
        if not path.exists():
            return None
        header, columns = file_formats.read_columns(path, KIND)
        try:
            version, of_shard, interval = header["version"], header["shard_sha256"], int(header["interval"])
            index = cls(interval, columns)
            is_sound = version == VERSION and len(index) == images and index._has_sound_ends()
        except (KeyError, TypeError, ValueError):
            is_sound = False
        if not is_sound:
            raise _unusable(path, f"not a decode index of version {VERSION} for {images} images")
        if of_shard != sha256:
            raise _unusable(path, "the decode index of another shard")
        return index

    def _has_sound_ends(self) -> bool:
        begins = [0, *self._ends]
        return begins == sorted(begins) and begins[-1] == len(self._text)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> ImageIndex:
        """Return the index of an image by its number in the shard."""
        index: ImageIndex = self._text[self._ends[number - 1] if number else 0 : self._ends[number]]
        return index

    @property
    def size(self) -> int:
        """Bytes of all images' indexes."""
        return len(self._text) + 8 * len(self)


def write_decode_index(shard: Path, sha256: str, interval: int, images: Sequence[bytes]) -> None:
    """Write the index of a shard with this sha256; `images` has the byte string of each image."""
    header = {"kind": KIND, "version": VERSION, "shard_sha256": sha256, "interval": interval}
    file_formats.write_columns(decode_index_path(shard), header, file_formats.pack_byte_strings("image", images))


def _unusable(path: Path, problem: str) -> InputError:
    return InputError(problem, field=str(path), hint="Run `podscale shard --decode-index` to write it again.")
