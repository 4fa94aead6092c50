"""Dataset section: counts, rejected images and sample images, which are data URIs of bounded size."""

import base64
import io
import json
import warnings
from collections.abc import Mapping

import numpy as np
from PIL import Image

from podscale.data.shard_set import Split
from podscale.report import markup
from podscale.report.charts.bars import class_bar_chart, ranked_count_chart
from podscale.report.markup import (
    Markup,
    fact_table,
    join_markup,
    note,
    panel,
    section_tag,
    table,
    table_row,
    tag,
    void_tag,
)
from podscale.report.report_data import ReportData

PICTURE_SIDE = 144
"""Longest side of an embedded image, pixels; twice the displayed size, for high-resolution screens."""
MAX_PICTURE_PIXELS = 40_000_000
MAX_PICTURE_BYTES = 24_000
MAX_SAMPLE_PICTURES = 20
FEW_CLASSES = 20


def dataset_section(data: ReportData) -> Markup | None:
    """Render counts, classes, rejects and sample images."""
    shards = data.shards
    if shards is None:
        return None
    manifest = shards.manifest
    rows = [
        table_row(
            name,
            markup.format_integer(split.count),
            markup.format_size(split.bytes),
            markup.format_integer(len(split.shards)),
        )
        for name, split in manifest.splits.items()
    ]
    facts = {
        "source": manifest.options.get("source", ""),
        "classes": markup.format_integer(len(shards.classes)),
        "rejected": _format_counts(manifest.rejects),
        "duplicates": _format_counts(manifest.duplicates),
        "fingerprint": tag("code", manifest.data_fingerprint),
    }
    head = table_row("split", "images", "size", "shards", cell="th")
    summary = panel("Shard set", table(head, rows), fact_table(facts))
    return section_tag(
        "Data",
        tag("div", summary, _class_histogram(data), class_="grid2"),
        _sample_pictures(data),
        _rejects_table(data),
    )


def picture_tag(split: Split, sample: int, alt: str) -> Markup:
    """Return a sample of the split as an <img>, or a box with a note if it cannot be decoded."""
    try:
        return image_tag(split.read(sample).tobytes(), alt)
    except (OSError, ValueError) as error:
        return _note_tag(error)


def image_tag(encoded: bytes, alt: str) -> Markup:
    """Return a thumbnail of an encoded image as an <img>, or a box with a note if it cannot be decoded."""
    try:
        mime, content, small = thumbnail(encoded)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        return _note_tag(error)
    source = f"data:{mime};base64,{base64.b64encode(content).decode('ascii')}"
    return void_tag("img", src=source, alt=alt, class_="pixels" if small else None)


def _note_tag(error: Exception) -> Markup:
    return tag("span", f"cannot be shown: {error}", class_="noimage")


def thumbnail(encoded: bytes) -> tuple[str, bytes, bool]:
    """Return the thumbnail of an encoded image: MIME type, at most MAX_PICTURE_BYTES bytes, and True for a small image.

    The pixels of a small image are shown unsmoothed.
    """
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
    """Return samples of at most `limit` different classes, spread over the class map; deterministic.

    Of fewer classes it returns several samples each, `limit` or a few more in all.
    """
    labels = np.asarray(split.labels)
    present = np.unique(labels)
    chosen = present[np.linspace(0, len(present) - 1, min(limit, len(present))).round().astype(np.int64)]
    order = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[order], chosen)
    rounds = -(-limit // len(chosen)) if len(chosen) < limit and classes <= limit else 1
    available = np.bincount(labels, minlength=classes)
    return [
        int(order[start + turn])
        for start, label in zip(starts, chosen, strict=True)
        for turn in range(min(rounds, int(available[label])))
    ]


def _class_histogram(data: ReportData) -> Markup:
    assert data.shards is not None
    splits = data.shards.manifest.splits
    if len(data.shards.classes) <= FEW_CLASSES:
        return class_bar_chart(
            "Images per class", data.shards.classes, [(name, split.class_counts) for name, split in splits.items()]
        )
    first = next(iter(splits))
    return ranked_count_chart("Images per class", splits[first].class_counts, f"split {first}")


def _sample_pictures(data: ReportData) -> Markup | None:
    assert data.shards is not None
    name = next(iter(data.shards.manifest.splits))
    split = data.shards.split(name)
    if not len(split):
        return None
    cards = []
    for sample in one_per_class(split, len(data.shards.classes), MAX_SAMPLE_PICTURES):
        label = data.shards.classes[int(split.labels[sample])]
        caption = tag("figcaption", tag("span", label, class_="label"))
        cards.append(tag("figure", picture_tag(split, sample, label), caption, class_="card"))
    return join_markup(tag("h3", f"Sample images of the split {name}"), tag("div", cards, class_="cards small"))


def _rejects_table(data: ReportData) -> Markup | None:
    assert data.shards is not None
    total = sum(data.shards.manifest.rejects.values())
    if not total or not data.rejects:
        return None
    columns = list(dict.fromkeys(key for entry in data.rejects for key in entry))
    head = tag("tr", (tag("th", column) for column in columns))
    values = ([entry.get(column, "") for column in columns] for entry in data.rejects)
    rows = [tag("tr", (tag("td", v if isinstance(v, str) else json.dumps(v)) for v in row)) for row in values]
    more = note(f"The first {len(data.rejects)} of {markup.format_integer(total)}; all are in rejects.jsonl.")
    scrolling = tag("div", table(head, rows), class_="scroll")
    return join_markup(tag("h3", "Rejected images"), scrolling, more if total > len(data.rejects) else None)


def _format_counts(counts: Mapping[str, int]) -> str:
    used = [f"{markup.format_integer(value)} {name.replace('_', ' ')}" for name, value in counts.items() if value]
    return ", ".join(used) or "none"


def _encode_image(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()
