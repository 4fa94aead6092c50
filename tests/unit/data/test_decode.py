"""Decoding only the upper rows of a JPEG: the same pixels and bad records as decoding all of it."""

import tarfile

import numpy as np
import pytest

from podscale.data.decode import BadRecord, decode, decode_rows, truncate_jpeg
from tests.support.loading import special_images
from tests.support.shard_set import encode_image, smooth_pixels

HEIGHT, WIDTH = 150, 101


def photograph(**options: object) -> np.ndarray:
    return as_record(encode_image(smooth_pixels(1, HEIGHT, WIDTH), **{"quality": 90, **options}))


def as_record(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8)


SEQUENTIAL = {
    "4:4:4": photograph(subsampling=0),
    "4:2:2": photograph(subsampling=1),
    "4:2:0": photograph(subsampling=2),
    "gray": as_record(encode_image(smooth_pixels(2, HEIGHT, WIDTH, 1))),
    "own tables": photograph(optimize=True),
    "restart markers": photograph(restart_marker_rows=1),
    "restart markers in rows": photograph(restart_marker_blocks=3),
    "a comment and a profile": photograph(comment=b"seen", icc_profile=b"p" * 70_000),
}


@pytest.mark.parametrize("kind", SEQUENTIAL)
@pytest.mark.parametrize("rows", [1, 7, 8, 15, 16, 17, 40, 79, 100, 126])
def test_decoded_rows_are_those_of_the_full_image(kind, rows) -> None:
    record = SEQUENTIAL[kind]
    whole = decode(record)
    assert whole.shape == (HEIGHT, WIDTH, 3)
    upper = decode_rows(record, HEIGHT, WIDTH, rows, np.empty(whole.size, dtype=np.uint8))
    assert rows <= len(upper) < HEIGHT, "it ends early"
    assert np.array_equal(upper[:rows], whole[:rows])


def test_full_images_when_little_would_be_saved() -> None:
    record = SEQUENTIAL["4:2:0"]
    for rows in (HEIGHT, HEIGHT - 20):
        assert truncate_jpeg(record, HEIGHT, WIDTH, rows) is None
        assert np.array_equal(decode_rows(record, HEIGHT, WIDTH, rows), decode(record))


@pytest.mark.parametrize(
    ("record", "height"),
    [
        (photograph(progressive=True), HEIGHT),
        (photograph()[:-1], HEIGHT),
        (photograph()[:-300], HEIGHT),
        (photograph()[:15], HEIGHT),
        (photograph(), HEIGHT + 1),
        (as_record(bytes(photograph()).replace(b"\xff\x00", b"\xff\x01", 1)), HEIGHT),
        (as_record(encode_image(smooth_pixels(3, HEIGHT, WIDTH, 4))), HEIGHT),
        (as_record(encode_image(smooth_pixels(3, HEIGHT, WIDTH), kind="PNG") + b"\xff\xd9"), HEIGHT),
        (as_record(b"\xff\xd8\xff\xd9"), HEIGHT),
    ],
    ids=["progressive", "no end", "cut short", "header alone", "other size", "marker within", "cmyk", "png", "nothing"],
)
def test_images_that_must_be_decoded_fully(record, height) -> None:
    assert truncate_jpeg(record, height, WIDTH, 40) is None


def test_special_images_are_the_same() -> None:
    for name, data in special_images().items():
        record = as_record(data)
        whole = decode(record)
        height, width = whole.shape[:2]
        for rows in (1, height // 2 or 1, height):
            assert np.array_equal(decode_rows(record, height, width, rows)[:rows], whole[:rows]), name


def outcome(record: np.ndarray, rows: int) -> object:
    try:
        return decode_rows(record, HEIGHT, WIDTH, rows)[:40].tobytes()
    except BadRecord:
        return "bad"


@pytest.mark.parametrize("kind", ["4:2:0", "restart markers"])
def test_a_damaged_image_is_bad_or_looks_the_same_however_much_is_decoded(kind) -> None:
    """Damage: bytes changed in the header and behind it, some to the start of a marker; bytes removed; truncation."""
    generator = np.random.default_rng(5)
    good = SEQUENTIAL[kind]
    scan = bytes(good).index(b"\xff\xda")
    early = bad = 0
    for attempt in range(400):
        damaged = good.copy()
        where = 0
        for _ in range(int(generator.integers(1, 4))):
            where = int(generator.integers(2 if attempt % 4 == 0 else scan, len(good) - 2))
            damaged[where] = generator.choice([255, generator.integers(256)])
        if attempt % 5 == 1:
            damaged = damaged[:where]
        if attempt % 5 == 2:
            damaged = np.delete(damaged, slice(where, where + int(generator.integers(1, 400))))
        early += truncate_jpeg(damaged, HEIGHT, WIDTH, 40) is not None
        whole = outcome(damaged, HEIGHT)
        bad += whole == "bad"
        assert outcome(damaged, 40) == whole, (attempt, where)
    assert early > 80
    assert bad > 80


def test_real_images_are_the_same(real_data) -> None:
    early = 0
    with tarfile.open(real_data / "imagenet-500.tar") as tar:
        members = [member for member in tar if member.name.endswith((".jpg", ".JPEG"))][::17]
        for member in members:
            file = tar.extractfile(member)
            assert file is not None
            record = as_record(file.read())
            whole = decode(record)
            height, width = whole.shape[:2]
            rows = height * 2 // 3
            early += truncate_jpeg(record, height, width, rows) is not None
            assert np.array_equal(decode_rows(record, height, width, rows)[:rows], whole[:rows])
    assert early > len(members) * 0.8
