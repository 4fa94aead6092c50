"""Pixels of the loaders: against each other, against torchvision itself and against PIL."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from podscale.config import load
from podscale.config.run_config import RunConfig
from podscale.data.crop import training_crops
from podscale.data.decode import BadRecord, decode
from podscale.data.sampler import build_sampler
from podscale.data.shard_set import ShardSet
from podscale.data.sharding.build_shard_set import build_shard_set
from tests.support.loading import by_key, document, evaluate, needs_dali, pil_pixels, special_images, train
from tests.support.shard_set import Sample


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
def test_dali_and_torchvision_give_the_same_samples_and_nearly_the_same_pixels(make_shard_set) -> None:
    directory = make_shard_set()
    alike(*(train(document(name), directory, 0, 6) for name in ("torchvision", "dali")))


def test_decoding_in_batches_gives_the_same_samples_and_nearly_the_same_pixels(make_shard_set) -> None:
    """Run the nvJPEG loader with torchvision's decoder on the CPU; some of the images are PNG and CMYK."""
    samples = [Sample(data, 0) for name, data in special_images().items() if name != "one pixel"]
    directory = make_shard_set({"train": samples, "validation": samples}, shards=1)
    for size in (32, 64):
        config, other = (document(name, batch=6, size=size) for name in ("torchvision", "nvjpeg"))
        for read in (lambda c: train(c, directory, 0, 6), lambda c: evaluate(c, directory)):
            alike(read(config), read(other))


@needs_dali
@pytest.mark.parametrize("size", [32, 64])
def test_evaluation_is_alike_in_both_loaders(size, make_shard_set) -> None:
    directory = make_shard_set()
    alike(*(evaluate(document(name, size=size), directory, world=2) for name in ("torchvision", "dali")))


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
    configs = [load_variant(config, name) for name in ("torchvision", "dali")]
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
        loaded = (run(document(name, batch=32, size=224, evaluate={"batch": 32})) for name in ("torchvision", "dali"))
        alike(*loaded, share=0.999)


def test_evaluation_pixels_are_torchvisions(make_shard_set) -> None:
    """An oracle written with torchvision's own transforms on PIL images."""
    functional = pytest.importorskip("torchvision.transforms.functional")
    directory = make_shard_set()
    config = document(size=40)
    split = ShardSet.open(directory).split("validation")
    pixels = by_key(evaluate(config, directory))
    for row in range(len(split)):
        image = Image.open(io.BytesIO(split.read(row).tobytes())).convert("RGB")
        resized = functional.resize(image, round(40 / 0.875))
        expected = np.asarray(functional.center_crop(resized, [40, 40]))
        assert np.array_equal(pixels[int(split.keys[row]), 0], expected)


def test_training_pixels_are_torchvisions(make_shard_set) -> None:
    """An oracle written with torchvision's own transforms on PIL images."""
    functional = pytest.importorskip("torchvision.transforms.functional")
    directory = make_shard_set()
    config = document(size=40)
    split = ShardSet.open(directory).split("train")
    order = build_sampler(config, split)
    (batch,) = train(config, directory, 7, 8)
    slots = order.global_batch(7)
    sizes = [split.column(name)[slots.rows].astype(np.int64) for name in ("width", "height")]
    views = training_crops(4, slots.epochs, batch.keys, *sizes, crop=config.input.crop, size=40)
    for slot, row in enumerate(slots.rows.tolist()):
        image = Image.open(io.BytesIO(split.read(row).tobytes())).convert("RGB")
        view = views[slot]
        expected = functional.resized_crop(image, view.top, view.left, view.height, view.width, [40, 40])
        expected = functional.hflip(expected) if view.flip else expected
        assert np.array_equal(batch.images[slot], np.asarray(expected))


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
