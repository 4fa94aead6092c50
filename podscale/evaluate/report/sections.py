"""The sections of the report, one function each; a section without material is None and left out."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from podscale.evaluate.evaluation import Claim, ClassFigures, Compared, compare_claim
from podscale.evaluate.history import number
from podscale.evaluate.report import charts, figures
from podscale.evaluate.report.charts import Series
from podscale.evaluate.report.charts.scale import rounded_out
from podscale.evaluate.report.gather import STAGES, ReportData, ended
from podscale.evaluate.report.pictures import one_per_class, picture
from podscale.evaluate.report.svg import Markup, tag, text
from podscale.evaluate.scores import most_confident_mistakes
from podscale.text import printable

SAMPLE_PICTURES = 20
MISTAKES = 18
FEW_CLASSES = 20
LISTED_PAIRS = 15
ENVIRONMENT_ROWS = 60


def headline(data: ReportData) -> Markup:
    """What was run, how it ended, and the figures people ask for first."""
    config, scores = data.config, data.evaluation
    failure = data.failure
    if failure is not None:
        state = tag("span", f"{failure.stage} {ended(failure)}", class_="state bad")
    elif all(stage in data.outcomes for stage in STAGES):
        state = tag("span", "done", class_="state good")
    else:
        state = tag("span", "not finished", class_="state open")
    subtitle = ""
    if config is not None:
        subtitle = (
            f"{config.model.name} on {config.data.source}, {config.train.epochs:g} epochs in batches of "
            f"{config.train.global_batch} with {config.train.optimizer.name.upper()} in {config.train.precision}"
        )
    low, high = scores.figures.top1_interval if scores else (0.0, 0.0)
    rate = data.history.images_per_second(config.train.global_batch) if config else None
    seconds = data.history.seconds if data.history.steps else None
    tiles = [
        _tile("top-1", figures.percent(scores.figures.top1 if scores else None, 2),
              f"95 % interval {100 * low:.1f} to {100 * high:.1f}" if scores else "not evaluated"),
        _tile(f"top-{scores.figures.top5_k}" if scores else "top-5",
              figures.percent(scores.figures.top5 if scores else None, 2),
              f"of {figures.count(scores.figures.samples)} held-out images" if scores else "not evaluated"),
        _tile("images/s", figures.rate(rate), "training, all ranks" if rate else "nothing was logged"),
        _tile("training", figures.duration(seconds), _launches(data) if seconds is not None else "nothing was logged"),
    ]  # fmt: skip
    return tag(
        "header",
        tag("p", "Podscale run", class_="kicker"),
        tag("h1", data.name, " ", state),
        tag("p", subtitle, class_="subtitle") if subtitle else None,
        tag("div", tiles, class_="tiles"),
    )


def problems(data: ReportData) -> Markup | None:
    """The error of a failed stage, and what the report cannot show."""
    parts: list[Markup] = []
    if failure := data.failure:
        parts.append(tag("p", tag("b", f"Stage {failure.stage} {ended(failure)}.")))
        parts.append(tag("pre", failure.error or "No message was recorded."))
    if data.missing:
        rows = [tag("li", tag("b", entry.what), ": ", entry.why) for entry in data.missing]
        parts.append(tag("details", tag("summary", f"{len(rows)} parts are missing from this report"), tag("ul", rows)))
    if data.history.damaged:
        parts.append(tag("p", f"Unreadable lines in metrics.jsonl: {data.history.damaged}."))
    return tag("section", parts, class_="notice bad" if data.failure else "notice") if parts else None


def claim(data: ReportData) -> Markup | None:
    """The published figures beside the achieved ones."""
    compared = _claim(data)
    if compared is None or not any(
        c.claimed is not None for c in (compared.top1, compared.minutes, compared.images_per_second)
    ):
        return None  # fmt: skip
    rows = [
        _compared("top-1", compared.top1, lambda v: figures.percent(v, 2), _points),
        _compared("training time", compared.minutes, lambda v: figures.duration(v * 60), _times),
        _compared("images/s", compared.images_per_second, figures.rate, _times),
    ]
    where = ", ".join(part for part in (compared.hardware, compared.source) if part)
    note = tag("p", "Claimed on ", where, ".", class_="note") if where else None
    head = tag("tr", tag("th"), *(tag("th", name, class_="n") for name in ("claimed", "achieved", "difference")))
    return _section("Claim and result", tag("table", tag("thead", head), tag("tbody", rows)), note)


def curves(data: ReportData) -> Markup | None:
    """Loss, accuracy, learning rate and throughput over the run."""
    history, panels = data.history, []
    unit = (
        "epoch"
        if all(number(line.get("epoch")) is not None for line in (*history.steps, *history.evaluations))
        else "step"
    )
    end = max((number(line.get(unit)) or 0.0 for line in (*history.steps, *history.evaluations)), default=0.0)
    train_loss = _points_of(history.steps, unit, "loss")
    held_loss = _points_of(history.evaluations, unit, "loss")
    if train_loss or held_loss:
        lines = [Series("training", train_loss, 1), Series("validation", held_loss, 2, dots=True)]
        panels.append(charts.line_chart("Loss", lines, y_unit="nats", x_unit=unit, x_high=end, log=True))
    accuracy = [
        Series(name, _points_of(history.evaluations, unit, key), colour, dots=True)
        for name, key, colour in (("top-1", "top1", 1), ("top-5", "top5", 3))
    ]
    if any(series.points for series in accuracy):
        goal = data.config.claim.top1 if data.config else None
        panels.append(
            charts.line_chart("Validation accuracy", accuracy, x_unit=unit, show=lambda v: f"{100 * v:.4g}\u202f%",
                              x_high=end, mark=goal, mark_name="claimed")
        )  # fmt: skip
    for title, key, y_unit, colour in (
        ("Learning rate", "learning_rate", "", 4),
        ("Throughput", "images_per_second", "images/s", 3),
    ):
        points = _points_of(history.steps, unit, key)
        if points:
            span = rounded_out(0.0, max(value for _, value in points) or 1.0)  # rates compare from zero
            panels.append(
                charts.line_chart(
                    title, [Series(title, points, colour)], y_unit=y_unit, x_unit=unit, x_high=end, y_range=span
                )
            )
    return _section("Training", tag("div", panels, class_="grid2")) if panels else None


def time(data: ReportData) -> Markup | None:
    """Where the time went: phases of the training, and the stages of the run."""
    phases = sorted(((n, s) for n, s in data.history.phases.items() if s > 0), key=lambda p: -p[1])
    panels = [charts.stacked_bar("Training time by phase (rank 0)", phases)] if phases else []
    if stages := [data.outcomes[name] for name in STAGES if name in data.outcomes]:
        head = tag("tr", tag("th", "stage"), tag("th", "end"), tag("th", "time", class_="n"))
        rows = [
            tag(
                "tr",
                tag("td", outcome.stage),
                tag("td", ended(outcome), class_="ok" if outcome.done else "failed"),
                tag("td", figures.duration(outcome.seconds), class_="n"),
            )
            for outcome in stages
        ]
        table = tag("table", tag("thead", head), tag("tbody", rows), class_="compact")
        notes = [
            f"{data.history.count(event)} {words}"
            for event, words in (
                ("resumed", "times resumed"),
                ("checkpoint", "checkpoints"),
                ("skipped_update", "updates skipped as non-finite"),
                ("bad_record", "records that could not be decoded"),
            )
            if data.history.count(event)
        ]
        note = tag("p", ", ".join(notes), class_="note") if notes else None
        panels.append(tag("figure", tag("figcaption", tag("b", "Stages")), table, note, class_="panel"))
    return _section("Time", tag("div", panels, class_="grid2")) if panels else None


def dataset(data: ReportData) -> Markup | None:
    """What the model learned from: counts, classes, rejects and pictures."""
    shards = data.shards
    if shards is None:
        return None
    manifest = shards.manifest
    head = tag("tr", tag("th", "split"), *(tag("th", n, class_="n") for n in ("images", "size", "shards")))
    rows = [
        tag("tr", tag("td", name), tag("td", figures.count(split.count), class_="n"),
            tag("td", figures.size(split.bytes), class_="n"), tag("td", figures.count(len(split.shards)), class_="n"))
        for name, split in manifest.splits.items()
    ]  # fmt: skip
    facts = {
        "source": manifest.options.get("source", ""),
        "classes": figures.count(len(shards.classes)),
        "rejected": _tally(manifest.rejects),
        "duplicates": _tally(manifest.duplicates),
        "fingerprint": tag("code", manifest.data_fingerprint),
    }
    summary = tag(
        "figure",
        tag("figcaption", tag("b", "Shard set")),
        tag("table", tag("thead", head), tag("tbody", rows), class_="compact"),
        _facts(facts),
        class_="panel",
    )
    return _section("Data", tag("div", summary, _histogram(data), class_="grid2"), _samples(data), _rejects(data))


def confusion(data: ReportData) -> Markup | None:
    """Which classes are taken for which, and how well each is recognised."""
    scores = data.evaluation
    if scores is None:
        return None
    names = [entry.name for entry in scores.per_class]
    if scores.confusion_matrix is not None:
        panels = [
            charts.heatmap("Confusion matrix", names, scores.confusion_matrix),
            _class_table("Classes, worst first", _by_accuracy(scores.per_class)),
        ]
    else:
        ranked = _by_accuracy(scores.per_class)
        panels = [_class_table("Worst classes", ranked[:12]), _class_table("Best classes", ranked[::-1][:12])]
    pairs = [
        _row(
            names[p.label],
            names[p.predicted],
            str(p.count),
            figures.percent(p.count / scores.per_class[p.label].samples),
        )
        for p in scores.confused[:LISTED_PAIRS]
    ]
    if pairs and scores.confusion_matrix is None:
        head = tag("tr", tag("th", "true class"), tag("th", "taken for"), tag("th", "times", class_="n"),
                   tag("th", "of the class", class_="n"))  # fmt: skip
        table = tag("table", tag("thead", head), tag("tbody", pairs), class_="compact")
        panels.insert(0, tag("figure", tag("figcaption", tag("b", "Most confused pairs")), table, class_="panel"))
    return _section("Classes", tag("div", panels, class_="grid2"))


def calibration(data: ReportData) -> Markup | None:
    """Whether confidence can be trusted."""
    scores = data.evaluation
    if scores is None:
        return None
    facts = {
        "expected calibration error": figures.percent(scores.figures.ece, 2),
        "mean loss": f"{figures.decimal(scores.figures.loss, 4)} nats",
        "balanced accuracy": figures.percent(scores.figures.balanced_accuracy, 2),
        "images": figures.count(scores.figures.samples),
        "evaluation speed": f"{figures.rate(scores.throughput.evaluation_images_per_second)} images/s",
    }
    note = tag(
        "p",
        f"{len(scores.calibration.count)} bins of equal width over the confidence of the predicted class, open below "
        f"and closed above. Source: {scores.calibration.source}.",
        class_="note",
    )
    side = tag("figure", tag("figcaption", tag("b", "Scores")), _facts(facts), note, class_="panel")
    diagram = charts.reliability_diagram("Reliability", scores.calibration)
    return _section("Calibration", tag("div", diagram, side, class_="grid2"))


def mistakes(data: ReportData) -> Markup | None:
    """The pictures the model was surest about, and wrong."""
    if data.predictions is None or data.shards is None or data.evaluation is None:
        return None
    split = data.shards.split(data.evaluation.identity.split)
    rows = most_confident_mistakes(data.predictions, MISTAKES)
    if not len(rows):
        return _section("Most confident mistakes", tag("p", "There is none: every held-out image was recognised."))
    order = np.argsort(split.keys)
    cards = []
    for row in rows:
        key = data.predictions.keys[row]
        place = int(np.searchsorted(split.keys, key, sorter=order))
        known = place < len(order) and split.keys[order[place]] == key
        sample = int(order[place]) if known else None
        true, taken = (data.classes[int(i)] for i in (data.predictions.labels[row], data.predictions.topk[row, 0]))
        source = printable(split.source(sample)) if sample is not None else "not in the shard set"
        cards.append(
            tag(
                "figure",
                picture(split, sample, f"{true}, taken for {taken}")
                if sample is not None
                else tag("span", class_="noimage"),
                tag(
                    "figcaption",
                    tag("b", taken, class_="wrongname"),
                    tag("span", figures.percent(float(data.predictions.confidences[row, 0])), class_="n"),
                    tag("span", "is ", tag("b", true), class_="true"),
                    tag("span", source, class_="path", title=source),
                    tag("code", f"{int(key):016x}"),
                ),
                class_="card",
            )
        )
    note = tag(
        "p", "Predicted class and confidence, then the true class, the source and the sample key.", class_="note"
    )
    return _section("Most confident mistakes", note, tag("div", cards, class_="cards"))


def environment(data: ReportData) -> Markup | None:
    """Versions and devices of the newest launch."""
    rows = list(flatten(data.environment))[:ENVIRONMENT_ROWS]
    if not rows:
        return None
    return _section("Environment", _facts(dict(rows)))


def reproduce(data: ReportData) -> Markup | None:
    """The document and the command that give this run again."""
    if not data.config_text:
        return None
    command = data.environment.get("command") or data.environment.get("argv")
    given = " ".join(str(part) for part in command) if isinstance(command, list) else command
    parts = [
        tag("p", "Save the document below as ", tag("code", "run.yaml"), " and start"),
        tag("pre", "podscale run run.yaml"),
        tag("p", "It was started by ", tag("code", given), class_="note") if given else None,
    ]
    if data.evaluation is not None:
        identity = data.evaluation.identity
        parts.append(
            _facts(
                {
                    "document": tag("code", identity.document),
                    "data": tag("code", identity.data_fingerprint),
                    "model sha256": tag("code", identity.model_sha256) if identity.model_sha256 else None,
                }
            )
        )
    document = tag("details", tag("summary", "The resolved run document"), tag("pre", data.config_text))
    return _section("How to reproduce", *parts, document)


def flatten(value: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    """Nested JSON as (dotted name, text) rows."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and all(isinstance(part, str | int | float) for part in value):
        yield prefix, " ".join(str(part) for part in value)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from flatten(inner, f"{prefix}.{i}")
    else:
        yield prefix, value if isinstance(value, str) else json.dumps(value)


