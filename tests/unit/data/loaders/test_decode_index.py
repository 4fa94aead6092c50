"""Decode index: the same pixels as without it, or a refusal, whatever its bytes."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from benchmarks.crop_parity.oracles import Photograph
from podscale.data.crop import CropParams
from podscale.data.decode import Pixels
from podscale.data.decode_index import DecodeIndex, decode_index_path, write_decode_index
from podscale.data.loaders.build_loader import open_shard_set
from podscale.data.native import REASONS, CropDecoder, build_decode_index
from podscale.data.shard_set import ShardSet
from podscale.errors import InputError
from tests.support.loading import (
    ANY_SIZE,
    add_indexes,
    assert_same_batches,
    document,
    evaluate,
    needs_native,
    train_and_close,
)
from tests.support.shard_set import encode_image, smooth_pixels
from tests.unit.data.test_native import (
    KERNELS,
    SAMPLINGS,
    SHAPES,
    SIZE,
    as_record,
    encoded,
    native,
    random_crops,
)

pytestmark = needs_native

INDEX = next(number for number, reason in REASONS.items() if reason == "index")


def dense_index(record: Pixels, interval: int) -> Pixels:
    return as_record(build_decode_index(record, interval, max_percent=ANY_SIZE))


def decode_with(
    index: Pixels, record: Pixels, shape: tuple[int, int], crops: Sequence[CropParams], *, kernels: str | None = None
) -> tuple[Pixels, Pixels]:
    """Return the crops of one image with this index, and their status."""
    return native(CropDecoder(1, kernels=kernels), record, shape, crops, index=index)


@KERNELS
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_crops_are_those_of_the_reference(kind, kernels) -> None:
    generator = np.random.default_rng(1)
    indexed = 0
    for height, width in SHAPES:
        record = as_record(encoded(kind, height, width))
        crops = random_crops(generator, height, width, SIZE)
        for interval in (1, 2, 3, 8, 50):
            index = dense_index(record, interval)
            indexed += len(index) > 0
            images, status = decode_with(index, record, (height, width), crops, kernels=kernels)
            assert not status.any(), (height, width, interval, status)
            for crop, image in zip(crops, images, strict=True):
                want = Photograph(record, height, width).crop_by_reference(crop, SIZE, "bilinear")
                assert np.array_equal(image, want), (height, width, interval, crop)
    assert indexed > 20


def test_the_checksum_is_xxh3_of_the_image_seeded_with_that_of_the_entries() -> None:
    record = as_record(encoded("4:2:0", 61, 50))
    index = dense_index(record, 2)
    assert forged(index[8:].tobytes(), record) == index.tobytes()
    assert int.from_bytes(index[8:10].tobytes(), "little") == 2
    assert len(index) == 8 + 2 + 8 * 8, "entries of 8 bytes for 4 x 4 MCUs"


@pytest.mark.parametrize("interval", [1, 8])
def test_an_index_has_at_most_three_percent_of_the_image(interval) -> None:
    sizes = []
    for side in (40, 100, 200, 400, 800):
        record = as_record(encoded("4:4:4", side, side))
        index = build_decode_index(record, interval)
        sizes.append(len(index) / len(record))
        assert len(index) <= 0.03 * len(record)
    assert sizes[-1] > (0.026 if interval == 1 else 0.016), "the smallest interval within the limit"


@pytest.mark.parametrize("name", ["nothing", "progressive", "cmyk", "truncated", "png"])
def test_what_the_extension_refuses_has_no_index(name) -> None:
    rgb = smooth_pixels(1, 150, 160)
    good = encode_image(rgb, quality=90)
    data = {
        "nothing": b"",
        "progressive": encode_image(rgb, progressive=True),
        "cmyk": encode_image(smooth_pixels(3, 150, 160, 4)),
        "truncated": good[:-200] + b"\xff\xd9",
        "png": encode_image(rgb, kind="PNG"),
    }[name]
    assert build_decode_index(good, 8)
    assert build_decode_index(data, 8) == b""


CROPS = [
    CropParams(10, 3, 40, 20, SIZE, SIZE, 0, 0, False),
    CropParams(30, 33, 30, 20, SIZE, SIZE, 0, 0, False),
    CropParams(66, 55, 2, 2, SIZE, SIZE, 0, 0, False),
    CropParams(0, 0, 70, 60, SIZE, SIZE, 0, 0, False),
]


def forged(rest: bytes, record: Pixels) -> bytes:
    """Return an index with a checksum that is right, whatever it says."""
    return xxhash.xxh3_64_intdigest(record.tobytes(), xxhash.xxh3_64_intdigest(rest)).to_bytes(8, "little") + rest


@pytest.mark.parametrize("kind", ["gray", "4:2:0", "restart in rows"])
def test_a_damaged_index_is_refused(kind) -> None:
    record = as_record(encoded(kind, 60, 70))
    index = dense_index(record, 2)
    for at in range(len(index)):
        damaged = index.copy()
        damaged[at] ^= 1 << at % 8
        assert (decode_with(damaged, record, (60, 70), CROPS)[1] == INDEX).all(), at
    for length in range(1, len(index)):
        assert (decode_with(index[:length], record, (60, 70), CROPS)[1] == INDEX).all(), length
    longer = np.concatenate([index, index[-8:]])
    assert (decode_with(longer, record, (60, 70), CROPS)[1] == INDEX).all()


@pytest.mark.parametrize("kind", ["gray", "4:4:4", "4:2:2", "4:2:0", "restart in rows", "restart rows"])
def test_a_wrong_entry_with_a_right_checksum_changes_no_pixel(kind) -> None:
    """The decoder's state at the next entry differs from the index's."""
    record, generator = as_record(encoded(kind, 60, 70)), np.random.default_rng(5)
    wanted = [Photograph(record, 60, 70).crop_by_reference(crop, SIZE, "bilinear") for crop in CROPS]
    statuses: Counter[int] = Counter()
    for interval in (1, 3, 8):
        index = dense_index(record, interval)
        for at in range(10, len(index)):
            rest = bytearray(index[8:].tobytes())
            rest[at - 8] ^= 1 << int(generator.integers(8))
            wrong = as_record(forged(bytes(rest), record))
            images, status = decode_with(wrong, record, (60, 70), CROPS)
            statuses.update(status.tolist())
            for image, want, refusal in zip(images, wanted, status, strict=True):
                assert refusal or np.array_equal(image, want), (interval, at)
    assert statuses[INDEX] > 100, statuses
    assert statuses[0] > 100, "entries that the crop does not need"


def test_an_interval_with_a_right_checksum_must_fit_the_image() -> None:
    record = as_record(encoded("4:2:0", 60, 70))
    rest = dense_index(record, 2)[8:].tobytes()
    for interval in (0, 1, 3, 65535):
        wrong = as_record(forged(interval.to_bytes(2, "little") + rest[2:], record))
        assert (decode_with(wrong, record, (60, 70), CROPS)[1] == INDEX).all(), interval


def test_the_index_of_another_or_an_older_image_is_refused() -> None:
    record = as_record(encoded("4:4:4", 60, 70))
    index = dense_index(record, 2)
    other = as_record(encode_image(smooth_pixels(9, 60, 70), quality=90, subsampling=0))
    assert len(dense_index(other, 2)) == len(index)
    assert (decode_with(index, other, (60, 70), CROPS)[1] == INDEX).all()
    for at in (30, len(record) // 2, len(record) - 3):
        changed = record.copy()
        changed[at] ^= 1
        status = decode_with(index, changed, (60, 70), CROPS)[1]
        assert set(status.tolist()) <= {INDEX, 1}, "of another file; or its header is refused before"


def test_garbage_before_a_restart_marker() -> None:
    """libjpeg passes over it; an index of such a file is not written."""
    data = encode_image(smooth_pixels(1, 40, 33), quality=90, restart_marker_rows=1)
    restart = next(at for at in range(len(data)) if data[at : at + 2] == b"\xff\xd1")
    record = as_record(data[:restart] + b"abcdef" + data[restart:])
    assert len(dense_index(record, 2)) == 0
    assert len(dense_index(as_record(data), 2)) > 0


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_batches_are_those_of_the_reference(interpolation, mixed) -> None:
    plain = {"max_bad_rate": 1.0, "interpolation": interpolation}
    wanted, reference = train_and_close(document(input=plain), mixed, 0, 12)
    evaluated = evaluate(document(input=plain), mixed)
    assert add_indexes(mixed) > 20
    found, loader = train_and_close(document("native", input=plain), mixed, 0, 12)
    assert_same_batches(wanted, found)
    assert_same_batches(evaluated, evaluate(document("native", input=plain), mixed))
    assert loader.bad_records == reference.bad_records > 0
    assert loader.native_refusals["index"] == 0


def test_a_damaged_index_is_counted_and_changes_no_batch(mixed) -> None:
    section = {"max_bad_rate": 1.0}
    wanted, _ = train_and_close(document(input=section), mixed, 0, 12)
    add_indexes(mixed, damage=True)
    found, loader = train_and_close(document("native", input=section), mixed, 0, 12)
    assert_same_batches(wanted, found)
    assert loader.native_refusals["index"] > 20


def damaged_files(path: Path, other: Path) -> dict[str, bytes]:
    good = path.read_bytes()
    return {
        "empty": b"",
        "truncated": good[: len(good) // 2],
        "another kind": good.replace(b'"decode index"', b'"encode index"'),
        "another version": good.replace(b'"version": 1', b'"version": 9'),
        "another shard": other.read_bytes(),
    }


@pytest.mark.parametrize("problem", ["empty", "truncated", "another kind", "another version", "another shard"])
def test_an_unusable_file_is_logged_and_not_used(problem, make_shard_set, caplog) -> None:
    directory = make_shard_set(shards=2)
    add_indexes(directory)
    shards = ShardSet.open(directory).manifest.splits["train"].shards
    path, other = (decode_index_path(directory / "train" / shard.name) for shard in shards[:2])
    path.write_bytes(damaged_files(path, other)[problem])
    with pytest.raises(InputError) as error:
        DecodeIndex.read(directory / "train" / shards[0].name, shards[0].sha256, shards[0].count)
    assert "podscale shard" in str(error.value)
    split = open_shard_set(str(directory), document()).split("train")
    indexes = split.decode_indexes(np.arange(len(split)))
    of_first = split.column("shard") == 0
    assert [len(index) > 0 for index in indexes] == (~of_first).tolist()
    assert caplog.text.count("decoding without an index") == 1


def test_damaged_bytes_are_an_index_or_one_error(make_shard_set) -> None:
    """Whatever a store answers: a training must go on without the index."""
    directory = make_shard_set(shards=1)
    add_indexes(directory)
    shard = ShardSet.open(directory).manifest.splits["train"].shards[0]
    good = decode_index_path(directory / "train" / shard.name).read_bytes()
    header, generator, refused = good.index(b"\0" * 8, 20), np.random.default_rng(0), 0
    for _ in range(2000):
        damaged = bytearray(good)
        for at in generator.integers(8, header, 2).tolist():
            damaged[at] = int(generator.choice(list(b'0123456789-.,[]{}"<ufO\0\xff')))
        raw = np.frombuffer(bytes(damaged), dtype=np.uint8)
        try:
            index = DecodeIndex.parse(raw, shard.sha256, shard.count, "a store")
        except InputError:
            refused += 1
        else:
            assert sum(len(index[number]) for number in range(shard.count)) == index.lengths.sum()
    assert refused > 1500


def test_a_repaired_shard_does_not_use_its_old_index(make_shard_set) -> None:
    directory = make_shard_set(shards=1)
    shard = ShardSet.open(directory).manifest.splits["train"].shards[0]
    write_decode_index(directory / "train" / shard.name, hashlib.sha256(b"old").hexdigest(), 8, [b""] * shard.count)
    with pytest.raises(InputError) as error:
        DecodeIndex.read(directory / "train" / shard.name, shard.sha256, shard.count)
    assert "another shard" in str(error.value)


def test_indexes_of_rows_follow_dropped_duplicates(make_shard_set) -> None:
    """A row is the number of a sample in use; an index file has all images of its shard."""
    directory: Any = make_shard_set(shards=3)
    add_indexes(directory)
    split = ShardSet.open(directory).split("train")
    kept = np.arange(1, len(split), 2)
    whole = split.decode_indexes(np.arange(len(split)))
    split._rows = split._rows[kept]
    split._columns = {name: column[kept] for name, column in split._columns.items()}
    for row, number in enumerate(kept.tolist()):
        assert np.array_equal(split.decode_indexes(np.array([row]))[0], whole[number])
