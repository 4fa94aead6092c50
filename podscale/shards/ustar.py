"""Plain USTAR archives written by hand: the same members give the same bytes on every machine.

Layout per member (POSIX.1-1988, ustar interchange format): a 512-byte header, the content, zeros up to the next
multiple of 512; two zero blocks end the archive. Owner, group and time are 0, the mode is 0644.
"""

TAR_BLOCK_BYTES = 512
TAR_END = bytes(2 * TAR_BLOCK_BYTES)


def _template() -> bytearray:
    header = bytearray(TAR_BLOCK_BYTES)
    header[100:108] = b"0000644\0"
    header[108:116] = header[116:124] = b"0000000\0"
    header[136:148] = b"00000000000\0"
    header[148:156] = b" " * 8  # the checksum is taken with its own field as spaces
    header[156:157] = b"0"
    header[257:265] = b"ustar\x0000"
    return header


_TEMPLATE = _template()
_TEMPLATE_SUM = sum(_TEMPLATE)


_MIDDLE, _TIME, _REST = bytes(_TEMPLATE[100:124]), bytes(_TEMPLATE[135:148]), bytes(_TEMPLATE[156:])


def tar_header(name: bytes, size: int) -> bytes:
    """The header block of a regular file; `name` is at most 100 bytes, `size` below 8 GiB."""
    assert 0 < len(name) <= 100
    assert 0 <= size < 8**11
    octal = b"%011o" % size
    checksum = b"%06o\0 " % (_TEMPLATE_SUM + sum(name) + sum(octal))
    return b"".join((name.ljust(100, b"\0"), _MIDDLE, octal, _TIME, checksum, _REST))


def tar_padding(size: int) -> int:
    """Bytes of zeros after a content of `size` bytes."""
    return -size % TAR_BLOCK_BYTES


def tar_sample_bytes(size: int) -> int:
    """Bytes that one sample takes in a shard: its image and its one-block label, each with a header."""
    return TAR_BLOCK_BYTES + size + tar_padding(size) + 2 * TAR_BLOCK_BYTES