def _section(title: str, *children: Any) -> Markup:
    return tag("section", tag("h2", title), children, id=title.lower().replace(" ", "-"))


def _tile(name: str, value: str, note: str) -> Markup:
    parts = (("name", name), ("value", value), ("sub", note))
    return tag("div", [tag("span", part, class_=style) for style, part in parts], class_="tile")


def _row(true: str, taken: str, *numbers: str) -> Markup:
    return tag("tr", tag("td", true), tag("td", taken), [tag("td", figure, class_="n") for figure in numbers])


def _launches(data: ReportData) -> str:
    resumed = data.history.count("resumed")
    return "in one go" if not resumed else f"resumed {resumed} time{'s' if resumed > 1 else ''}"


def _claim(data: ReportData) -> Claim | None:
    if data.evaluation is not None:
        return data.evaluation.claim
    if data.config is None:
        return None
    trained = data.outcomes.get("train")
    seconds = data.history.seconds if trained is not None and trained.done else None  # half a training is no time
    return compare_claim(data.config, None, seconds, data.history.images_per_second(data.config.train.global_batch))


def _compared(name: str, pair: Compared, show: Any, difference: Any) -> Markup | None:
    if pair.claimed is None:
        return None
    both = pair.achieved is not None
    cells = (show(pair.claimed), show(pair.achieved) if both else figures.ABSENT,
             difference(pair.claimed, pair.achieved) if both else figures.ABSENT)  # fmt: skip
    return tag("tr", tag("td", name), *(tag("td", cell, class_="n") for cell in cells))


