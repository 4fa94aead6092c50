"""Pictures from the shard set as data URIs of bounded size."""

import base64
import io
import warnings

import numpy as np
from PIL import Image

from podscale.data.shard_set import Split
from podscale.evaluate.report.svg import Markup, tag, void_tag

PICTURE_SIDE = 144
"""Longest side of an embedded picture in pixels: twice what is shown, for sharp screens."""
MAX_PICTURE_PIXELS = 40_000_000
MAX_PICTURE_BYTES = 24_000


def picture_tag(split: Split, sample: int, alt: str) -> Markup:
    """Sample `sample` of `split` as an <img>; a plain box saying so where it cannot be decoded."""
    try:
        mime, content, small = thumbnail(split.read(sample).tobytes())
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        return tag("span", f"cannot be shown: {error}", class_="noimage")
    source = f"data:{mime};base64,{base64.b64encode(content).decode('ascii')}"
    return void_tag("img", src=source, alt=alt, class_="pixels" if small else None)


def thumbnail(encoded: bytes) -> tuple[str, bytes, bool]:
    """(MIME type, bytes of at most MAX_BYTES, whether it is so small that its pixels should show)."""
    with warnings.catch_warnings(), Image.open(io.BytesIO(encoded)) as opened:
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        if opened.width * opened.height > MAX_PICTURE_PIXELS:
            raise ValueError(f"{opened.width} x {opened.height} pixels are too many")
        opened.draft("RGB", (PICTURE_SIDE, PICTURE_SIDE))
        image = opened.convert("RGB")
    small = max(image.size) <= 48
    image.thumbnail((PICTURE_SIDE, PICTURE_SIDE), Image.Resampling.LANCZOS)
    if small:
        content = _encode_image(image, "png")
        if len(content) <= MAX_PICTURE_BYTES:
            return "image/png", content, True
    for quality in (82, 60, 30):
        content = _encode_image(image, "jpeg", quality=quality, optimize=True)
        if len(content) <= MAX_PICTURE_BYTES:
            break
    return "image/jpeg", content, small


def one_per_class(split: Split, classes: int, limit: int) -> list[int]:
    """At most `limit` samples of as many classes as possible, spread over the class map; always the same ones."""
    labels = np.asarray(split.labels)
    present = np.unique(labels)
    chosen = present[np.linspace(0, len(present) - 1, min(limit, len(present))).round().astype(np.int64)]
    order = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[order], chosen)
    rounds = -(-limit // len(chosen)) if len(chosen) < limit and classes <= limit else 1
    available = np.bincount(labels, minlength=classes)
    picked = [
        int(order[start + turn])
        for start, label in zip(starts, chosen, strict=True)
        for turn in range(min(rounds, int(available[label])))
    ]
    return picked[: limit if rounds == 1 else rounds * len(chosen)]


def _encode_image(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()
