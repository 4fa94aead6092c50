"""The page of the export task in a real browser, in a frame as KFP's: the evaluation's classes, and no request."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from PIL import Image

from podscale.components import steps
from podscale.config import load, loads
from podscale.data.shard_set import ShardSet
from podscale.prediction.image_inputs import EncodedImage
from podscale.prediction.preparation import ImagePreparer
from podscale.runs.predictions import read_predictions
from tests.support.commands import copy_workspace
from tests.support.demo_frame import Frame, demo_frame, page_browser_or_skip
from tests.support.shard_set import encode_image, smooth_pixels

SHAPES = [(33, 57), (301, 200), (9, 9), (400, 60)]
"""Heights and widths; Pillow since version 13 resizes the last one vertically first."""


def test_the_page_agrees_with_the_evaluation(calm: Path, tmp_path: Path) -> None:
    program = page_browser_or_skip()
    copy_workspace(calm, tmp_path)
    run = tmp_path / "runs" / "calm"
    (shards,) = (path for path in (tmp_path / "datasets").iterdir() if path.is_dir())
    artifact = export_task(run, shards, tmp_path)
    assert '<a href="export/demo.html">' in (run / "report.html").read_text()
    evaluated = read_predictions(run / "predictions.safetensors")
    split = ShardSet.open(shards).split("validation")
    row_of_key = {int(key): row for row, key in enumerate(split.keys)}
    images = [split.read(row_of_key[int(key)]).tobytes() for key in evaluated.keys]

    with demo_frame(program, artifact, tmp_path) as frame:
        found, _ = frame.classify(images)
        assert len(found) == len(evaluated.keys) > 300
        np.testing.assert_array_equal(np.argmax(found, axis=1), evaluated.topk[:, 0])

        assert_prepared_as_in_python(frame)
        frame.evaluate("document.querySelector('#samples button').click()")
        frame.evaluate("add('text.png', new Blob(['no picture']))")
        frame.evaluate("queue.then(() => 1)")
        cards = frame.evaluate("[...document.querySelectorAll('#results li')].map(card => card.innerText)")
        assert len(cards) == 2
        assert sum("true class" in card and "%" in card for card in cards) == 1
        assert sum("text.png" in card and "%" not in card for card in cards) == 1
        assert frame.requests() == []


def export_task(run: Path, shards: Path, folder: Path) -> Path:
    """Return the artifact with the page, written by the task `export` of a pipeline."""
    config = load(run / "config.yaml", [f"run.workspace={folder}", "export={formats: [html], images: 50}"])
    names = ("manifest.json", "exported", "page")
    shard_set, exported, page = (SimpleNamespace(path=str(folder / name), metadata={}) for name in names)
    Path(shard_set.path).write_text(json.dumps({"location": str(shards)}))
    steps.export(config.model_dump_json(), shard_set, exported, page)
    return Path(page.path)


def assert_prepared_as_in_python(frame: Frame) -> None:
    """Pictures of any shape and kind have the pixels of the evaluation, for both filters, enlarged and reduced."""
    images = [encode_image(smooth_pixels(n, *shape), kind="PNG") for n, shape in enumerate(SHAPES)]
    images += unusual_images()
    for interpolation in ("bilinear", "bicubic"):
        options = {"image_size": 40, "crop_fraction": 0.875, "interpolation": interpolation}
        changes = [f"input={{image_size: 40, interpolation: {interpolation}}}", "evaluate.crop_fraction=0.875"]
        expect_pixels(frame, images, options, changes)
    # The evaluation codes an image as JPEG after it turned or shrank it. At quality 100 that changes gray by a level.
    options = {"image_size": 40, "crop_fraction": 1.0, "interpolation": "bilinear"}
    changes = ["input.image_size=40", "evaluate.crop_fraction=1.0", "data.quality=100"]
    upright = [image for image in images if image.startswith(b"\xff\xd8")]
    expect_pixels(frame, upright, {**options, "upright": True}, [*changes, "data.policy=convert"], tolerance=2)
    gray = [encode_gray(Image.fromarray(smooth_pixels(n, *shape))) for n, shape in enumerate(SHAPES)]
    expect_pixels(frame, gray, {**options, "resize_short": 20}, [*changes, "data.resize_short=20"], tolerance=2)


def expect_pixels(
    frame: Frame, images: list[bytes], options: dict[str, object], changes: list[str], tolerance: int = 0
) -> None:
    prepare = ImagePreparer(loads("", overrides=changes))
    for number, (pixels, image) in enumerate(zip(frame.prepare(images, options), images, strict=True)):
        expected = prepare(b"a.jpg" if image.startswith(b"\xff\xd8") else b"a.png", EncodedImage(image))
        difference = int(np.abs(pixels.astype(int) - expected).max())
        assert difference <= tolerance, (number, difference)


def encode_gray(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.convert("L").save(out, "PNG")
    return out.getvalue()


def unusual_images() -> list[bytes]:
    """Return a rotated JPEG and PNG, a progressive and a CMYK JPEG, and PNGs whose pixels have an opacity."""
    picture = Image.fromarray(smooth_pixels(7, 70, 110))
    rotated = Image.Exif()
    rotated[0x0112] = 6
    opacity = Image.linear_gradient("L").resize(picture.size)
    transparent = picture.copy()
    transparent.putalpha(opacity)
    palette = picture.quantize(16)

    def encode(image: Image.Image, kind: str, **options: object) -> bytes:
        out = io.BytesIO()
        image.save(out, kind, **options)
        return out.getvalue()

    return [
        encode(picture, "JPEG", exif=rotated),
        encode(picture, "PNG", exif=rotated),
        encode(picture, "JPEG", progressive=True),
        encode(picture.convert("CMYK"), "JPEG"),
        encode(transparent, "PNG"),
        encode(transparent.convert("LA"), "PNG"),
        encode(palette, "PNG", transparency=3),
    ]
