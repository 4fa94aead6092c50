"""Reasons for which the extension does not decode an image or has no index for it: by headers as by the extension."""

import json
import re
from pathlib import Path

import pytest

from podscale.config.data import DataSection
from podscale.data import native_support
from podscale.data.crop import CropParams
from podscale.data.inspect import inspect_shard_set
from podscale.data.native import REASONS, CropDecoder, build_decode_index
from podscale.data.native_support import is_too_small, read_layout
from podscale.data.sharding.build_shard_set import build_shard_set
from podscale.data.sharding.decode_indexes import index_shards
from tests.support.jpeg_crops import SAMPLINGS, as_record, encoded
from tests.support.loading import needs_native, special_images
from tests.support.native_crops import native
from tests.support.shard_set import encode_image, smooth_pixels
from tests.support.unusual_jpegs import refused_images, usual_variants

KINDS = {
    "progressive": "progressive",
    "cmyk": "CMYK",
    "rgb": "RGB",
    "arithmetic": "arithmetic coding",
    "12 bits": "12 bits a sample",
    "4:4:0": "other chroma sampling",
    "no end": "no end marker",
    "two frames": native_support.UNUSUAL,
    "two images": "",
}
TABLES = {"no quantisation table", "a table of all ones"}
"""Images that the extension refuses for their tables, which the header alone does not show."""


@pytest.mark.parametrize("name", KINDS)
def test_the_reason_is_named(name) -> None:
    assert read_layout(memoryview(refused_images()[name][0])).refusal == KINDS[name]


@needs_native
def test_headers_are_refused_as_the_extension_refuses_them() -> None:
    files = {name: data for name, (data, _) in refused_images().items() if name not in TABLES}
    files |= usual_variants() | special_images() | {kind: encoded(kind, 31, 33) for kind in SAMPLINGS}
    crop = CropParams(0, 0, 1, 1, 1, 1, 0, 0, False)
    for name, data in files.items():
        _, status = native(CropDecoder(1), as_record(data), (50, 60), [crop], 1)
        is_refused = REASONS.get(int(status[0])) == "format"
        assert bool(read_layout(memoryview(data)).refusal) == is_refused, name


@needs_native
@pytest.mark.parametrize("kind", ["gray", "4:4:4", "4:2:2", "4:2:0"])
def test_an_image_is_too_small_if_the_extension_writes_no_index(kind) -> None:
    sizes = set()
    for shape in [(side, side + 9) for side in range(1, 120, 6)]:
        data = encoded(kind, *shape)
        layout = read_layout(memoryview(data))
        for interval in (1, 8, 40):
            is_small = is_too_small(len(data), layout, interval)
            assert is_small == (not build_decode_index(data, interval)), (shape, interval)
            sizes.add(is_small)
    assert sizes == {True, False}


SAMPLES = {
    "large.jpg": encode_image(smooth_pixels(1, 150, 160), quality=95),
    "small.jpg": encode_image(smooth_pixels(2, 20, 20)),
    "progressive.jpg": encode_image(smooth_pixels(3, 50, 60), progressive=True),
    "png.png": encode_image(smooth_pixels(4, 50, 60), kind="PNG"),
    "cmyk.jpg": encode_image(smooth_pixels(5, 50, 60, 4)),
    "rgb.jpg": encode_image(smooth_pixels(6, 50, 60), keep_rgb=True),
}


def shard_set(folder: Path, samples: dict[str, bytes]) -> Path:
    """Pack training images of two classes, and one of each for validation, without a decode index."""
    large = SAMPLES["large.jpg"]
    paths = {
        f"train/{('cats', 'dogs')[number % 2]}/{name}": data for number, (name, data) in enumerate(samples.items())
    }
    for name, data in {**paths, "val/cats/cat.jpg": large, "val/dogs/dog.jpg": large}.items():
        path = folder / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    section = DataSection(source=str(folder / "images"), decode_index=None)
    build_shard_set(section, folder / "set", workers=1)
    return folder / "set"


@needs_native
def test_inspection_counts_them(tmp_path) -> None:
    directory = shard_set(tmp_path, SAMPLES)
    refused = {"PNG": 1, "progressive": 1, "CMYK": 1, "RGB": 1}
    before = inspect_shard_set(directory)
    assert before.splits["train"].native.refused == refused
    assert before.splits["train"].native.without_index == {}, "no shard has an index"
    index_shards(directory, 8)
    summary = inspect_shard_set(directory)
    assert summary.splits["train"].native.without_index == {"too small": 1}
    assert json.loads(summary.to_json())["splits"]["train"]["native"]["refused"] == refused
    text = summary.to_text()
    assert "4 of 6 images: 1 PNG, 1 progressive, 1 CMYK, 1 RGB\n" in text
    assert "1 of 6 images: 1 too small\n" in text


def test_at_most_some_headers_are_read(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(native_support, "MAX_HEADERS", 3)
    images = {f"{seed}.jpg": encode_image(smooth_pixels(seed, 20, 20, 4)) for seed in range(8)}
    summary = inspect_shard_set(shard_set(tmp_path, images))
    found = summary.splits["train"].native
    assert found.refused == {"CMYK": 3}
    assert found.unread == 5
    assert re.search(r"3 of 8 images: 3 CMYK \(5 .*\)", summary.to_text())
