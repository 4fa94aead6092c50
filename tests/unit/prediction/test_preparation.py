"""Prepared pixels: those of evaluation, and of `podscale shard` before it."""

import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from podscale.config import RunConfig
from podscale.data import native
from podscale.data.loaders.build_loader import build_evaluation_loader
from podscale.data.shard_set import ShardSet
from podscale.data.sharding.validate_image import ImageRules, InvalidImage, prepare_image
from podscale.prediction import preparation
from podscale.prediction.image_inputs import EncodedImage
from podscale.prediction.preparation import ImagePreparer
from tests.conftest import MakeShardSet
from tests.support.prediction import odd_images, photograph, png_with_size
from tests.support.shard_set import Sample, encode_image, smooth_pixels


def config_of(**sections: object) -> RunConfig:
    return RunConfig.model_validate({"input": {"image_size": 32, "interpolation": "bicubic"}, **sections})


def test_pixels_are_those_of_evaluation(make_shard_set: MakeShardSet) -> None:
    """Records of a set and the files they were packed from give the pixels of the evaluation's loader.

    tests/unit/data compares the loader with torchvision's transforms.
    """
    sizes = [(60, 80), (81, 55), (20, 21), (37, 37), (1, 1), (500, 9)]
    pixels = [smooth_pixels(seed, *size) for seed, size in enumerate(sizes)]
    images = [encode_image(image, kind=kind) for kind in ("JPEG", "PNG") for image in pixels]
    images.append(odd_images()["cmyk.jpg"][0])
    samples = [Sample(image, 0) for image in images]
    split = ShardSet.open(make_shard_set({"train": samples, "validation": samples}, classes=["ant"])).split(
        "validation"
    )
    config = config_of(evaluate={"batch": len(samples)})
    loader = build_evaluation_loader(config, split, ranks=range(1), world_size=1, device="cpu")
    (batch,) = loader.batches(0, 1)
    loader.close()
    prepare = ImagePreparer(config)
    for row, image in enumerate(images):
        np.testing.assert_array_equal(prepare(b"x.jpg", EncodedImage(image)), batch.images[row])
        height, width = (int(split.column(side)[row]) for side in ("height", "width"))
        np.testing.assert_array_equal(prepare(b"", EncodedImage(split.read(row), (height, width))), batch.images[row])


@pytest.mark.skipif(not native.is_available(), reason="the native extension is not installed")
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "random"])
@pytest.mark.parametrize("fraction", [0.875, 1.0])
def test_the_native_extension_has_the_pixels_of_pillow(
    interpolation: str, fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [(60, 80), (381, 155), (20, 21), (33, 32), (1, 1), (900, 9), (3, 700)]
    noise = np.random.default_rng(0)
    images = [
        encode_image(noise.integers(0, 256, (*size, 3)).astype(np.uint8), kind=kind)
        for kind in ("JPEG", "PNG")
        for size in sizes
    ]
    images += [content for content, reason, _ in odd_images().values() if reason is None]
    config = config_of(evaluate={"crop_fraction": fraction}, input={"image_size": 32, "interpolation": interpolation})
    with_extension = ImagePreparer(config)
    with monkeypatch.context() as patch:
        patch.setattr(native, "is_available", lambda: False)
        without = ImagePreparer(config)
        patch.setattr(native, "is_available", lambda: True)
        patch.setattr(native, "CropDecoder", lambda threads: SimpleNamespace(decode=lambda *_: np.ones(1)))
        refused = ImagePreparer(config)
    wanted = [without(b"x", EncodedImage(image)) for image in images]
    np.testing.assert_array_equal(refused(b"x", EncodedImage(images[0])), wanted[0])
    monkeypatch.delattr(preparation, "crop_and_resize")
    for image, pixels in zip(images, wanted, strict=True):
        np.testing.assert_array_equal(with_extension(b"x", EncodedImage(image)), pixels)


@pytest.mark.parametrize(
    "data", [{"policy": "convert"}, {"resize_short": 24}, {"policy": "convert", "resize_short": 24}]
)
def test_images_are_rewritten_as_the_shard_set_of_the_run_was(data: dict[str, object]) -> None:
    config = config_of(data=data)
    rules = ImageRules.from_section(config.data)
    plain = ImagePreparer(config_of())
    for name in ("good.jpg", "cmyk.jpg", "deep.png", "animated.gif", "alpha.png"):
        content, refused, _ = odd_images()[name]
        if refused and not rules.convert:
            continue
        packed, _ = prepare_image(name.encode(), content, rules)
        pixels = ImagePreparer(config)(name.encode(), EncodedImage(content))
        np.testing.assert_array_equal(pixels, plain(b"packed.jpg", EncodedImage(packed)))


@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize("name", odd_images())
def test_odd_images_have_pixels_or_a_reason(name: str, convert: bool) -> None:
    content, refused, refused_converted = odd_images()[name]
    prepare = ImagePreparer(config_of(), convert=convert)
    reason = refused_converted if convert else refused
    if reason is None:
        assert prepare(name.encode(), EncodedImage(content)).shape == (32, 32, 3)
    else:
        with pytest.raises(InvalidImage) as invalid:
            prepare(name.encode(), EncodedImage(content))
        assert invalid.value.reason == reason


def test_a_record_that_is_not_of_its_indexed_size_has_a_reason() -> None:
    record = np.frombuffer(photograph(1), dtype=np.uint8)
    with pytest.raises(InvalidImage) as invalid:
        ImagePreparer(config_of())(b"", EncodedImage(record, (10, 10)))
    assert invalid.value.reason == "corrupt"


def test_an_image_of_another_size_than_its_header_has_a_reason() -> None:
    """The limits were checked by the first header; Pillow decodes by the last."""
    content = png_with_size(10, 10)[:33] + encode_image(smooth_pixels(0, 30, 20), kind="PNG")[8:]
    with pytest.raises(InvalidImage) as invalid:
        ImagePreparer(config_of())(b"x.png", EncodedImage(content))
    assert invalid.value.reason == "corrupt"


def test_damage_that_pillow_accepts_has_a_reason() -> None:
    """Pillow decodes a JPEG with damaged data without an error; evaluation data was checked when it was packed."""
    content = bytearray(photograph(2, 200, 200))
    content[len(content) // 2 : len(content) // 2 + 40] = b"\xff\xd9" + bytes(38)
    Image.open(io.BytesIO(bytes(content) + b"\xff\xd9")).load()
    with pytest.raises(InvalidImage) as invalid:
        ImagePreparer(config_of())(b"x.jpg", EncodedImage(bytes(content)))
    assert invalid.value.reason == "corrupt"


def test_buffers_are_not_shared_between_results(tmp_path: Path) -> None:
    prepare = ImagePreparer(config_of(evaluate={"crop_fraction": 1.0}))
    first = prepare(b"a", EncodedImage(encode_image(np.full((32, 32, 3), 10, np.uint8), kind="JPEG")))
    prepare(b"b", EncodedImage(encode_image(np.full((32, 32, 3), 200, np.uint8), kind="JPEG")))
    assert np.abs(first.astype(int) - 10).max() < 5
