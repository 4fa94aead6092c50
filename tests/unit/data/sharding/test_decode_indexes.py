"""Decode indexes of shard sets: written while packing, added to a complete set, and verified.

They are never in the way. Every damage is found, repaired, and no damage of the set.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from typer.testing import CliRunner

from podscale.cli import main
from podscale.cli.app import app
from podscale.data import native
from podscale.data.decode_index import REMEDY, SUFFIX, DecodeIndex, decode_index_path, write_decode_index
from podscale.data.inspect import inspect_shard_set
from podscale.data.native import build_decode_index
from podscale.data.shard_set import ShardSet
from podscale.data.sharding.build_shard_set import build_shard_set
from podscale.data.sharding.decode_indexes import index_shards, verify_decode_indexes
from podscale.errors import ExitCode, InputError
from tests.support.loading import add_indexes, needs_native
from tests.support.outcomes import assert_error
from tests.support.shard_set import Sample, encode_image, smooth_pixels
from tests.unit.data.sharding.test_build_shard_set import build, section, tree

pytestmark = needs_native

IMAGES = 24


def write_images(folder: Path, split_of: Callable[[int], str]) -> None:
    """Write photographs of two classes that are large enough for an index, and a PNG; `split_of` by number."""
    for seed in range(IMAGES):
        path = folder / split_of(seed) / ("cat", "dog")[seed % 2] / f"{seed:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_image(smooth_pixels(seed, 150, 160 + seed), quality=95, subsampling=seed % 3))
    (path.parent / "a.png").write_bytes(encode_image(smooth_pixels(3, 90, 90), kind="PNG"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder of two classes, 24 photographs that are large enough for an index, and a PNG."""
    write_images(tmp_path / "images", lambda seed: "")
    return tmp_path / "images"


def indexes(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob(f"*{SUFFIX}")}


def assert_complete(directory: Path, interval: int) -> None:
    """Check the index of every image against its bytes."""
    shard_set, images = ShardSet.open(directory), 0
    for name in shard_set.manifest.splits:
        split = shard_set.split(name)
        for row, index in enumerate(split.decode_indexes(np.arange(len(split)))):
            record = split.read(row)
            want = build_decode_index(record, interval) if record[0] == 0xFF else b""
            assert index.tobytes() == want
            images += len(want) > 0
    assert images == IMAGES


def test_packing_writes_the_indexes(folder, tmp_path) -> None:
    build(folder, tmp_path / "one")
    assert_complete(tmp_path / "one", 8)
    build(folder, tmp_path / "two", workers=2)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_a_set_is_the_same_set_without_indexes(folder, tmp_path) -> None:
    indexed = build(folder, tmp_path / "one", decode_index=4)
    plain = build(folder, tmp_path / "two", decode_index=None)
    assert plain.manifest == indexed.manifest
    assert indexes(tmp_path / "two") == {}
    assert build(folder, tmp_path / "two", decode_index=4).reused
    files = tree(tmp_path / "one")
    assert tree(tmp_path / "two") == {name: digest for name, digest in files.items() if not name.endswith(SUFFIX)}


def test_indexes_are_added_to_a_complete_set(folder, tmp_path) -> None:
    build(folder, tmp_path / "packed", decode_index=4)
    build(folder, tmp_path / "set", decode_index=None)
    added = index_shards(tmp_path / "set", 4, workers=2)
    assert added.written == added.shards > 2
    assert 0 < added.index_bytes <= 0.03 * added.shard_bytes
    assert indexes(tmp_path / "set") == indexes(tmp_path / "packed")
    again = index_shards(tmp_path / "set", 4)
    assert (again.written, again.index_bytes) == (0, added.index_bytes)
    assert index_shards(tmp_path / "set", 8).written == added.shards
    assert_complete(tmp_path / "set", 8)


def test_damaged_indexes_are_written_again(folder, tmp_path) -> None:
    build(folder, tmp_path / "set")
    good = indexes(tmp_path / "set")
    first, second, *_ = (tmp_path / "set" / name for name in sorted(good))
    first.write_bytes(b"nothing")
    second.unlink()
    assert index_shards(tmp_path / "set", 8).written == 2
    assert indexes(tmp_path / "set") == good


def test_a_repacked_shard_gets_its_index(folder, tmp_path) -> None:
    build(folder, tmp_path / "set")
    good = indexes(tmp_path / "set")
    shard = tmp_path / "set" / "train" / ShardSet.open(tmp_path / "set").manifest.splits["train"].shards[0].name
    shard.unlink()
    decode_index_path(shard).write_bytes(b"old")
    build(folder, tmp_path / "set")
    assert indexes(tmp_path / "set") == good


