"""What the model learned from: counts, pictures and rejected images."""

import json
from collections.abc import Mapping

from podscale.evaluate.report import charts, figures
from podscale.evaluate.report.gather import ReportData
from podscale.evaluate.report.pictures import one_per_class, picture_tag
from podscale.evaluate.report.sections.parts import fact_table, section_tag
from podscale.evaluate.report.svg import Markup, join_markup, tag

MAX_SAMPLE_PICTURES = 20
FEW_CLASSES = 20


def dataset_section(data: ReportData) -> Markup | None:
    """What the model learned from: counts, classes, rejects and pictures."""
    shards = data.shards
    if shards is None:
        return None
    manifest = shards.manifest
    head = tag("tr", tag("th", "split"), *(tag("th", n, class_="n") for n in ("images", "size", "shards")))
    rows = [
        tag("tr", tag("td", name), tag("td", figures.format_integer(split.count), class_="n"),
            tag("td", figures.format_size(split.bytes), class_="n"), tag("td", figures.format_integer(len(split.shards)), class_="n"))
        for name, split in manifest.splits.items()
    ]  # fmt: skip
    facts = {
        "source": manifest.options.get("source", ""),
        "classes": figures.format_integer(len(shards.classes)),
        "rejected": _format_counts(manifest.rejects),
        "duplicates": _format_counts(manifest.duplicates),
        "fingerprint": tag("code", manifest.data_fingerprint),
    }
    summary = tag(
        "figure",
        tag("figcaption", tag("b", "Shard set")),
        tag("table", tag("thead", head), tag("tbody", rows), class_="compact"),
        fact_table(facts),
        class_="panel",
    )
    return section_tag(
        "Data",
        tag("div", summary, _class_histogram(data), class_="grid2"),
        _sample_pictures(data),
        _rejects_table(data),
    )


def _class_histogram(data: ReportData) -> Markup:
    assert data.shards is not None
    splits = data.shards.manifest.splits
    if len(data.shards.classes) <= FEW_CLASSES:
        return charts.class_bar_chart(
            "Images per class", data.shards.classes, [(name, split.class_counts) for name, split in splits.items()]
        )
    first = next(iter(splits))
    return charts.ranked_count_chart("Images per class", splits[first].class_counts, f"split {first}")


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
    return join_markup(tag("h3", f"Pictures of the split {name}"), tag("div", cards, class_="cards small"))


def _rejects_table(data: ReportData) -> Markup | None:
    assert data.shards is not None
    total = sum(data.shards.manifest.rejects.values())
    if not total or not data.rejects:
        return None
    columns = list(dict.fromkeys(key for entry in data.rejects for key in entry))
    head = tag("tr", (tag("th", column) for column in columns))
    rows = [
        tag(
            "tr",
            (tag("td", value if isinstance(value := entry.get(c, ""), str) else json.dumps(value)) for c in columns),
        )
        for entry in data.rejects
    ]
    more = tag(
        "p",
        f"The first {len(data.rejects)} of {figures.format_integer(total)}; all are in rejects.jsonl.",
        class_="note",
    )
    table = tag("div", tag("table", tag("thead", head), tag("tbody", rows), class_="compact"), class_="scroll")
    return join_markup(tag("h3", "Rejected images"), table, more if total > len(data.rejects) else None)


def _format_counts(counts: Mapping[str, int]) -> str:
    used = [f"{figures.format_integer(value)} {name.replace('_', ' ')}" for name, value in counts.items() if value]
    return ", ".join(used) or "none"
