"""Decoded cache with coefficients: batches, budget, which images are kept in which form, and the choice of the form."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podscale.data import native
from podscale.data.loaders import cache_form, cpu
from podscale.data.loaders.build_loader import build_evaluation_loader
from podscale.data.loaders.cpu import NativeLoader, PillowLoader
from podscale.data.native import Coefficients, CropDecoder
from podscale.data.shard_set import ShardSet
from tests.support.loading import assert_same_batches, document, evaluate, needs_native, open_loader, train_and_close
from tests.support.logs import logged
from tests.support.refusals import invalid, refused
from tests.support.shard_set import Sample, encode_image, smooth_pixels

LARGE = 2**40
EPOCH = 5
"""Steps of an epoch of `kinds`."""


def coefficients(limit_bytes: int, **section: Any) -> Any:
    section |= {"decoded_cache_bytes": limit_bytes, "decoded_cache_form": "coefficients"}
    return document("native", input=section)


def noise(seed: int) -> bytes:
    """Return a JPEG whose coefficients have more bytes than its pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (48, 48, 3)).astype(np.uint8)
    return encode_image(pixels, quality=100, subsampling=0)


@pytest.fixture
def kinds(make_shard_set) -> Path:
    """Make a set of 24 usual JPEGs, 8 progressive ones, 4 of noise and 4 PNGs."""
    images = [encode_image(smooth_pixels(i, 90 + i, 120), quality=90) for i in range(24)]
    images += [encode_image(smooth_pixels(i, 40, 50), progressive=True) for i in range(8)]
    images += [noise(i) for i in range(4)]
    images += [encode_image(smooth_pixels(i, 40, 50), kind="PNG") for i in range(4)]
    return make_shard_set({"train": [Sample(data, 0) for data in images], "validation": []}, shards=2)


