"""A page of `podscale export --format html` in a real browser, inside a sandboxed frame."""

import base64
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from podscale.export.web_runtime import is_cached
from tests.support.browser import Browser, browser, browser_or_skip

BATCH = 20
"""Images that are sent to the page at once."""
ENCODE = "pixels => { let s = ''; for (const v of pixels) s += String.fromCharCode(v); return btoa(s); }"


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

    def classify(self, images: Sequence[bytes]) -> tuple[npt.NDArray[Any], list[npt.NDArray[np.uint8]]]:
        """Return the probabilities of encoded images, [n, classes], and their prepared pixels."""
        found = self._of_each(images, "classify(blob).then(r => [r.probabilities, encode(r.pixels)])")
        return np.array([probabilities for probabilities, _ in found]), [_pixels(text) for _, text in found]

    def prepare(self, images: Sequence[bytes], options: dict[str, Any]) -> list[npt.NDArray[np.uint8]]:
        """Return the pixels of encoded images, prepared by other options than those of the page."""
        options = {"upright": False, "resize_short": None, "pass_order": None, **options}
        script = "decode(blob, options.upright).then(d => encode(prepare(d.pixels, d.width, d.height, options)))"
        return [_pixels(text) for text in self._of_each(images, script, json.dumps(options))]

    def requests(self) -> list[str]:
        """Return the addresses that the page asked for outside of itself."""
        return [address for address in self._tab.requests() if not address.startswith(("file:", "blob:"))]

    def _of_each(self, images: Sequence[bytes], script: str, options: str = "null") -> list[Any]:
        """Return the values of an expression of `blob`, `encode` and `options`."""
        found: list[Any] = []
        for begin in range(0, len(images), BATCH):
            texts = json.dumps([base64.b64encode(image).decode() for image in images[begin : begin + BATCH]])
            blobs = f"{texts}.map(text => new Blob([Uint8Array.from(atob(text), c => c.charCodeAt(0))]))"
            of_all = f"Promise.all({blobs}.map(blob => {script}))"
            found += self.evaluate(
                f"(async () => {{ const encode = {ENCODE}, options = {options}; return {of_all}; }})()"
            )
        return found


def _pixels(text: str) -> npt.NDArray[np.uint8]:
    """Return the square of RGB pixels in a text of base64."""
    pixels = np.frombuffer(base64.b64decode(text), dtype=np.uint8)
    side = round((len(pixels) / 3) ** 0.5)
    return pixels.reshape(side, side, 3)


def page_browser_or_skip() -> str:
    """Return the path of Chromium; skips if it or onnxruntime-web is missing."""
    program = browser_or_skip()
    if not is_cached():
        pytest.skip("onnxruntime-web is not in the cache; `podscale export --format html` fetches it with npm")
    return program


def viewer(html: str) -> str:
    """Return a page that shows `html` as HTMLViewer.tsx of KFP's interface does."""
    frame = '<iframe src="about:blank" sandbox="allow-scripts"></iframe>'
    text = json.dumps(html).replace("<", "\\u003c")
    return f"<!doctype html>{frame}<script>document.querySelector('iframe').srcdoc = {text}</script>"


@contextmanager
def demo_frame(program: str, page: Path, folder: Path) -> Iterator[Frame]:
    """Open a page in a sandboxed frame of a page in `folder`, and wait for its model."""
    outer = folder / "frame.html"
    outer.write_text(viewer(page.read_text()))
    with browser(program) as tab:
        tab.open(outer)
        frame = Frame(tab)
        assert frame.evaluate("window.origin") == "null"
        assert frame.evaluate("opened.then(() => 'ready', error => error.message)") == "ready"
        yield frame
