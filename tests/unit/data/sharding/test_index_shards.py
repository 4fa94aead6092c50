"""Decode indexes of shard sets: written while packing, added to a complete set, and never in the way."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from podscale.cli.app import app
from podscale.data import native
from podscale.data.decode_index import SUFFIX, DecodeIndex, decode_index_path
from podscale.data.native import build_decode_index
from podscale.data.shard_set import ShardSet
from podscale.data.sharding.index_shards import index_shards
from podscale.errors import InputError
from tests.support.loading import needs_native
from tests.support.shard_set import encode_image, smooth_pixels
from tests.unit.data.sharding.test_build_shard_set import build, tree

pytestmark = needs_native


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder of two classes, 24 photographs that are large enough for an index, and a PNG."""
    for seed in range(24):
        path = tmp_path / "images" / ("cat", "dog")[seed % 2] / f"{seed:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_image(smooth_pixels(seed, 150, 160 + seed), quality=95, subsampling=seed % 3))
    (path.parent / "a.png").write_bytes(encode_image(smooth_pixels(3, 90, 90), kind="PNG"))
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
    assert images == 24


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
    assert "written for 2 of 2 shards" in result.stdout
    index = next((directory / "train").glob(f"*{SUFFIX}"))
    good = index.read_bytes()
    index.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    for flags, written in (([], 0), (["--verify"], 1), (["--verify"], 0)):
        result = CliRunner().invoke(app, ["shard", *options, "--decode-index", *flags])
        assert f"written for {written} of 2 shards" in result.stdout
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
