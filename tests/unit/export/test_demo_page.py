"""Page with a model inside: nothing from elsewhere, hostile class names, pictures to pick from, and the size limit."""

import base64
import gzip
import json
import re
from typing import Any

import numpy as np
import PIL
import pytest

from podscale.data.native import ORDERS, is_installed, pillow_order
from podscale.export import demo_page
from podscale.export.demo_page import SAMPLE_BYTES, build_demo_page
from podscale.export.image_sample import ImageSample
from podscale.export.web_runtime import WebRuntime
from podscale.prediction.exported_file import ExportMetadata
from tests.support.refusals import refused

HOSTILE = "</script><script>document.title='owned'</script>"
DESCRIPTION: dict[str, Any] = {
    "run": "a<b>",
    "architecture": {"name": "resnet18"},
    "classes": ["ant", HOSTILE],
    "preprocessing": {"image_size": 16, "crop_fraction": 0.875, "interpolation": "bilinear"},
    "inference": {"data": {"policy": "convert", "resize_short": 256}},
}
METADATA = ExportMetadata(DESCRIPTION, "0" * 64, preprocessing=True, temperature=None)
RUNTIME = WebRuntime(b"module", b"program", "small 1.2.3")


def sample_of(count: int, size: int = 16) -> ImageSample:
    images = np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    return ImageSample(images, np.arange(count) % 2, "test")


def content_of(page: str, key: str) -> str:
    found = re.search(rf'<script id="{key}"[^>]*>(.*?)</script>', page, flags=re.S)
    assert found is not None
    return found[1]


def test_the_page_has_everything_inside() -> None:
    page = build_demo_page(b"model", METADATA, sample_of(100), RUNTIME).decode()
    for key, content in (("runtime", b"module"), ("wasm", b"program"), ("model", b"model")):
        assert gzip.decompress(base64.b64decode(content_of(page, key))) == content
    assert "://" not in page
    assert re.search(r"\b(?:src|href)=", page) is None
    assert "default-src &#x27;none&#x27;" in page
    assert page.count("<script") == 7, "class names end no script"
    description = json.loads(content_of(page, "description"))
    assert description["classes"] == DESCRIPTION["classes"]
    if is_installed():
        assert description["preprocessing"]["pass_order"] == pillow_order()
    rules = {"upright": True, "resize_short": 256, "pass_order": ORDERS[PIL.__version__.startswith(("11.", "12."))]}
    assert description["preprocessing"] == {**DESCRIPTION["preprocessing"], **rules}
    assert [sample["label"] for sample in description["samples"][:2]] == ["ant", "ant"]
    assert len(description["samples"]) == 24


def test_pictures_to_pick_from_are_limited() -> None:
    page = build_demo_page(b"model", METADATA, sample_of(24, 512), RUNTIME).decode()
    samples = json.loads(content_of(page, "description"))["samples"]
    assert 0 < sum(len(base64.b64decode(sample["png"])) for sample in samples) <= SAMPLE_BYTES
    assert (
        len(
            json.loads(content_of(build_demo_page(b"m", METADATA, sample_of(3), RUNTIME).decode(), "description"))[
                "samples"
            ]
        )
        == 3
    )


def test_a_page_that_is_too_large_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_page, "LARGEST_PAGE", 1_000_000)
    with refused("1.2 MB", "1 MB", "--int8"):
        build_demo_page(np.random.default_rng(0).bytes(900_000), METADATA, sample_of(1), RUNTIME)