class Packed:
    """Number of times that each image was packed, and those that were decoded by the reference path."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: Counter[bytes] = Counter()
        self.decoded = 0
        pack, decode_rows = CropDecoder.pack, cpu.decode_rows

        def spy(decoder: CropDecoder, records: Any, limits: Any) -> Any:
            self.files.update(record.tobytes() for record in records)
            return pack(decoder, records, limits)

        def count(*arguments: Any) -> Any:
            self.decoded += 1
            return decode_rows(*arguments)

        monkeypatch.setattr(CropDecoder, "pack", spy)
        monkeypatch.setattr(cpu, "decode_rows", count)


@needs_native
@pytest.mark.parametrize("limit_bytes", [LARGE, 70_000, 10])
def test_a_resumed_run_has_the_same_batches(limit_bytes, mixed) -> None:
    expected, reference = train_and_close(document(input={"max_bad_rate": 1.0}), mixed, 0, 18)
    config = coefficients(limit_bytes, max_bad_rate=1.0, workers=3)
    found, loader = train_and_close(config, mixed, 0, 18)
    assert_same_batches(expected, found)
    assert loader.bad_records == reference.bad_records > 0
    assert loader.cached_bytes["decoded"] <= limit_bytes
    assert_same_batches(expected[9:], train_and_close(config, mixed, 9, 18)[0])


@needs_native
def test_each_image_is_packed_once_and_others_are_kept_as_pixels(kinds, monkeypatch) -> None:
    spy = Packed(monkeypatch)
    split = ShardSet.open(kinds).split("train")
    with open_loader(coefficients(LARGE), split) as loader:
        for start in range(0, 3 * EPOCH, EPOCH):  # with its last images kept before the next epoch
            list(loader.batches(start, start + EPOCH))
    assert len(spy.files) == 40
    assert set(spy.files.values()) == {1}
    assert spy.decoded == 16
    kept = [loader._images.find(row) for row in range(40)]
    forms = Counter("coefficients" if isinstance(image, Coefficients) else "pixels" for image in kept)
    assert forms == {"coefficients": 24, "pixels": 16}
    assert loader.cached_bytes["decoded"] == sum(image.nbytes for image in kept)
    sizes = split.column("height").astype(int) * split.column("width")
    packed = [row for row in range(40) if isinstance(kept[row], Coefficients)]
    assert sum(kept[row].nbytes for row in packed) < 3 * sizes[packed].sum() / 2


@needs_native
def test_a_full_cache_does_not_grow_and_packs_nothing(kinds, monkeypatch) -> None:
    config, limit = coefficients(60_000), 60_000
    split = ShardSet.open(kinds).split("train")
    with open_loader(config, split) as loader:
        list(loader.batches(0, EPOCH))
        full = loader.cached_bytes["decoded"]
        assert limit / 2 < full <= limit
        kept = dict(loader._images._store._kept)
        spy = Packed(monkeypatch)
        list(loader.batches(EPOCH, 4 * EPOCH))
        assert not spy.files
        assert all(loader._images.find(row) is image for row, image in kept.items()), "nothing is evicted"
        assert full <= loader.cached_bytes["decoded"] <= limit
        assert loader.cached_bytes["decoded"] == sum(image.nbytes for image in loader._images._store._kept.values())


@needs_native
def test_kept_coefficients_are_not_read_again(kinds, monkeypatch) -> None:
    split = ShardSet.open(kinds).split("train")
    with open_loader(coefficients(LARGE), split) as loader:
        expected = list(loader.batches(0, 3 * EPOCH))
        monkeypatch.setattr(type(split), "read", lambda split, row: 1 / 0)
        again = list(loader.batches(2 * EPOCH, 3 * EPOCH))
    assert_same_batches(expected[2 * EPOCH :], again)


@needs_native
def test_coefficients_that_the_extension_refuses_are_decoded_from_the_file(kinds) -> None:
    """That would be a defect of the extension; the reference path still has the pixels of the file."""
    expected = train_and_close(document(), kinds, 2 * EPOCH, 3 * EPOCH)[0]
    split = ShardSet.open(kinds).split("train")
    with open_loader(coefficients(LARGE), split) as loader:
        list(loader.batches(0, 2 * EPOCH))
        damaged = [row for row, image in loader._images._store._kept.items() if isinstance(image, Coefficients)][:5]
        size = loader.cached_bytes["decoded"]
        for row in damaged:
            loader._images._store._kept[row] = Coefficients(loader._images.find(row).packed[:-900])
        assert_same_batches(expected, list(loader.batches(2 * EPOCH, 3 * EPOCH)))
        assert loader.native_refusals["data"] > 0
        assert loader.cached_bytes["decoded"] == size


@needs_native
@pytest.mark.parametrize(
    ("limit_bytes", "form"),
    [(LARGE, "pixels"), (850_000, "pixels"), (300_000, "coefficients"), (700_000, "coefficients")],
)
def test_the_form_with_the_higher_rate_is_chosen(limit_bytes, form, kinds, monkeypatch, caplog) -> None:
    """Pixels: 0.9 MB of usual images. Times are fixed: 600 us without the cache, 200 of pixels, 300 of coefficients."""
    seconds = iter([600e-6, 200e-6, 300e-6])
    least, images = cache_form._least_seconds, []

    def fixed(work: Any) -> float:
        assert least(work) > 0
        images.append(1)
        return next(seconds)

    monkeypatch.setattr(cache_form, "_least_seconds", fixed)
    with caplog.at_level("INFO", "podscale.data"):
        config = document("native", input={"decoded_cache_bytes": limit_bytes})
        _, loader = train_and_close(config, kinds, 0, EPOCH)
    assert len(images) == 3
    ((chosen, *estimates),) = logged(caplog, logging.INFO, module="cache_form")
    assert chosen == form
    assert [estimate.miss_seconds / estimate.hit_seconds for estimate in estimates] == pytest.approx([3.0, 2.0])
    kept = [isinstance(image, Coefficients) for image in loader._images._store._kept.values()]
    assert any(kept) == (form == "coefficients")


def test_the_rate_follows_from_the_fraction_that_fits() -> None:
    whole = cache_form.FormEstimate(1024, 100e-6, 500e-6, 1024)
    half = cache_form.FormEstimate(2048, 100e-6, 500e-6, 1024)
    assert (whole.kept, half.kept) == (1.0, 0.5)
    assert (whole.seconds, half.seconds) == (pytest.approx(100e-6), pytest.approx(300e-6))
    assert str(half) == "50% of 2.0 KiB fit, 300 us a crop"


@needs_native
def test_pixels_are_kept_if_no_image_can_be_packed(make_shard_set, caplog) -> None:
    images = [encode_image(smooth_pixels(i, 40, 50), kind="PNG") for i in range(16)]
    directory = make_shard_set({"train": [Sample(data, 0) for data in images], "validation": []}, shards=1)
    with caplog.at_level("INFO", "podscale.data"):
        _, loader = train_and_close(document("native", input={"decoded_cache_bytes": LARGE}), directory, 0, 2)
    assert logged(caplog, logging.INFO, module="cache_form") == [()], "there is no estimate"
    assert loader.cached_bytes["decoded"] == 16 * 40 * 50 * 3


def test_without_the_extension_the_cache_keeps_pixels(kinds, monkeypatch, caplog) -> None:
    monkeypatch.setattr(native, "_native", None)
    _, loader = train_and_close(coefficients(LARGE), kinds, 0, EPOCH)
    assert type(loader) is PillowLoader
    assert logged(caplog, module="build_loader") == [(), ()], "of the loader and of its cache"
    assert all(isinstance(image, np.ndarray) for image in loader._images._store._kept.values())


def test_forms_that_make_no_sense() -> None:
    cached = {"decoded_cache_bytes": LARGE, "decoded_cache_form": "coefficients"}
    for loader in ("reference", "synthetic", "dali"):
        with invalid(f"input.loader={loader}", field="input.decoded_cache_form", got="coefficients"):
            document(loader, input=cached)
    for form in ("pixels", "coefficients"):
        with invalid("input.decoded_cache_bytes", field="input.decoded_cache_form", got=form):
            document("native", input={"decoded_cache_form": form})
    with invalid(field="input.decoded_cache_form", got="wavelets"):
        document("native", input={**cached, "decoded_cache_form": "wavelets"})
    document("auto", input=cached)


@needs_native
def test_another_loader_of_auto_refuses_the_cache(kinds, monkeypatch) -> None:
    monkeypatch.setattr("podscale.data.loaders.build_loader.resolve_loader", lambda name, device, **_: "nvjpeg")
    config = document("auto", input={"decoded_cache_bytes": LARGE, "decoded_cache_form": "coefficients"})
    with refused("nvjpeg", field="input.decoded_cache_bytes"):
        train_and_close(config, kinds, 0, 1)


@needs_native
def test_evaluation_packs_and_keeps_nothing(mixed, monkeypatch) -> None:
    spy = Packed(monkeypatch)
    config = coefficients(LARGE, max_bad_rate=1.0)
    split = ShardSet.open(mixed).split("validation")
    loader = build_evaluation_loader(config, split, ranks=range(1), world_size=1, device="cpu")
    found = list(loader.batches(0, 5))
    loader.close()
    assert type(loader) is NativeLoader
    assert not spy.files
    assert loader.cached_bytes["decoded"] == 0
    assert_same_batches(evaluate(document(input={"max_bad_rate": 1.0}), mixed), found)
