"""Pixels of the loaders: against each other, against torchvision itself and against PIL."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from podscale.config import load
from podscale.config.run_config import RunConfig
from podscale.data.crop import random_filters, training_crops
from podscale.data.decode import BadRecord, decode
from podscale.data.sampler import build_sampler
from podscale.data.shard_set import ShardSet
from podscale.data.sharding.build_shard_set import build_shard_set
from tests.support.loading import NATIVE, by_key, document, evaluate, needs_dali, pil_pixels, special_images, train
from tests.support.shard_set import Sample, encode_image


def alike(reference: list[Any], other: list[Any], *, share: float = 1.0) -> None:
    """Assert equal samples in the same slots; `share` of the pixels within 4 of 255, and 0.6 on average."""
    for left, right in zip(reference, other, strict=True):
        assert left.step == right.step
        for name in ("keys", "labels", "weights"):
            assert np.array_equal(getattr(left, name), getattr(right, name)), name
        difference = np.abs(left.images.astype(int) - right.images)
        assert difference.mean() < 0.6
        assert np.quantile(difference, share) <= 4


@needs_dali
def test_dali_and_the_reference_give_the_same_samples_and_nearly_the_same_pixels(make_shard_set) -> None:
    directory = make_shard_set()
    alike(*(train(document(name), directory, 0, 6) for name in ("reference", "dali")))


def test_decoding_in_batches_gives_the_same_samples_and_nearly_the_same_pixels(make_shard_set) -> None:
    """Run the nvJPEG loader with torchvision's decoder on the CPU; some of the images are PNG and CMYK."""
    samples = [Sample(data, 0) for name, data in special_images().items() if name != "one pixel"]
    directory = make_shard_set({"train": samples, "validation": samples}, shards=1)
    for size in (32, 64):
        config, other = (document(name, batch=6, size=size) for name in ("reference", "nvjpeg"))
        for read in (lambda c: train(c, directory, 0, 6), lambda c: evaluate(c, directory)):
            alike(read(config), read(other))


@needs_dali
@pytest.mark.parametrize("size", [32, 64])
def test_evaluation_is_alike_in_both_loaders(size, make_shard_set) -> None:
    directory = make_shard_set()
    alike(*(evaluate(document(name, size=size), directory, world=2) for name in ("reference", "dali")))


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    """Make the shard set of the preset `digits`: PNG images of 8 x 8 pixels, enlarged to 16."""
    preset = Path(__file__).parents[4] / "pipelines" / "presets" / "digits.yaml"
    directory = tmp_path_factory.mktemp("digits") / "set"
    config = load(preset)
    build_shard_set(config.data, directory, workers=1)
    return config, directory


@needs_dali
def test_digits_are_alike_in_both_loaders(digits: tuple[RunConfig, Path]) -> None:
    config, directory = digits
    configs = [load_variant(config, name) for name in ("reference", "dali")]
    per_epoch = 1438 // config.train.global_batch
    for read in (
        lambda c: train(c, directory, per_epoch - 2, per_epoch + 2, world=2),
        lambda c: evaluate(c, directory),
    ):
        reference, other = map(read, configs)
        alike(reference, other)
        assert {batch.images.shape[1:] for batch in reference} == {(16, 16, 3)}
        assert all(batch.images.std() > 40 for batch in reference), "the digits are seen"


def load_variant(config: RunConfig, loader: str) -> RunConfig:
    """Return the same document with another loader."""
    return config.model_copy(update={"input": config.input.model_copy(update={"loader": loader})})


def real_samples(archive: Path, count: int, every: int) -> list[Any]:
    with tarfile.open(archive) as tar:
        members = [member for member in tar.getmembers() if member.name.lower().endswith((".jpg", ".jpeg"))]
        return [Sample(tar.extractfile(member).read(), 0) for member in members[::every][:count]]


@needs_dali
def test_real_images_are_alike_in_both_loaders(real_data, make_shard_set) -> None:
    samples = real_samples(real_data / "imagenet-500.tar", 40, 12)
    samples += real_samples(real_data / "imagenette224.tar", 40, 300)
    for sample in samples:
        assert np.array_equal(decode(np.frombuffer(sample.image, np.uint8)), pil_pixels(sample.image))
    directory = make_shard_set({"train": samples, "validation": samples})
    for run in (lambda c: train(c, directory, 0, 3), lambda c: evaluate(c, directory)):
        loaded = (run(document(name, batch=32, size=224, evaluate={"batch": 32})) for name in ("reference", "dali"))
        alike(*loaded, share=0.999)


interpolations = pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])


