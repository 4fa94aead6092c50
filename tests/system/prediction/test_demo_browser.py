"""The page of the export task in a real browser, in a frame as KFP's: the evaluation's classes, and no request."""

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from podscale.components import steps
from podscale.config import load, loads
from podscale.data.shard_set import ShardSet
from podscale.export.web_runtime import is_cached
from podscale.prediction.image_inputs import EncodedImage
from podscale.prediction.preparation import ImagePreparer
from podscale.runs.predictions import read_predictions
from tests.support.browser import Browser, browser, find_browser
from tests.support.commands import copy_workspace
from tests.support.shard_set import encode_image, smooth_pixels


class Frame:
    """Child frame of a page, in which expressions are evaluated."""

    def __init__(self, tab: Browser) -> None:
        main = tab.call("Page.getFrameTree")["frameTree"]["frame"]["id"]
        created = [e["params"]["context"] for e in tab.events if e["method"] == "Runtime.executionContextCreated"]
        self._tab = tab
        self._context = [context["id"] for context in created if context["auxData"]["frameId"] != main][-1]

    def evaluate(self, script: str) -> Any:
        answer = self._tab.call(
            "Runtime.evaluate", expression=script, contextId=self._context, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")


def blobs(images: list[bytes]) -> str:
    """Return the expression of an array of encoded images."""
    texts = json.dumps([base64.b64encode(image).decode() for image in images])
    return f"{texts}.map(text => new Blob([Uint8Array.from(atob(text), c => c.charCodeAt(0))]))"


def test_the_page_agrees_with_the_evaluation(calm: Path, tmp_path: Path) -> None:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    if not is_cached():
        pytest.skip("onnxruntime-web is not in the cache; `podscale export --format html` fetches it with npm")
    copy_workspace(calm, tmp_path)
    run = tmp_path / "runs" / "calm"
    (shards,) = (path for path in (tmp_path / "datasets").iterdir() if path.is_dir())
    artifact = export_task(run, shards, tmp_path)
    assert '<a href="export/demo.html">' in (run / "report.html").read_text()
    evaluated = read_predictions(run / "predictions.safetensors")
    split = ShardSet.open(shards).split("validation")
    row_of_key = {int(key): row for row, key in enumerate(split.keys)}
    images = [split.read(row_of_key[int(key)]).tobytes() for key in evaluated.keys]
    page = tmp_path / "frame.html"
    page.write_text(viewer(artifact.read_text()))

    with browser(program) as tab:
        tab.open(page)
        frame = Frame(tab)
        assert frame.evaluate("window.origin") == "null"
        assert frame.evaluate("opened.then(() => 'ready', error => error.message)") == "ready"
        found = frame.evaluate(f"Promise.all({blobs(images)}.map(b => classify(b).then(r => r.probabilities)))")
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
        requests = [e["params"]["request"]["url"] for e in tab.events if e["method"] == "Network.requestWillBeSent"]
        assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []


def viewer(html: str) -> str:
    """Return a page that shows `html` as HTMLViewer.tsx of KFP's interface does."""
    frame = '<iframe src="about:blank" sandbox="allow-scripts"></iframe>'
    text = json.dumps(html).replace("<", "\\u003c")
    return f"<!doctype html>{frame}<script>document.querySelector('iframe').srcdoc = {text}</script>"


def export_task(run: Path, shards: Path, folder: Path) -> Path:
    """Return the artifact with the page, written by the task `export` of a pipeline."""
    config = load(run / "config.yaml", [f"run.workspace={folder}", "export={formats: [html], images: 50}"])
    names = ("manifest.json", "exported", "page")
    shard_set, exported, page = (SimpleNamespace(path=str(folder / name), metadata={}) for name in names)
    Path(shard_set.path).write_text(json.dumps({"location": str(shards)}))
    steps.export(config.model_dump_json(), shard_set, exported, page)
    return Path(page.path)


def assert_prepared_as_in_python(frame: Frame) -> None:
    """Pictures of any shape have the pixels of the evaluation, for both filters, enlarged and reduced."""
    images = [
        encode_image(smooth_pixels(n, *shape), kind="PNG") for n, shape in enumerate([(33, 57), (301, 200), (9, 9)])
    ]
    for interpolation in ("bilinear", "bicubic"):
        options = {"image_size": 40, "crop_fraction": 0.875, "interpolation": interpolation}
        script = (
            f"Promise.all({blobs(images)}.map(async blob => {{ const {{pixels, width, height}} = await decode(blob);"
        )
        script += f" return Array.from(prepare(pixels, width, height, {json.dumps(options)})); }}))"
        changes = [f"input={{image_size: 40, interpolation: {interpolation}}}", "evaluate.crop_fraction=0.875"]
        prepare = ImagePreparer(loads("", overrides=changes))
        for pixels, image in zip(frame.evaluate(script), images, strict=True):
            expected = prepare(b"a.png", EncodedImage(image))
            np.testing.assert_array_equal(np.array(pixels, dtype=np.uint8).reshape(expected.shape), expected)