def _points(claimed: float, achieved: float) -> str:
    return f"{100 * (achieved - claimed):+.2f} points".replace("-", "\u2212")


def _times(claimed: float, achieved: float) -> str:
    return f"\u00d7 {achieved / claimed:.3g}"


def _points_of(lines: list[dict[str, Any]], x: str, y: str) -> list[tuple[float, float]]:
    pairs = ((number(line.get(x)), number(line.get(y))) for line in lines)
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def _facts(rows: Mapping[str, Any]) -> Markup:
    cells = [tag("tr", tag("th", name), tag("td", value)) for name, value in rows.items() if value not in (None, "")]
    return tag("table", tag("tbody", cells), class_="facts")


def _tally(counts: Mapping[str, int]) -> str:
    used = [f"{figures.count(value)} {name.replace('_', ' ')}" for name, value in counts.items() if value]
    return ", ".join(used) or "none"


def _histogram(data: ReportData) -> Markup:
    assert data.shards is not None
    splits = data.shards.manifest.splits
    if len(data.shards.classes) <= FEW_CLASSES:
        return charts.class_bars(
            "Images per class", data.shards.classes, [(name, split.class_counts) for name, split in splits.items()]
        )
    first = next(iter(splits))
    return charts.ranked_counts("Images per class", splits[first].class_counts, f"split {first}")


