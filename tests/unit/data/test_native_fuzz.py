"""Comparison of the fuzzer's corpus with Pillow (tests/support/native_fuzz.py); `make fuzz` runs the fuzzer."""

from pathlib import Path
from typing import Any

import pytest

from tests.support import native_fuzz
from tests.support.loading import needs_native

pytestmark = needs_native


@pytest.fixture
def seeds(tmp_path: Path) -> Path:
    native_fuzz.write_seeds(tmp_path / "corpus")
    return tmp_path / "corpus"


def test_the_seeds_are_alike_or_refused(seeds: Path) -> None:
    counts = native_fuzz.compare(seeds)
    assert counts.total() == len(list(seeds.iterdir()))
    assert counts["all crops with the pixels of Pillow"] > 40
    assert counts["refused natively, refused too by Pillow"] > 0


def test_other_pixels_name_the_file(seeds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = native_fuzz.CropDecoder.decode

    def flawed(self: native_fuzz.CropDecoder, *arrays: Any) -> Any:
        status = decode(self, *arrays)
        arrays[4][0, 0, 0, 0] ^= status[0] == 0
        return status

    monkeypatch.setattr(native_fuzz.CropDecoder, "decode", flawed)
    with pytest.raises(AssertionError, match="seed-"):
        native_fuzz.compare(seeds)
