"""Bytes and requests of ranged reads of crops from a remote shard set, against downloading whole shards.

    podscale shard <document> && python -m benchmarks.crop_bytes SHARD_SET... [--epochs 5] [--size 224]

Counts, without a network: for every random crop of every training image, the bytes that a decoder needs with a decode
index of every 8th MCU, and the requests that fetch them. The node cache downloads a shard in blocks of 8 MiB, once.
"""

import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.conditions import head
from benchmarks.harness import Options, exit_unavailable, write_results
from benchmarks.samples import make_shards
from podscale.config.schedule import CropSection
from podscale.data import native
from podscale.data.crop import CropParams, training_crops
from podscale.data.decode import Pixels, find_frame_and_scan
from podscale.data.decode_index import CHECKSUM_BYTES
from podscale.data.remote_files import ReadRetryPolicy
from podscale.data.shard_set import ShardSet, Split

INTERVAL = 8
"""MCUs between two entries; every image has all of them, whatever their size."""
MARGIN = 2
"""Pixels around a crop that are decoded where chroma is subsampled."""
READING = """The last two kinds of range need the decode index, whose own bytes are not counted. The last column is the
number of crops of an image, over all epochs on a node, from which on whole shards are fewer bytes: they are downloaded
once, in blocks of 8 MiB, and read from the node's cache."""