def _samples(data: ReportData) -> Markup | None:
    assert data.shards is not None
    name = next(iter(data.shards.manifest.splits))
    split = data.shards.split(name)
    if not len(split):
        return None
    cards = []
    for sample in one_per_class(split, len(data.shards.classes), SAMPLE_PICTURES):
        label = data.shards.classes[int(split.labels[sample])]
        caption = tag("figcaption", tag("span", label, class_="label"))
        cards.append(tag("figure", picture(split, sample, label), caption, class_="card"))
    return text(tag("h3", f"Pictures of the split {name}"), tag("div", cards, class_="cards small"))


def _rejects(data: ReportData) -> Markup | None:
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
        "p", f"The first {len(data.rejects)} of {figures.count(total)}; all are in rejects.jsonl.", class_="note"
    )
    table = tag("div", tag("table", tag("thead", head), tag("tbody", rows), class_="compact"), class_="scroll")
    return text(tag("h3", "Rejected images"), table, more if total > len(data.rejects) else None)


def _by_accuracy(classes: list[ClassFigures]) -> list[ClassFigures]:
    """Classes with samples, worst first, ties by name order of the class map."""
    return sorted((entry for entry in classes if entry.accuracy is not None), key=lambda entry: entry.accuracy or 0.0)


def _class_table(title: str, entries: list[ClassFigures]) -> Markup:
    head = tag(
        "tr",
        tag("th", "class"),
        tag("th", "accuracy", class_="n", colspan=2),
        tag("th", "precision", class_="n"),
        tag("th", "images", class_="n"),
    )
    rows = [
        tag(
            "tr",
            tag("td", entry.name, class_="clip", title=entry.name),
            tag("td", tag("span", tag("i", style=f"width:{100 * (entry.accuracy or 0):.1f}%"), class_="meter")),
            tag("td", figures.percent(entry.accuracy), class_="n"),
            tag("td", figures.percent(entry.precision), class_="n"),
            tag("td", figures.count(entry.samples), class_="n"),
        )
        for entry in entries
    ]
    table = tag("table", tag("thead", head), tag("tbody", rows), class_="compact")
    return tag("figure", tag("figcaption", tag("b", title)), table, class_="panel")