def test_without_the_extension_no_index_is_written(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(native, "_native", None)
    build(folder, tmp_path / "set")
    assert indexes(tmp_path / "set") == {}
    with pytest.raises(InputError) as error:
        index_shards(tmp_path / "set", 8)
    assert "podscale doctor" in str(error.value)


def test_the_command_adds_indexes_and_prints_their_size(folder, tmp_path) -> None:
    options = ["--set", f"data.source={folder}", "--set", f"run.workspace={tmp_path / 'work'}"]
    plain = CliRunner().invoke(app, ["shard", *options, "--set", "data.decode_index=null"])
    assert plain.exit_code == 0, plain.output
    result = CliRunner().invoke(app, ["shard", *options, "--decode-index"])
    assert result.exit_code == 0, result.output
    directory = Path(next(line for line in result.stdout.splitlines() if "datasets" in line).split(" (")[0])
    assert_complete(directory, 8)
    assert "decode index: " in result.stdout
    assert "2 of 2 shards" in result.stdout
    index = next((directory / "train").glob(f"*{SUFFIX}"))
    good = index.read_bytes()
    index.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    for flags, written in (([], 0), (["--verify"], 1), (["--verify"], 0)):
        result = CliRunner().invoke(app, ["shard", *options, "--decode-index", *flags])
        assert f"{written} of 2 shards" in result.stdout
    assert index.read_bytes() == good
    refused = CliRunner().invoke(app, ["shard", *options, "--set", "data.decode_index=null", "--decode-index"])
    assert refused.exit_code != 0
    assert "data.decode_index" in str(refused.exception)


def test_an_index_is_not_read_by_the_reference_loader(folder, tmp_path) -> None:
    build(folder, tmp_path / "set")
    shard = ShardSet.open(tmp_path / "set").manifest.splits["train"].shards[0]
    index = DecodeIndex.read(tmp_path / "set" / "train" / shard.name, shard.sha256, shard.count)
    assert index is not None
    assert index.interval == 8
    assert len(index) == shard.count


def test_completing_a_set_removes_the_indexes_of_an_earlier_plan_only(folder, tmp_path) -> None:
    build(folder, tmp_path / "set")
    good = indexes(tmp_path / "set")
    (tmp_path / "set" / "train" / f"shard-00007-of-00009{SUFFIX}").write_bytes(b"of an earlier plan")
    (tmp_path / "set" / "manifest.json").unlink()
    build(folder, tmp_path / "set")
    assert indexes(tmp_path / "set") == good


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a set of 24 photographs that are large enough for an index, and a PNG, in two shards or more a split."""
    folder = tmp_path_factory.mktemp("photographs")
    write_images(folder / "images", lambda seed: ("train", "val")[seed % 3 == 0])
    build_shard_set(section(folder / "images", shard_bytes=100_000), folder / "set", workers=1)
    return folder / "set"


@pytest.fixture
def copy(photographs: Path, tmp_path: Path) -> Path:
    shutil.copytree(photographs, tmp_path / "set")
    return tmp_path / "set"


def first_shard(directory: Path) -> tuple[Path, Any, DecodeIndex]:
    shard = ShardSet.open(directory).manifest.splits["train"].shards[0]
    index = DecodeIndex.read(directory / "train" / shard.name, shard.sha256, shard.count)
    assert index is not None
    return directory / "train" / shard.name, shard, index


def rewrite(directory: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    """Write the index of the first shard with other byte strings."""
    path, shard, index = first_shard(directory)
    images = change([index[number].tobytes() for number in range(shard.count)])
    write_decode_index(path, shard.sha256, index.interval, images)


def flip_a_bit(directory: Path) -> None:
    rewrite(directory, lambda images: [images[0][:-1] + bytes([images[0][-1] ^ 1]), *images[1:]])


def swap_two(directory: Path) -> None:
    rewrite(directory, lambda images: [images[1], images[0], *images[2:]])


def forge(directory: Path) -> None:
    """Write a wrong DC value with a right checksum."""
    split = ShardSet.open(directory).split("train")

    def forged(images: list[bytes]) -> list[bytes]:
        rest = bytearray(images[0][8:])
        rest[5] ^= 1
        seed = xxhash.xxh3_64_intdigest(bytes(rest))
        checksum = xxhash.xxh3_64_intdigest(split.read(0).tobytes(), seed=seed)
        return [checksum.to_bytes(8, "little") + bytes(rest), *images[1:]]

    rewrite(directory, forged)


def of_another_shard(directory: Path) -> None:
    shards = ShardSet.open(directory).manifest.splits["train"].shards
    first, second = (decode_index_path(directory / "train" / shard.name) for shard in shards[:2])
    shutil.copyfile(second, first)


def edit(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        path = decode_index_path(first_shard(directory)[0])
        path.write_bytes(change(path.read_bytes()))

    return apply


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (edit(lambda content: content[:-40]), "truncated"),
    "empty": (edit(lambda _: b""), "cannot be read"),
    "not a column file": (edit(lambda content: b"x" + content), "not a column file"),
    "another version": (edit(lambda content: content.replace(b'"version": 1', b'"version": 7')), "version 7"),
    "another shard": (of_another_shard, "another shard"),
    "an image too few": (lambda directory: rewrite(directory, lambda images: images[:-1]), "and the shard has"),
    "a flipped bit": (flip_a_bit, "damaged or of other images: 1 of"),
    "swapped images": (swap_two, "damaged or of other images: 2 of"),
    "a wrong state": (forge, "do not lead to the pixels of the image: 1 of"),
}


def test_the_summary_has_the_indexes_of_each_split(photographs) -> None:
    summary = inspect_shard_set(photographs)
    shards = ShardSet.open(photographs).manifest.splits
    assert sum(split.decode_index.images for split in summary.splits.values()) == IMAGES
    for name, split in summary.splits.items():
        found = split.decode_index
        assert (found.shards, found.unusable, found.intervals) == (len(shards[name].shards), 0, [8])
        sizes = [path.stat().st_size for path in (photographs / name).glob("*.decode")]
        assert 0.5 * sum(sizes) < found.bytes < sum(sizes), "without headers"
        assert found.fraction == found.bytes / split.bytes < 0.03
        counts = f"{found.shards} of {found.shards} shards, {found.images} of {split.images} images"
        assert counts in summary.to_text()
        assert found.intervals == [8]
    assert json.loads(summary.to_json())["splits"]["train"]["decode_index"]["images"] == 15 + 1


def test_partial_and_mixed_indexes_are_counted(copy) -> None:
    path = decode_index_path(first_shard(copy)[0])
    path.unlink()
    index_shards(copy, 4)
    flip_a_bit(copy)
    train = inspect_shard_set(copy).splits["train"]
    assert train.decode_index.intervals == [4]
    assert train.decode_index.images == 16
    path.write_bytes(b"")
    train = inspect_shard_set(copy).splits["train"]
    assert (train.decode_index.shards, train.decode_index.unusable) == (train.shards - 1, 1)
    assert "1 unusable" in train.decode_index.to_text(train.shards, train.images)
    for file in copy.rglob("*.decode"):
        file.unlink()
    assert inspect_shard_set(copy).splits["train"].decode_index.shards == 0


def test_sound_indexes_are_verified(photographs) -> None:
    found = inspect_shard_set(photographs, verify=True).decode_indexes
    assert found is not None
    assert (found.images, found.decoded, found.damage) == (IMAGES, IMAGES, ())


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_repaired(name, copy, capsys) -> None:
    change, says = DAMAGE[name]
    files = {path: path.read_bytes() for path in copy.rglob("*.decode")}
    change(copy)
    path = decode_index_path(first_shard_path(copy))
    assert main(["shard", "--inspect", str(copy), "--verify"]) == ExitCode.DONE, "the images are sound"
    printed = capsys.readouterr()
    line = next(line for line in printed.out.splitlines() if f"train/{path.name}" in line)
    assert says in line
    assert REMEDY in printed.out
    assert main(["shard", "--inspect", str(copy), "--verify", "--json"]) == ExitCode.DONE
    values = json.loads(capsys.readouterr().out)
    assert values["damage"] == []
    assert [damage["file"] for damage in values["decode_indexes"]["damage"]] == [f"train/{path.name}"]
    assert index_shards(copy, 8, verify=True).written == 1
    assert {path: path.read_bytes() for path in copy.rglob("*.decode")} == files
    assert index_shards(copy, 8, verify=True).written == 0


def first_shard_path(directory: Path) -> Path:
    return directory / "train" / ShardSet.open(directory).manifest.splits["train"].shards[0].name


def test_a_damaged_shard_is_an_error_whose_index_is_not_blamed(copy, capsys) -> None:
    shard = first_shard_path(copy)
    content = bytearray(shard.read_bytes())
    content[600] ^= 1
    shard.write_bytes(content)
    code = main(["shard", "--inspect", str(copy), "--verify"])
    printed = capsys.readouterr()
    assert_error(code, printed.err, field=copy, exit_code=ExitCode.FAILED)
    assert f"train/{shard.name}" in printed.out
    assert ".decode" not in printed.out


def test_without_the_extension_checksums_are_verified(copy, monkeypatch) -> None:
    monkeypatch.setattr(native, "_native", None)
    swap_two(copy)
    found = inspect_shard_set(copy, verify=True).decode_indexes
    assert found is not None
    assert (found.images, found.decoded, len(found.damage)) == (IMAGES - 2, 0, 1)


def test_a_damaged_image_has_no_index_and_no_problem(make_shard_set) -> None:
    good = encode_image(smooth_pixels(1, 60, 70), quality=90)
    samples = [Sample(good, 0), Sample(good[: len(good) // 2], 0, (60, 70))]
    directory = make_shard_set({"train": samples, "validation": samples[:1]}, shards=1)
    assert add_indexes(directory) == 2
    found = verify_decode_indexes(ShardSet.open(directory))
    assert (found.images, found.decoded, found.damage) == (2, 2, ())