@dataclass(frozen=True)
class Layout:
    """Position of the MCUs in a JPEG.

    Args:
        header: Bytes before the entropy-coded data.
        size: Bytes of the file.
        mcu: Width and height of an MCU, pixels.
        across: MCUs of a row.
        down: Rows of MCUs.
        offsets: Offset of each entry's first byte in the file, int64 [entries], from MCU 0 to the end.
    """

    header: int
    size: int
    mcu: tuple[int, int]
    across: int
    down: int
    offsets: npt.NDArray[np.int64]

    @classmethod
    def read(cls, record: Pixels, width: int, height: int) -> "Layout | None":
        """Return the layout of an encoded image; None if the extension does not decode it from entries."""
        index = np.frombuffer(native.build_decode_index(record, INTERVAL, max_percent=10**6), dtype=np.uint8)
        frame_and_scan = find_frame_and_scan(record.data, height, width)
        if not len(index) or frame_and_scan is None:
            return None
        frame, header = frame_and_scan
        mcu, components = _mcu(record, frame)
        bits = index[CHECKSUM_BYTES + 2 :].view("<u2").reshape(-1, 1 + components)[:, 0].astype(np.int64)
        data = record[header:]
        is_marker = (data[:-1] == 0xFF) & ((data[1:] == 0) | (data[1:] >> 3 == 0xD0 >> 3))
        is_stuffed = np.concatenate([[False], is_marker]) | np.append(is_marker & (data[1:] != 0), False)
        bytes_of_data = np.append(np.flatnonzero(~is_stuffed), len(data)) + header
        positions = np.concatenate([[0], np.cumsum(bits)]) // 8
        return cls(
            header,
            len(record),
            mcu,
            -(-width // mcu[0]),
            -(-height // mcu[1]),
            bytes_of_data[np.minimum(positions, len(data))],
        )

    def range_of(self, first: int, last: int) -> tuple[int, int]:
        """Return the bytes from the entry before MCU `first` to the entry after MCU `last`."""
        end = min(last // INTERVAL + 1, len(self.offsets) - 1)
        return int(self.offsets[first // INTERVAL]), min(int(self.offsets[end]) + 1, self.size)


def _mcu(record: Pixels, frame: int) -> tuple[tuple[int, int], int]:
    """Return the size of an MCU in pixels, and the number of components, by the offset of the height in the frame."""
    components, sampling = int(record[frame + 4]), int(record[frame + 6])
    return (8 * (sampling >> 4), 8 * (sampling & 15)) if components > 1 else (8, 8), components


def needs(layout: Layout, crop: CropParams) -> dict[str, tuple[int, int]]:
    """Return the requests and the bytes of one crop, by the kind of read."""
    (width, height), margin = layout.mcu, MARGIN if layout.mcu != (8, 8) else 0
    left, top = max(crop.left - margin, 0) // width, max(crop.top - margin, 0) // height
    right = min((crop.left + crop.width - 1 + margin) // width, layout.across - 1)
    bottom = min((crop.top + crop.height - 1 + margin) // height, layout.down - 1)
    rows = [layout.range_of(row * layout.across + left, row * layout.across + right) for row in range(top, bottom + 1)]
    begin, end = rows[0][0], rows[-1][1]
    gaps = [start - stop for (_, stop), (start, _) in pairwise(rows) if start > stop]
    return {
        "whole record": (1, layout.size),
        "from its start to the last byte of the crop": (1, end),
        "header, and the bytes from the first to the last row": (2, layout.header + end - begin),
        "header, and the bytes of each row": (2 + len(gaps), layout.header + end - begin - sum(gaps)),
    }


def count(split: Split, epochs: int, size: int) -> dict[str, tuple[float, float]]:
    """Return the mean requests of a crop, and its bytes as a fraction of all records, by the kind of read."""
    totals: dict[str, list[int]] = {}
    counted, sizes = 0, [split.column(name).astype(np.int64) for name in ("width", "height")]
    epoch_crops = [
        training_crops(0, np.full(len(split), epoch), split.keys, *sizes, crop=CropSection(), size=size)
        for epoch in range(epochs)
    ]
    record_bytes = 0
    for row in range(len(split)):
        if (layout := Layout.read(split.read(row), *(int(side[row]) for side in sizes))) is None:
            continue
        for crops in epoch_crops:
            counted += 1
            record_bytes += layout.size
            for kind, (requests, needed) in needs(layout, crops[row]).items():
                total = totals.setdefault(kind, [0, 0])
                total[0] += requests
                total[1] += needed
    return {kind: (requests / counted, needed / record_bytes) for kind, (requests, needed) in totals.items()}


def table(directory: Path, epochs: int, size: int) -> list[str]:
    """Return the table of one shard set."""
    shard_set = ShardSet.open(directory)
    split, shards = shard_set.split("train"), shard_set.manifest.splits["train"].shards
    block = ReadRetryPolicy().block_bytes
    blocks = sum(-(-shard.bytes // block) for shard in shards)
    kilobytes = split.column("size").mean() / 1000
    lines = [
        f"{len(split):,} images of {kilobytes:.1f} kB on average, {epochs} crops of each at {size} px:",
        "",
        "| read | requests a crop | bytes a crop, of its record | crops from which on whole shards are fewer bytes |",
        "|---|---:|---:|---:|",
    ]
    for kind, (requests, fraction) in count(split, epochs, size).items():
        lines.append(f"| {kind} | {requests:.1f} | {fraction:.0%} | {1 / fraction:.1f} |")
    return [*lines, f"| whole shards, once | {blocks / len(split):.4f}, once | 100 %, once | |", ""]


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("shard_sets", nargs="*", type=Path, metavar="SHARD_SET")
    parser.add_size("--epochs", full=5, small=2, type=int)
    parser.add_size("--size", full=224, small=32, type=int)
    options = parser.read()
    if not options.shard_sets and not options.small:
        parser.error("SHARD_SET: missing. Give the shard sets to count.")
    if not native.is_installed():
        exit_unavailable("the native extension is not installed")
    lines = head("Ranged reads of crops", ("pillow", "numpy"))
    with tempfile.TemporaryDirectory() as scratch:
        for directory in options.shard_sets or [make_shards(Path(scratch), images=24)]:
            lines += table(directory, options.epochs, options.size)
    write_results(options.results, "crop-bytes.md", [*lines, READING])


if __name__ == "__main__":
    main()
