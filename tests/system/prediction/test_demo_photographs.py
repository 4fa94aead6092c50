"""demo.html with photographs in a real browser: pixels, classes and probabilities of the evaluation."""

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podscale.config import load, loads
from podscale.data.shard_set import ShardSet
from podscale.export.export_model import export_model
from podscale.export.export_options import ExportOptions
from podscale.export.export_result import log_probabilities
from podscale.prediction.exported_file import ExportedFile
from podscale.prediction.image_inputs import EncodedImage
from podscale.prediction.model import build_classifier, open_model
from podscale.prediction.preparation import ImagePreparer
from podscale.runs.predictions import read_predictions
from tests.support.commands import podscale, set_options
from tests.support.demo_frame import demo_frame, page_browser_or_skip

IMAGES = 500
AGREEMENT = 0.99
"""Fraction of images with the class of the evaluation; a near tie may fall the other way in another runtime."""
INT8_AGREEMENT = 0.9
"""The same of the int8 page against the fp32 evaluation: 0.94 agreed, because a network this small is often unsure."""
SETTINGS = (
    "run.id=photos",
    "data.images_per_class=200",
    "model.width=16",
    "train.epochs=5",
    "evaluate.crop_fraction=0.875",
    "evaluate.every_epochs=0",
    "launch.threads=1",
)


@pytest.mark.slow
def test_five_hundred_photographs(real_data: Path, tmp_path: Path) -> None:
    program = page_browser_or_skip()
    source = f"data.source={real_data / 'imagenette224.tar'}"
    ended = podscale(tmp_path, "run", "imagenette", *set_options(source, *SETTINGS))
    assert ended.code == 0, ended.err
    run = tmp_path / "runs" / "photos"
    evaluated = read_predictions(run / "predictions.safetensors")
    chosen = np.arange(IMAGES) * len(evaluated.keys) // IMAGES
    classes = evaluated.topk[chosen, 0]
    assert np.bincount(classes, minlength=10).max() < IMAGES / 2, "the model has learned nothing"
    (shards,) = (path for path in (tmp_path / "datasets").iterdir() if path.is_dir())
    split = ShardSet.open(shards).split("validation")
    row_of_key = {int(key): row for row, key in enumerate(split.keys)}
    images = [split.read(row_of_key[int(key)]).tobytes() for key in evaluated.keys[chosen]]
    prepare = ImagePreparer(load(run / "config.yaml"))
    expected = np.stack([prepare(b"a.jpg", EncodedImage(image)) for image in images])

    checked: dict[str, Any] = {"limit": 100, "shard_set": str(shards)}
    page = export_model(run, ExportOptions(format="html", **checked)).path
    with demo_frame(program, page, tmp_path) as frame:
        found, pixels = frame.classify(images)
        assert frame.requests() == []
    np.testing.assert_array_equal(pixels, expected)
    assert np.mean(found.argmax(1) == classes) >= AGREEMENT

    quantised = export_model(run, ExportOptions(format="html", int8=True, out=tmp_path / "int8.html", **checked)).path
    with demo_frame(program, quantised, tmp_path) as frame:
        found, _ = frame.classify(images)
        assert frame.requests() == []
    assert np.mean(found.argmax(1) == classes) >= INT8_AGREEMENT
    native = export_model(run, ExportOptions(int8=True, preprocessing=True, **checked)).path
    here = log_probabilities(build_classifier(open_model(native)), expected)
    assert np.mean(found.argmax(1) == here.argmax(1)) >= AGREEMENT, "onnxruntime gives other classes in the browser"
    assert ExportedFile.open(native).metadata.quantization == "int8"


@pytest.mark.slow
def test_photographs_as_they_were_taken(real_data: Path, calm: Path, tmp_path: Path) -> None:
    """500 originals of ImageNet, of any size, with colour profiles and in gray, have the pixels of the evaluation."""
    program = page_browser_or_skip()
    with tarfile.open(real_data / "imagenet-500.tar") as archive:
        images = [archive.extractfile(member).read() for member in archive if member.isfile()]
    assert len(images) == IMAGES
    page = export_model(calm / "runs" / "calm", ExportOptions(format="html", limit=50, out=tmp_path / "demo.html")).path
    prepare = ImagePreparer(loads("", overrides=["input.image_size=224", "evaluate.crop_fraction=0.875"]))
    options = {"image_size": 224, "crop_fraction": 0.875, "interpolation": "bilinear"}
    with demo_frame(program, page, tmp_path) as frame:
        for image, pixels in zip(images, frame.prepare(images, options), strict=True):
            np.testing.assert_array_equal(pixels, prepare(b"a.jpg", EncodedImage(image)))
