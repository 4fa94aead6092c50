"""Loader native: the batches of the loader reference to the bit, whatever it decodes itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podscale.config.run_config import RunConfig
from podscale.data import native
from podscale.data.decode import crop_and_resize
from podscale.data.loaders.build_loader import open_shard_set, resolve_loader
from podscale.data.loaders.native import NativeLoader
from podscale.data.loaders.pillow import PillowLoader
from podscale.data.node_cache import ShardCache
from tests.support.loading import NATIVE, document, evaluate, needs_dali, needs_native, open_loader, special_images
from tests.support.shard_set import Sample, encode_image, image_size, smooth_pixels, varied_samples
from tests.support.store import QUICK, serve


@pytest.fixture
def mixed(make_shard_set) -> Path:
    """Make a set of 48 training images of every kind, three of them damaged, in 4 shards."""
    samples = [
        Sample(encode_image(smooth_pixels(i, 120 + i, 60), quality=90), i % 4) if i % 3 == 0 else sample
        for i, sample in enumerate(varied_samples(48, 4))
    ]
    for row, data in zip(range(2, 48, 3), special_images().values(), strict=False):
        samples[row] = Sample(data, 1)
    for row, broken in ((6, samples[6].image[:900]), (7, b"nothing"), (30, b"\xff\xd8" + bytes(500))):
        samples[row] = Sample(broken, samples[row].label, image_size(samples[row].image))
    return make_shard_set({"train": samples, "validation": samples[:25]}, shards=4)


def same(left: list[Any], right: list[Any]) -> None:
    for one, other in zip(left, right, strict=True):
        assert one.step == other.step
        for name in ("keys", "labels", "weights", "images"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), (one.step, name)


def train(config: RunConfig, directory: Path, stop: int = 18) -> tuple[list[Any], Any]:
    """Return the batches of three epochs, and the closed loader."""
    split = open_shard_set(str(directory), config).split("train")
    with open_loader(config, split) as loader:
        return list(loader.batches(0, stop)), loader


SECTIONS: dict[str, dict[str, Any]] = {
    "random crops": {},
    "bicubic": {"interpolation": "bicubic"},
    "squares": {"crop": {"short_side": 0.7}},
    "padded": {"crop": {"padding": 5}},
    "augmented": {"augment": {"policy": "rand_augment", "erase": 0.3}},
    "repeated": {"repeats": 2},
    "cached": {"decoded_cache_bytes": 2**40},
    "some cached": {"decoded_cache_bytes": 100_000},
    "cached and augmented": {"decoded_cache_bytes": 100_000, "augment": {"policy": "trivial_augment"}},
}


@needs_native
@pytest.mark.parametrize("section", SECTIONS)
def test_training_batches_are_those_of_the_reference(section, mixed) -> None:
    """Damaged records are counted and substituted in the same way, with any number of threads."""
    plain = {"max_bad_rate": 1.0, **SECTIONS[section]}
    expected, reference = train(document(input=plain), mixed)
    for workers in (1, 3):
        found, loader = train(document("native", input={**plain, "workers": workers}), mixed)
        assert type(loader) is NativeLoader
        same(expected, found)
        assert loader.bad_records == reference.bad_records > 0
    assert type(reference) is PillowLoader
    assert reference.native_refusals == {}


@needs_native
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [32, 64])
def test_evaluation_batches_are_those_of_the_reference(size, interpolation, mixed) -> None:
    section = {"max_bad_rate": 1.0, "interpolation": interpolation}
    for world in (1, 2):
        same(
            *(
                evaluate(document(name, size=size, input=section), mixed, world=world)
                for name in ("reference", "native")
            )
        )


@needs_native
def test_what_the_extension_refuses_is_counted_by_reason(make_shard_set) -> None:
    """An epoch has 24 usual JPEGs, 8 progressive ones, 4 PNGs, and 4 of another size than in the index."""
    usual = [encode_image(smooth_pixels(i, 40, 50)) for i in range(24)]
    progressive = [encode_image(smooth_pixels(i, 40, 50), progressive=True) for i in range(8)]
    pngs = [encode_image(smooth_pixels(i, 40, 50), kind="PNG") for i in range(4)]
    samples = [Sample(data, 0) for data in (*usual, *progressive, *pngs)]
    samples += [Sample(data, 0, (41, 50)) for data in usual[:4]]
    directory = make_shard_set({"train": samples, "validation": samples[:4]}, shards=1)
    section = {"max_bad_rate": 1.0}
    _, loader = train(document("native", input=section), directory, stop=5)
    refusals = loader.native_refusals
    assert (refusals["format"], refusals["data"]) == (12, 0)
    assert 1 <= refusals["size"] <= 4, "some may be substituted before they are decoded"
    _, loader = train(document("native", input={**section, "decoded_cache_bytes": 2**40}), directory, stop=5)
    assert loader.native_refusals["format"] == 0, "what is kept is decoded by the reference path anyway"


@pytest.mark.parametrize("loader", [NATIVE, pytest.param("dali", marks=needs_dali)])
def test_a_remote_set_larger_than_its_cache(loader, make_shard_set, tmp_path) -> None:
    """A batch reads nearly all of the 12 shards, of which the cache holds 8; a shard in use cannot be evicted."""
    local = open_shard_set(str(make_shard_set(shards=12)), document())
    sizes = sorted(shard.bytes for shard in local.manifest.splits["train"].shards)
    with serve(tmp_path) as store:
        cache = ShardCache(tmp_path / "cache", sum(sizes[-8:]), QUICK)
        batches = []
        for name, shard_set in (("reference", local), (loader, cache.open(f"{store.url}/shards"))):
            with open_loader(document(name, batch=16), shard_set.split("train")) as loader:
                batches.append(list(loader.batches(0, 6)))
    if loader == "native":
        same(*batches)
    assert [batch.keys.tolist() for batch in batches[0]] == [batch.keys.tolist() for batch in batches[1]]


def test_without_the_extension_the_reference_takes_over(make_shard_set, monkeypatch, caplog) -> None:
    monkeypatch.setattr(native, "_native", None)
    assert resolve_loader("auto", "cpu") == "reference"
    assert not caplog.records
    assert resolve_loader("native", "cpu") == "reference"
    assert "the extension is not installed" in caplog.text
    _, loader = train(document("native"), make_shard_set(), stop=2)
    assert type(loader) is PillowLoader


@needs_native
def test_another_pillow_is_noticed(monkeypatch, caplog) -> None:
    def resize_otherwise(*arguments: Any) -> np.ndarray:
        return np.asarray(crop_and_resize(*arguments)) ^ 1

    monkeypatch.setattr(native, "crop_and_resize", resize_otherwise)
    native._has_pillows_pixels.cache_clear()
    assert resolve_loader("auto", "cpu") == "reference"
    assert resolve_loader("native", "cpu") == "reference"
    assert "has other pixels" in caplog.text
    assert "not installed" not in caplog.text
    monkeypatch.undo()
    native._has_pillows_pixels.cache_clear()
    assert resolve_loader("auto", "cpu") == "native"


def test_documents_may_name_the_reference_by_its_earlier_name() -> None:
    assert document("torchvision").input.loader == "reference"
