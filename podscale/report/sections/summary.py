"""Summary sections: headline, problems, claim, environment, and the command that reproduces the run."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from podscale.config.batch_phases import format_batches
from podscale.evaluation.evaluation_json import Claim, ClaimCheck, compare_claim
from podscale.report import markup
from podscale.report.demo_page_link import demo_section
from podscale.report.markup import Markup, fact_table, headline_tile, note, section_tag, table, table_row, tag
from podscale.report.report_data import STAGES, ReportData, describe_exit
from podscale.util.formatting import format_count


def headline(data: ReportData) -> Markup:
    config, scores = data.config, data.evaluation.scores if data.evaluation else None
    failure = data.failed_stage
    if failure is not None:
        state = tag("span", f"{failure.stage} {describe_exit(failure)}", class_="state bad")
    elif all(stage in data.outcomes for stage in STAGES):
        state = tag("span", "done", class_="state good")
    else:
        state = tag("span", "not finished", class_="state open")
    subtitle = ""
    if config is not None:
        subtitle = (
            f"{config.model.name} on {config.data.source}, {config.train.epochs:g} epochs in batches of "
            f"{format_batches(config.train)} with {config.train.optimizer.name.upper()} in {config.train.precision}"
        )
    low, high = scores.top1_interval if scores else (0.0, 0.0)
    rate = data.history.images_per_second() if config else None
    seconds = data.history.seconds if data.history.steps else None
    tiles = [
        headline_tile(
            "top-1",
            markup.format_percent(scores.top1 if scores else None, 2),
            f"95 % interval {100 * low:.1f} to {100 * high:.1f}" if scores else "not evaluated",
        ),
        headline_tile(
            f"top-{scores.top5_k}" if scores else "top-5",
            markup.format_percent(scores.top5 if scores else None, 2),
            f"of {markup.format_integer(scores.samples)} held-out images" if scores else "not evaluated",
        ),
        headline_tile("images/s", markup.format_rate(rate), "training, all ranks" if rate else "not logged"),
        headline_tile(
            "training", markup.format_seconds(seconds), _launches(data) if seconds is not None else "not logged"
        ),
    ]
    return tag(
        "header",
        tag("p", "Podscale run", class_="kicker"),
        tag("h1", data.name, " ", state),
        tag("p", subtitle, class_="subtitle") if subtitle else None,
        tag("div", tiles, class_="tiles"),
    )


def problems(data: ReportData) -> Markup | None:
    """Render the error of a failed stage and the missing parts."""
    parts: list[Markup] = []
    if failure := data.failed_stage:
        parts.append(tag("p", tag("b", f"Stage {failure.stage} {describe_exit(failure)}.")))
        parts.append(tag("pre", failure.error or "No message was recorded."))
    if data.missing:
        rows = [tag("li", tag("b", entry.part), ": ", entry.reason) for entry in data.missing]
        parts.append(
            tag(
                "details",
                tag("summary", f"{format_count(len(rows), 'part')} missing from this report"),
                tag("ul", rows),
            )
        )
    if data.history.damaged:
        parts.append(tag("p", f"Unreadable lines in metrics.jsonl: {data.history.damaged}."))
    return tag("section", parts, class_="notice bad" if data.failed_stage else "notice") if parts else None


def claim(data: ReportData) -> Markup | None:
    """Render the published results beside this run's."""
    compared = _claim_table(data)
    if compared is None or not any(
        c.claimed is not None for c in (compared.top1, compared.minutes, compared.images_per_second)
    ):
        return None
    rows = [
        _claim_row("top-1", compared.top1, lambda v: markup.format_percent(v, 2), _point_difference),
        _claim_row("training time", compared.minutes, lambda v: markup.format_seconds(v * 60), _ratio_text),
        _claim_row("images/s", compared.images_per_second, markup.format_rate, _ratio_text),
    ]
    where = ", ".join(part for part in (compared.hardware, compared.source) if part)
    here = f" Achieved here on {_hardware_text(data)}." if _hardware_text(data) else ""
    head = table_row("", "claimed", "achieved", "difference", cell="th")
    conditions = note(f"Claimed on {where}.{here}") if where else None
    return section_tag("Claim and result", table(head, rows, class_=None), conditions)


def demo(data: ReportData) -> Markup:
    """Render the link to the demo pages of the run, or the empty place for it."""
    return demo_section(data.run)


def _launches(data: ReportData) -> str:
    resumed = data.history.count("resumed")
    return f"resumed {format_count(resumed, 'time')}" if resumed else "without a restart"


def _claim_table(data: ReportData) -> Claim | None:
    if data.evaluation is not None:
        return data.evaluation.claim
    if data.config is None:
        return None
    trained = data.outcomes.get("train")
    seconds = (
        data.history.seconds if trained is not None and trained.is_done else None
    )  # an incomplete training has no comparable time
    return compare_claim(data.config, None, seconds, data.history.images_per_second())


def _hardware_text(data: ReportData) -> str:
    """Return number and kind of the devices, as logged by the newest launch."""
    started = data.history.newest("resumed") or data.history.newest("start") or {}
    ranks, device = started.get("ranks"), started.get("device")
    return f"{ranks} x {device}" if isinstance(ranks, int) and isinstance(device, str) else ""


def _claim_row(name: str, pair: ClaimCheck, show: Any, difference: Any) -> Markup | None:
    if pair.claimed is None:
        return None
    achieved, compared = markup.MISSING_TEXT, markup.MISSING_TEXT
    if pair.achieved is not None:
        achieved, compared = show(pair.achieved), difference(pair.claimed, pair.achieved)
    return table_row(name, show(pair.claimed), achieved, compared)


def _point_difference(claimed: float, achieved: float) -> str:
    return f"{100 * (achieved - claimed):+.2f} points".replace("-", "\u2212")


def _ratio_text(claimed: float, achieved: float) -> str:
    return f"\u00d7 {achieved / claimed:.3g}"


ENVIRONMENT_ROWS = 60


def environment(data: ReportData) -> Markup | None:
    rows = list(flatten(data.environment))[:ENVIRONMENT_ROWS]
    if not rows:
        return None
    return section_tag("Environment", fact_table(dict(rows)))


def reproduce(data: ReportData) -> Markup | None:
    """Render the document and the command that reproduce the run."""
    if not data.config_text:
        return None
    given = data.environment.get("command")
    parts = [
        tag("p", "Save the document below as ", tag("code", "run.yaml"), " and run"),
        tag("pre", "podscale run run.yaml"),
        tag("p", "This run was started by ", tag("code", given), class_="note") if given else None,
    ]
    if data.evaluation is not None:
        identity = data.evaluation.identity
        parts.append(
            fact_table(
                {
                    "document": tag("code", identity.document),
                    "data": tag("code", identity.data_fingerprint),
                    "model sha256": tag("code", identity.model_sha256) if identity.model_sha256 else None,
                }
            )
        )
    document = tag("details", tag("summary", "The resolved run document"), tag("pre", data.config_text))
    return section_tag("How to reproduce", *parts, document)


def flatten(value: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    """Yield nested JSON as (dotted name, text)."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and all(isinstance(part, str | int | float) for part in value):
        yield prefix, " ".join(str(part) for part in value)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from flatten(inner, f"{prefix}.{i}")
    elif value is not None:
        yield prefix, value if isinstance(value, str) else json.dumps(value)
