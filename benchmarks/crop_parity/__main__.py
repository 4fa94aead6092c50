"""Crops of the native decoder beside those of the reference path and of Pillow, over photographs.

    python -m benchmarks.crop_parity ARCHIVE_OR_FOLDER... [--photographs 5000] [--sizes 32 224]

Compares crops of every JPEG of tar archives and folders, or of that many of each, evenly spaced. Each version of the
kernels decodes each crop from the file, with a decode index, and from packed coefficients. Then it compares a damaged
copy of each photograph. Exits with status 1 after writing the page if a crop or a decision differs.
"""

import argparse
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from benchmarks.conditions import head
from benchmarks.crop_parity import parity
from benchmarks.crop_parity.oracles import DAMAGES
from benchmarks.crop_parity.parity import WAYS, Parity
from benchmarks.harness import Options, exit_unavailable, write_results
from benchmarks.measure import cpu_seconds
from benchmarks.samples import write_archive
from podscale.data import native

T = TypeVar("T")
SUFFIXES = (".jpg", ".jpeg")
EVERYTHING = 10**9
REPORT_EVERY = 500
"""Photographs between two lines of progress."""
READING = """Pixels are compared to the bit, with both filters. The reference path is `podscale.data.decode`: simplejpeg
decodes down to the crop, Pillow cuts and resizes. Pillow alone decodes the whole file, cuts, resizes and mirrors it
without code of Podscale. A training leaves refused crops to the reference path.

Damage is a changed bit or byte, 1 to 39 removed bytes, 5 inserted ones, an early end of the data behind which an end
marker stands, or a changed byte of the header, at a random place. A crop of a damaged file is refused, or has the
pixels of the reference path, which must not refuse it, and those of Pillow unless Pillow refuses the whole file."""


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("sources", nargs="*", type=Path, metavar="ARCHIVE_OR_FOLDER")
    parser.add_size("--photographs", full=EVERYTHING, small=6, type=int, help="most photographs of each source")
    parser.add_size("--sizes", full=[32, 224], small=[16], type=int, nargs="+", help="sides of the crops, pixels")
    options = parser.read()
    if not options.sources and not options.small:
        parser.error("ARCHIVE_OR_FOLDER: missing. Give the photographs to compare.")
    if not native.is_available():
        exit_unavailable("the native extension is not usable")
    lines, differences = head("Parity of the native decoder", ("pillow", "simplejpeg", "numpy")), 0
    with tempfile.TemporaryDirectory() as scratch:
        for source in options.sources or [write_archive(Path(scratch) / "samples.tar", images=8)]:
            text, count = compare(source, options)
            lines += text
            differences += count
    write_results(options.results, "crop-parity.md", [*lines, READING])
    if differences:
        sys.exit(1)


def compare(source: Path, options: argparse.Namespace) -> tuple[list[str], int]:
    """Compare the photographs of a source. Returns its part of the page, and the number of differences."""
    found, begin = Parity(), cpu_seconds()
    in_all, files = photographs(source, options.photographs)
    for number, data in enumerate(files):
        found.compare(data, number, options.sizes)
        if number % REPORT_EVERY == REPORT_EVERY - 1:
            print(f"{source.name}: {number + 1:,} photographs, {found.differences:,} differences", file=sys.stderr)
    sizes = " and ".join(f"{size} px" for size in options.sizes)
    which = f"All {in_all:,}" if found.photographs == in_all else f"{found.photographs:,} of {in_all:,}"
    title = f"{which} photographs, crops of {sizes}, {cpu_seconds() - begin:,.0f} CPU seconds"
    return [f"## {source.name}", "", *describe(title, found)], found.differences


def photographs(source: Path, most: int) -> tuple[int, Iterator[bytes]]:
    """Return the number of JPEGs of an archive or a folder, and at most `most` of them, evenly spaced."""
    if source.is_dir():
        paths = sorted(path for path in source.rglob("*") if path.suffix.lower() in SUFFIXES)
        return len(paths), (path.read_bytes() for path in evenly(paths, most))
    with tarfile.open(source) as archive:
        members = [member for member in archive if member.isfile() and member.name.lower().endswith(SUFFIXES)]
    return len(members), _read(source, evenly(members, most))


def _read(source: Path, members: Sequence[tarfile.TarInfo]) -> Iterator[bytes]:
    with tarfile.open(source) as archive:
        for member in members:
            file = archive.extractfile(member)
            assert file is not None, "a regular file has content"
            yield file.read()


def evenly(values: Sequence[T], most: int) -> list[T]:
    """Return at most `most` of the values, evenly spaced."""
    return [values[at] for at in np.linspace(0, len(values) - 1, min(most, len(values))).round().astype(int)]


def describe(title: str, found: Parity) -> list[str]:
    """Return the tables of one source."""
    refused = ", ".join(f"{count:,} ({reason})" for reason, count in sorted(found.refused.items())) or "none"
    columns = ("crops", "refused", parity.OTHER_THAN_REFERENCE, parity.OTHER_THAN_PILLOW)
    lines = [f"{title}. Refused photographs: {refused}. Without a decode index: {found.without_index:,}.", ""]
    lines += [f"| kernels | decoded from | {' | '.join(columns)} |", "|---|---|" + "---:|" * len(columns)]
    for kernels in found.decoders:
        for way in WAYS:
            counts = (f"{found.crops[kernels, way, column]:,}" for column in columns)
            lines.append(f"| {kernels} | {way} | {' | '.join(counts)} |")
    damaged = ("files", *columns, "refused by Pillow", parity.OTHER_DECISIONS, parity.STALE_INDEX_USED)
    lines += ["", "A damaged copy of each, its upper half and all of it, in all of these ways:", ""]
    lines += [f"| damage | {' | '.join(damaged)} |", "|---|" + "---:|" * len(damaged)]
    for kind in DAMAGES:
        lines.append(f"| {kind} | {' | '.join(f'{found.damaged[kind, column]:,}' for column in damaged)} |")
    return [*lines, ""]


if __name__ == "__main__":
    main()