@interpolations
@pytest.mark.parametrize("loader", ["reference", NATIVE])
def test_evaluation_pixels_are_torchvisions(loader, interpolation, make_shard_set) -> None:
    """An oracle written with torchvision's own transforms on PIL images."""
    functional = pytest.importorskip("torchvision.transforms.functional")
    directory = make_shard_set()
    config = document(loader, size=40, input={"interpolation": interpolation})
    split = ShardSet.open(directory).split("validation")
    pixels = by_key(evaluate(config, directory))
    for row in range(len(split)):
        image = Image.open(io.BytesIO(split.read(row).tobytes())).convert("RGB")
        resized = functional.resize(image, round(40 / 0.875), functional.InterpolationMode(interpolation))
        expected = np.asarray(functional.center_crop(resized, [40, 40]))
        assert np.array_equal(pixels[int(split.keys[row]), 0], expected)


@interpolations
@pytest.mark.parametrize("loader", ["reference", NATIVE])
def test_training_pixels_are_torchvisions(loader, interpolation, make_shard_set) -> None:
    """An oracle written with torchvision's own transforms on PIL images."""
    functional = pytest.importorskip("torchvision.transforms.functional")
    directory = make_shard_set()
    config = document(loader, size=40, input={"interpolation": interpolation})
    mode = functional.InterpolationMode(interpolation)
    split = ShardSet.open(directory).split("train")
    order = build_sampler(config, split)
    (batch,) = train(config, directory, 7, 8)
    slots = order.global_batch(7)
    sizes = [split.column(name)[slots.rows].astype(np.int64) for name in ("width", "height")]
    views = training_crops(4, slots.epochs, batch.keys, *sizes, crop=config.input.crop, size=40)
    for slot, row in enumerate(slots.rows.tolist()):
        image = Image.open(io.BytesIO(split.read(row).tobytes())).convert("RGB")
        view = views[slot]
        expected = functional.resized_crop(image, view.top, view.left, view.height, view.width, [40, 40], mode)
        expected = functional.hflip(expected) if view.flip else expected
        assert np.array_equal(batch.images[slot], np.asarray(expected))


@pytest.mark.parametrize("loader", ["reference", NATIVE])
def test_random_filters_are_those_that_are_drawn(loader, make_shard_set) -> None:
    """Each crop has the pixels of one of the two filters, by its seed, epoch and sample; a copy draws its own."""
    directory = make_shard_set()
    by_filter = {
        name: train(document(loader, size=40, input={"interpolation": name, "repeats": 2}), directory, 0, 14)
        for name in ("bilinear", "bicubic", "random")
    }
    sampler = build_sampler(document(input={"repeats": 2}), ShardSet.open(directory).split("train"))
    seen, differ = [], []
    for batch, bilinear, bicubic in zip(*(by_filter[name] for name in ("random", "bilinear", "bicubic")), strict=True):
        is_bicubic = random_filters(4, sampler.global_batch(batch.step).epochs, batch.keys)
        differ += [not np.array_equal(*pair) for pair in zip(bilinear.images, bicubic.images, strict=True)]
        assert np.array_equal(batch.images, np.where(is_bicubic[:, None, None, None], bicubic.images, bilinear.images))
        seen += is_bicubic.tolist()
    assert 0.3 < np.mean(seen) < 0.7
    assert np.mean(differ) > 0.9, "all but crops of 40 px, which are not resized"


FILTERS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "bilinear": (lambda x: 1 - np.abs(x), 1.0),
    "bicubic": (
        lambda x: np.where(
            np.abs(x) < 1, 1.5 * np.abs(x) ** 3 - 2.5 * x**2 + 1, -0.5 * (np.abs(x) ** 3 - 5 * x**2 + 8 * np.abs(x) - 4)
        ),
        2.0,
    ),
}
"""Filters and their radii at scale 1: a triangle, and equation 4 of Keys 1981 with a = -1/2."""


def resampled(pixels: np.ndarray, size: int, interpolation: str) -> np.ndarray:
    """Resize the first dimension in float64: a filter as wide as the scale, weights of sum 1, none outside."""
    function, radius = FILTERS[interpolation]
    scale = len(pixels) / size
    wide = max(scale, 1.0)
    distance = (np.arange(len(pixels)) + 0.5 - (np.arange(size)[:, np.newaxis] + 0.5) * scale) / wide
    weights = np.where(np.abs(distance) < radius, function(distance), 0.0)
    return np.tensordot(weights / weights.sum(1, keepdims=True), pixels.astype(float), 1)


