"""Inspection: the numbers are those of the set, damage is found, the contact sheet shows its images."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from podscale.config.data import DataSection
from podscale.data.inspect import contact_sheet, inspect_shard_set
from podscale.data.sharding.build_shard_set import build_shard_set
from tests.support.refusals import refused


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("digits") / "set"
    build_shard_set(DataSection(), directory, workers=1)
    return directory


def test_the_summary_counts_what_is_there(digits: Path) -> None:
    summary = inspect_shard_set(digits)
    train, validation = summary.splits["train"], summary.splits["validation"]
    assert train.images + validation.images == 1797
    assert sum(train.classes.values()) == train.images
    assert validation.formats == {"jpeg": 0, "png": validation.images}
    assert train.width == {"smallest": 8, "median": 8, "largest": 8}
    assert train.flags == {"gray": train.images}
    assert summary.damage is None
    assert json.loads(summary.to_json())["splits"]["train"]["images"] == train.images


def test_the_text_shows_counts_classes_and_verdict(digits: Path) -> None:
    text = inspect_shard_set(digits, verify=True).to_text()
    for part in ("train: 1,438 images, 10 classes, 1 shard,", "rejects: none", "all files match the manifest"):
        assert part in text
    assert sum(line.startswith("  7 ") and line.endswith("#") for line in text.splitlines()) == 2


def test_damage_is_named(digits: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(digits, copy)
    shard = copy / "train" / "shard-00000-of-00001.tar"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    (copy / "validation" / "shard-00000-of-00001.tar").unlink()
    index = copy / "validation" / "index"
    index.write_bytes(index.read_bytes()[:-1] + b"\1")
    (copy / "train" / "sources").unlink()
    damage = inspect_shard_set(copy, verify=True).damage
    assert damage is not None
    assert [entry.split(":")[0] for entry in damage] == [
        "train/shard-00000-of-00001.tar",
        "train/sources",
        "validation/shard-00000-of-00001.tar",
        "validation/index",
    ]
    assert "DAMAGED" in inspect_shard_set(copy, verify=True).to_text()


def test_an_incomplete_set_is_refused(digits: Path, tmp_path: Path) -> None:
    with refused("`podscale shard`", field=tmp_path):
        inspect_shard_set(tmp_path)


def test_the_contact_sheet_shows_every_class(digits: Path, tmp_path: Path) -> None:
    path = contact_sheet(digits, "validation", tmp_path / "sheet.png")
    with Image.open(path) as sheet:
        assert sheet.format == "PNG"
        pixels = np.asarray(sheet.convert("L")).astype(float)
    cell, gap, caption = 96, 4, 14
    for row in range(10):
        top = gap + row * (cell + gap + caption) + caption
        for column in range(10):
            left = gap + column * (cell + gap)
            assert pixels[top : top + cell, left : left + cell].std() > 20  # strokes on a background
