"""Remove the parts of a shared library that no process reads (ELF, 64 bit, little endian).

System V ABI, chapters 4 and 5; the fields keep the names they have there.

binutils do not replace it (tried with 2.40 on the 226 libraries of a development environment, November 2026):

- `strip --strip-unneeded` gains as much (858 MB of 6.05 GB, `cut` 853 MB), but breaks four libraries that auditwheel
  has patched: OpenBLAS of NumPy and of SciPy and their libgfortran. The loader then says "ELF load command
  address/offset not page-aligned".
- `objcopy --remove-section .nv_fatbin` leaves zeros in the file: PyTorch's CUDA library stays at 520 MB, here 103 MB.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

MAGIC = b"\x7fELF\x02\x01"
"""First bytes of an ELF file, 64 bit, little endian."""
PT_LOAD = 1
PT_NOTE = 4
PT_GNU_PROPERTY = 0x6474E553
SHT_NOBITS = 8

Range = tuple[int, int]
"""Start and end in the file."""


class Header(NamedTuple):
    e_ident: bytes
    e_type: int
    e_machine: int
    e_version: int
    e_entry: int
    e_phoff: int
    e_shoff: int
    e_flags: int
    e_ehsize: int
    e_phentsize: int
    e_phnum: int
    e_shentsize: int
    e_shnum: int
    e_shstrndx: int


HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SEGMENT = struct.Struct("<IIQQQQQQ")
SECTION = struct.Struct("<IIQQQQIIQQ")


@dataclass(frozen=True)
class ProgramHeader:
    p_type: int
    p_flags: int
    p_offset: int
    p_vaddr: int
    p_paddr: int
    p_filesz: int
    p_memsz: int
    p_align: int

    @property
    def p_end(self) -> int:
        return self.p_offset + self.p_filesz

    def pack(self) -> bytes:
        return SEGMENT.pack(*self.__dict__.values())


def shrink(path: Path, unused: str = "", at_least: int = 1) -> int:
    """Cut a file (see `cut`) if that removes at least so many bytes; return the bytes removed."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return 0
    image = path.read_bytes()
    smaller = cut(image, unused)
    gain = len(image) - len(smaller)
    if gain < at_least:
        return 0
    # Replace the file instead of writing to it: installers hard-link one file into many environments.
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(smaller)
    part.chmod(path.stat().st_mode)
    part.replace(path)
    return gain


def cut(image: bytes, unused: str = "") -> bytes:
    """Return the library without section `unused`, symbol tables for debuggers, and section headers.

    Only whole pages are removed, so that segments keep their addresses and their alignment in the file. The segment of
    `unused` is split: the first part ends in zeros that the loader maps, as for .bss, and the second follows.
    """
    header = Header(*HEADER.unpack_from(image))
    segments = [
        ProgramHeader(*SEGMENT.unpack_from(image, header.e_phoff + number * SEGMENT.size))
        for number in range(header.e_phnum)
    ]
    page = max((segment.p_align for segment in segments if segment.p_type == PT_LOAD), default=1)
    sections = dict(_sections(image, header))
    hole = _whole_pages(sections.get(unused, (0, 0)), page)
    segments = [part for segment in segments for part in _split(segment, hole)]
    holes = list(_unloaded(segments, page))
    if len(segments) > header.e_phnum:  # the table grows into the gap behind it, else replaces the notes
        space = min(start for start, _ in sections.values()) - header.e_phoff
        if len(segments) * SEGMENT.size > space:
            segments = [segment for segment in segments if segment.p_type not in (PT_NOTE, PT_GNU_PROPERTY)]
        if len(segments) * SEGMENT.size > space:
            raise ValueError("no space for another program header")
    small = bytearray(_without(image, holes, max(segment.p_end for segment in segments)))
    table = header.e_phoff - _removed_before(header.e_phoff, holes)
    HEADER.pack_into(
        small, 0, *header._replace(e_phoff=table, e_phnum=len(segments), e_shoff=0, e_shnum=0, e_shstrndx=0)
    )
    small[table : table + len(segments) * SEGMENT.size] = b"".join(
        _moved(segment, holes).pack() for segment in segments
    )
    return bytes(small)


def _sections(image: bytes, header: Header) -> Iterator[tuple[str, Range]]:
    """Yield the names and file ranges of the sections that have content."""
    table = [SECTION.unpack_from(image, header.e_shoff + number * SECTION.size) for number in range(header.e_shnum)]
    for sh_name, sh_type, _, _, sh_offset, sh_size, *_ in table:
        if sh_type != SHT_NOBITS and sh_size:
            start = table[header.e_shstrndx][4] + sh_name
            yield image[start : image.index(b"\0", start)].decode(), (sh_offset, sh_offset + sh_size)


def _whole_pages(part: Range, page: int) -> Range:
    """Return the whole pages of a range; start = end if there are none."""
    start = -(-part[0] // page) * page
    return start, max(start, part[1] // page * page)


def _split(segment: ProgramHeader, hole: Range) -> list[ProgramHeader]:
    """Split a loaded segment that spans the hole in two: one that ends in zeros, and the rest."""
    start, end = hole
    if segment.p_type != PT_LOAD or not segment.p_offset < start < end < segment.p_end:
        return [segment]
    before, skipped = start - segment.p_offset, end - segment.p_offset
    return [
        replace(segment, p_filesz=before, p_memsz=skipped),
        replace(
            segment,
            p_offset=end,
            p_vaddr=segment.p_vaddr + skipped,
            p_paddr=segment.p_paddr + skipped,
            p_filesz=segment.p_filesz - skipped,
            p_memsz=segment.p_memsz - skipped,
        ),
    ]


def _unloaded(segments: Sequence[ProgramHeader], page: int) -> Iterator[Range]:
    """Yield the whole pages between loaded segments."""
    loaded = sorted((segment.p_offset, segment.p_end) for segment in segments if segment.p_type == PT_LOAD)
    for (_, end), (start, _) in pairwise(loaded):
        between = _whole_pages((end, start), page)
        if between[0] < between[1]:
            yield between


def _without(image: bytes, holes: Sequence[Range], end: int) -> bytes:
    """Return the image up to `end`, without the holes."""
    edges = [0, *(edge for hole in holes for edge in hole), end]
    return b"".join(image[start:stop] for start, stop in zip(edges[::2], edges[1::2], strict=True))


def _moved(segment: ProgramHeader, holes: Sequence[Range]) -> ProgramHeader:
    return replace(segment, p_offset=segment.p_offset - _removed_before(segment.p_offset, holes))


def _removed_before(offset: int, holes: Sequence[Range]) -> int:
    """Return the bytes removed before an offset."""
    return sum(end - start for start, end in holes if end <= offset)