@interpolations
@pytest.mark.parametrize("loader", ["reference", NATIVE, pytest.param("dali", marks=needs_dali), "nvjpeg"])
@pytest.mark.parametrize("side", [61, 23], ids=["smaller", "larger"])
def test_resized_pixels_are_those_of_the_filters_equations(side, loader, interpolation, make_shard_set) -> None:
    """Noise has the highest frequencies, which another filter, or one without antialiasing, changes most.

    DALI repeats the pixels at the border where PIL drops the weights outside, so its border is left out.
    """
    noise = np.random.default_rng(3).integers(60, 196, (side, side, 3)).astype(np.uint8)
    sample = Sample(encode_image(noise, kind="PNG"), 0)
    directory = make_shard_set({"train": [sample] * 8, "validation": [sample]}, shards=1)
    config = document(loader, input={"interpolation": interpolation}, evaluate={"crop_fraction": 1.0, "batch": 1})
    columns = resampled(noise.transpose(1, 0, 2), 32, interpolation).transpose(1, 0, 2)
    want = resampled(columns, 32, interpolation)
    whole = document(loader, input={"interpolation": interpolation, "crop": {"short_side": 1, "flip": 0}})
    border = 4 if loader == "dali" else 0
    for image in (evaluate(config, directory)[0].images[0], train(whole, directory, 0, 1)[0].images[0]):
        difference = np.abs(np.asarray(image) - want)[border : 32 - border, border : 32 - border]
        assert difference.max() <= 1.1, "two roundings to whole numbers"
        assert difference.mean() < 0.4


@pytest.mark.parametrize("loader", ["reference", NATIVE, pytest.param("dali", marks=needs_dali), "nvjpeg"])
def test_padded_crops_are_windows_of_a_padded_image(loader, make_shard_set) -> None:
    """Images of the training size are not resized: all loaders have the same pixels, black outside the image."""
    shapes = [(32, 32), (32, 45), (50, 32)] * 4
    noise = [np.random.default_rng(i).integers(1, 256, (*shape, 3)).astype(np.uint8) for i, shape in enumerate(shapes)]
    samples = [Sample(encode_image(pixels, kind="PNG"), 0) for pixels in noise]
    directory = make_shard_set({"train": samples, "validation": samples}, shards=1)
    config = document(loader, batch=12, input={"crop": {"padding": 4}})
    split = ShardSet.open(directory).split("train")
    originals = {int(split.keys[row]): pil_pixels(split.read(row).tobytes()) for row in range(len(split))}
    order, outside = build_sampler(config, split), 0
    for batch in train(config, directory, 0, 6):
        rows = order.global_batch(batch.step).rows
        sizes = [split.column(name)[rows].astype(np.int64) for name in ("width", "height")]
        epochs = np.full(len(rows), batch.step)
        views = training_crops(4, epochs, batch.keys, *sizes, crop=config.input.crop, size=32)
        for slot, key in enumerate(batch.keys.tolist()):
            padded = np.pad(originals[key], ((4, 4), (4, 4), (0, 0)))
            top, left = views[slot].out_top + 4, views[slot].out_left + 4
            window = padded[top : top + 32, left : left + 32]
            outside += not window.all()
            assert np.array_equal(batch.images[slot], window[:, ::-1] if views[slot].flip else window)
    assert outside > 50


def test_decode_gives_pils_pixels() -> None:
    for name, data in special_images().items():
        assert np.array_equal(decode(np.frombuffer(data, np.uint8)), pil_pixels(data)), name


@needs_dali
def test_dali_decodes_to_pils_pixels(make_shard_set) -> None:
    """Decode only: the images have the target's size, so there is no crop and no resize. Bit for bit."""
    images = {name: data for name, data in special_images().items() if len(pil_pixels(data)) > 20}
    square = {}
    for name, data in images.items():
        image = Image.open(io.BytesIO(data))
        part = image.crop((0, 0, 32, 32))
        file = io.BytesIO()
        part.save(file, image.format, **({"subsampling": 2} if name == "4:2:0" else {}))
        square[name] = file.getvalue()
    samples = [Sample(data, 0) for data in square.values()]
    directory = make_shard_set({"train": samples, "validation": samples}, shards=1)
    config = document("dali", batch=len(samples), evaluate={"crop_fraction": 1.0, "batch": 16})
    pixels = by_key(evaluate(config, directory))
    for number, (name, data) in enumerate(square.items()):
        difference = np.abs(pixels[len(samples) + number, 0].astype(int) - pil_pixels(data))
        assert difference.max() <= (1 if name == "cmyk" else 0), name  # CMYK is rounded differently


@pytest.mark.parametrize("data", [b"", b"garbage", b"GIF89a" + bytes(50), b"\xff\xd8\xff\xe0" + bytes(100)])
def test_decode_refuses_what_is_no_image(data: bytes) -> None:
    with pytest.raises(BadRecord):
        decode(np.frombuffer(data, np.uint8))
