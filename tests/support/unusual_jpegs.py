"""JPEGs that encoders do not write: kinds that the native decoder refuses, and variants that it takes."""

from PIL import Image

from tests.support.shard_set import encode_image, smooth_pixels

DHT, DQT, APP1 = 0xC4, 0xDB, 0xE1
"""Markers: Huffman tables, quantisation tables, Exif."""


def with_segment(data: bytes, marker: int, content: bytes) -> bytes:
    """Insert a segment in front of the scan."""
    scan = data.index(b"\xff\xda")
    return data[:scan] + bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2, "big") + content + data[scan:]


def before_segments(data: bytes, inserted: bytes) -> bytes:
    """Insert bytes in front of the tables, the frame and the scan."""
    marks = (b"\xff\xdb", b"\xff\xc0", b"\xff\xc4", b"\xff\xda")
    for mark in marks:
        at = data.index(mark)
        data = data[:at] + inserted + data[at:]
    return data


def without_markers(data: bytes) -> bytes:
    """Remove the JFIF segment."""
    assert data[2:4] == b"\xff\xe0"
    return data[:2] + data[4 + int.from_bytes(data[4:6], "big") :]


def refused_images() -> dict[str, tuple[bytes, str]]:
    """Return images of 60 x 50 pixels, or that claim to be, and the reasons for which they are refused."""
    rgb = smooth_pixels(1, 50, 60)
    good = encode_image(rgb, quality=90, subsampling=2)
    sof, scan = good.index(b"\xff\xc0"), good.index(b"\xff\xda")
    restarts = encode_image(rgb, quality=90, restart_marker_rows=1)

    def changed(at: int, value: int) -> bytes:
        return good[:at] + bytes([value]) + good[at + 1 :]

    rows = [at for at in range(len(restarts) - 1) if restarts[at] == 0xFF and 0xD0 <= restarts[at + 1] <= 0xD7]
    second = restarts[rows[1] + 1]
    return {
        "nothing": (b"", "format"),
        "png": (encode_image(rgb, kind="PNG"), "format"),
        "progressive": (encode_image(rgb, progressive=True), "format"),
        "cmyk": (encode_image(smooth_pixels(3, 50, 60, 4)), "format"),
        "rgb": (encode_image(rgb, keep_rgb=True), "format"),
        "arithmetic": (changed(sof + 1, 0xC9), "format"),
        "12 bits": (changed(sof + 4, 12), "format"),
        "4:4:0": (changed(sof + 11, 0x12), "format"),
        "lines unknown": (good[: sof + 5] + b"\0\0" + good[sof + 7 :], "format"),
        "no end": (good[:-2], "format"),
        "header alone": (good[:scan] + b"\xff\xd9", "format"),
        "no quantisation table": (changed(good.index(b"\xff\xdb") + 4, 3), "format"),
        "a table of all ones": (changed(good.index(b"\xff\xc4") + 5, 2), "format"),
        "two frames": (good[:sof] + good[sof:scan] + good[sof:], "format"),
        "garbage between header segments": (before_segments(good, b"abc"), "format"),
        "fill bytes before markers": (before_segments(good, b"\xff\xff"), "format"),
        "other components": (changed(sof + 10, 9), "format"),
        "two images": (good + good, "data"),
        "two images of other sizes": (good + encode_image(rgb[:20]), "data"),
        "no codes of luma": (with_segment(good, DHT, b"\x10" + bytes(16)), "data"),
        "no codes of chroma": (with_segment(good, DHT, b"\x11" + bytes(16)), "data"),
        "no codes of DC values": (with_segment(good, DHT, b"\x00" + bytes(16)), "data"),
        "other size": (encode_image(rgb[:-1]), "size"),
        "marker in the data": (good[: scan + 200] + b"\xff\xc4" + good[scan + 202 :], "data"),
        "cut short": (good[: scan + 120] + b"\xff\xd9", "data"),
        "missing restart": (restarts[: rows[1]] + restarts[rows[1] + 2 :], "data"),
        "doubled restart": (restarts[: rows[1]] + bytes([255, second]) + restarts[rows[1] :], "data"),
        "restarts out of order": (restarts[: rows[1] + 1] + bytes([second ^ 1]) + restarts[rows[1] + 2 :], "data"),
    }


def usual_variants() -> dict[str, bytes]:
    """Return images of 33 x 40 pixels that the native decoder takes.

    Gray with sampling factors, numbered components without JFIF, comments, superfluous data, tables of zeros.
    """
    gray = bytearray(encode_image(smooth_pixels(2, 40, 33, 1)))
    gray[gray.index(b"\xff\xc0") + 11] = 0x22
    rgb = smooth_pixels(1, 40, 33)
    good = encode_image(rgb, quality=90)
    restarts = encode_image(rgb, quality=90, restart_marker_rows=1)
    restart = next(at for at in range(len(restarts)) if restarts[at : at + 2] == b"\xff\xd1")
    exif = Image.Exif()
    exif[0x0112] = 6
    return {
        "gray 2x2": bytes(gray),
        "no JFIF": without_markers(good),
        "comment": encode_image(rgb, comment=b"seen", icc_profile=b"p" * 70_000),
        "more data": good[:-2] + bytes(100) + b"\xff\xd9",
        "garbage before a restart": restarts[:restart] + b"abcdef" + restarts[restart:],
        "extended": good.replace(b"\xff\xc0", b"\xff\xc1", 1),
        "rotated": encode_image(rgb, exif=exif),
        "a thumbnail in its header": with_segment(good, APP1, b"Exif\0\0" + encode_image(rgb[:16, :16])),
        "a table without codes that nothing uses": with_segment(good, DHT, b"\x13" + bytes(16)),
        "segments without a table": with_segment(with_segment(good, DHT, b""), DQT, b""),
        "luma multiplied by zeros": with_segment(good, DQT, b"\x00" + bytes(64)),
        "chroma multiplied by zeros": with_segment(good, DQT, b"\x01" + bytes(64)),
        "luma multiplied by zeros of 16 bits": with_segment(good, DQT, b"\x10" + bytes(128)),
    }
