"""demo.html: a page that classifies pictures in the browser, with the model and its runtime inside.

The page is one file. It needs no network and runs in a sandboxed frame, because everything is in it: the ONNX file, the
runtime as WebAssembly, and some prepared validation images.
"""

import base64
import gzip
import io
import json
from importlib.resources import files
from typing import Any

import PIL
from PIL import Image

from podscale.data.native import ORDERS
from podscale.errors import InputError
from podscale.export.image_sample import ImageSample
from podscale.export.web_runtime import WebRuntime
from podscale.prediction.exported_file import ExportMetadata
from podscale.report.markup import Markup, join_markup, tag, void_tag
from podscale.util.formatting import printable
from podscale.version import VERSION

LARGEST_PAGE = 30_000_000
"""Largest page, bytes: browsers and KFP's viewer load it whole."""
SAMPLES = 24
"""Pictures to pick from."""
SAMPLE_BYTES = 3_000_000
"""Limit of all pictures to pick from, bytes."""
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'wasm-unsafe-eval' blob:; style-src 'unsafe-inline'; "
    "img-src data: blob:"
)
"""Lets the page run its own scripts, and load nothing from elsewhere."""


def build_demo_page(model: bytes, metadata: ExportMetadata, sample: ImageSample, runtime: WebRuntime) -> bytes:
    """Return the page. Raises InputError if it is larger than LARGEST_PAGE.

    Args:
        model: ONNX file with preprocessing.
        sample: validation images; a few of them, evenly spaced, are on the page.
    """
    name, run = metadata.description["architecture"]["name"], metadata.description["run"]
    head = tag(
        "head",
        void_tag("meta", charset="utf-8"),
        void_tag("meta", http_equiv="Content-Security-Policy", content=CONTENT_SECURITY_POLICY),
        void_tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{run}: Podscale demo"),
        tag("style", Markup(_asset("demo.css"))),
    )
    body = [
        tag("h1", f"{run}: {name} of {len(metadata.description['classes'])} classes"),
        tag(
            "p",
            "Pictures stay in this page: the model runs in your browser.",
            " ",
            tag("span", id="status", role="status"),
        ),
        tag(
            "label",
            "Drop pictures here, paste one, or choose files.",
            void_tag("input", type="file", accept="image/*", multiple="multiple"),
            id="drop",
        ),
        tag("div", id="samples"),
        tag("ul", id="results", aria_live="polite"),
        tag("footer", f"Podscale {VERSION}; {runtime.package} (MIT License, Microsoft Corporation)."),
        _data("description", "application/json", _json(_description(metadata, sample))),
        *(
            _data(key, "application/octet-stream", base64.b64encode(gzip.compress(content, 9, mtime=0)).decode())
            for key, content in (("runtime", runtime.module), ("wasm", runtime.program), ("model", model))
        ),
        *(tag("script", Markup(_asset(name))) for name in ("resize.js", "stored_pixels.js", "demo.js")),
    ]
    page = join_markup(Markup("<!doctype html>\n"), tag("html", head, tag("body", body), lang="en")).encode()
    if len(page) > LARGEST_PAGE:
        raise InputError(
            f"the page would have {len(page) / 1e6:.1f} MB, more than {LARGEST_PAGE / 1e6:.0f} MB",
            field="--format html",
            got=name,
            hint="Add --int8 if it is not there, or train a smaller model.",
        )
    return page


def _asset(name: str) -> str:
    return (files("podscale.export") / "web" / name).read_text(encoding="utf-8")


def _data(key: str, kind: str, content: str) -> Markup:
    """Return a script element that holds data; a browser does not run it."""
    return tag("script", Markup(content), id=key, type=kind)


def _json(value: Any) -> str:
    """Return JSON that cannot end a script element."""
    return json.dumps(value).replace("<", "\\u003c")


def _description(metadata: ExportMetadata, sample: ImageSample) -> dict[str, Any]:
    classes = [printable(name) for name in metadata.description["classes"]]
    return {
        "classes": classes,
        "preprocessing": {**metadata.description["preprocessing"], **_preparation(metadata)},
        "samples": _samples(classes, sample),
    }


def _preparation(metadata: ExportMetadata) -> dict[str, Any]:
    """Return what else the pixels depend on: conversion and shrinking of the run's images, and Pillow's pass order."""
    rules = metadata.description["inference"]["data"]
    return {
        "upright": rules["policy"] == "convert",
        "resize_short": rules["resize_short"],
        "pass_order": ORDERS[0 if int(PIL.__version__.partition(".")[0]) >= 13 else 1],
    }


def _samples(classes: list[str], sample: ImageSample) -> list[dict[str, str]]:
    """Return prepared images as PNG, evenly spaced over the sample, with their true classes."""
    samples: list[dict[str, str]] = []
    total, count = 0, min(SAMPLES, len(sample))
    for number in range(count):
        row, out = number * len(sample) // count, io.BytesIO()
        Image.fromarray(sample.images[row]).save(out, "PNG")
        total += len(out.getvalue())
        if total > SAMPLE_BYTES:
            break
        label = {} if sample.labels is None else {"label": classes[sample.labels[row]]}
        samples.append({"png": base64.b64encode(out.getvalue()).decode(), **label})
    return samples
