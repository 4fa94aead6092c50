"""Result files of a study: Markdown with SVG charts, one HTML page and a CSV table."""

import csv
import io
import json
import os
import platform
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from podscale.report.markup import section_tag, tag
from podscale.report.page import render_framed_page
from podscale.study.blocks import BulletBlock, ChartBlock, ResultBlock, TableBlock, TextBlock
from podscale.study.document import StudyDocument
from podscale.study.grid import TrialGrid
from podscale.study.protocol import ProtocolLaunch, describe_protocol, first_launch, protocol_digest, read_launches
from podscale.study.records import RecordStore
from podscale.study.result_charts import chart_blocks
from podscale.study.result_text import (
    candidate_table,
    comparison_table,
    criteria_table,
    parting_table,
    pretraining_table,
    range_table,
    summary_sentences,
    trial_table,
    verdict_text,
)
from podscale.study.results import StudyResults, study_results
from podscale.study.verdict import study_verdict
from podscale.util import env, host_info
from podscale.util.files import write_atomically
from podscale.version import VERSION, installed

VERDICT_FORMAT = 1
"""Version of <name>.verdict.json; increase it when a key changes its meaning."""


def result_blocks(results: StudyResults) -> Iterator[ResultBlock]:
    """Yield all blocks, the most important first."""
    study = results.study
    if study.question:
        yield TextBlock(study.question.strip())
    verdict = study_verdict(results) if study.criteria else None
    sentences = [*([verdict_text(verdict)] if verdict is not None else []), *summary_sentences(results)]
    if sentences:
        yield BulletBlock(sentences)
    yield from chart_blocks(results)
    if verdict is not None:
        yield criteria_table(verdict)
    if results.has_numeric_axis and len(results.lines) == 1:
        yield comparison_table(results, results.groups, f"By {results.axis_name}", by_axis=True)
    else:
        for x in results.xs:
            yield comparison_table(results, results.groups_at(x), _caption(results, x))
    if results.has_numeric_axis and len(results.lines) > 1:
        yield range_table(results)
    if verdict is not None and (parting := parting_table(results, verdict)) is not None:
        yield parting
    if results.pretraining:
        yield pretraining_table(results)
    if any(group.candidates for group in results.groups):
        yield candidate_table(results)
    if study.reading:
        yield TextBlock(study.reading.strip())
    yield trial_table(results)


def _caption(results: StudyResults, x: Any) -> str:
    """Return the caption of the comparison at a point of the horizontal axis; "" if no other table precedes it."""
    if x is not None:
        return results.axis_label(x)
    return "Results" if results.study.criteria else ""


def write_results(
    results: StudyResults, folder: Path, head: Sequence[str], launches: Sequence[ProtocolLaunch] = ()
) -> list[Path]:
    """Write <name>.md, <name>-*.svg, <name>.html, <name>.csv and, with criteria, <name>.verdict.json.

    `head` are lines below the title. Returns the paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name, blocks = results.study.name, list(result_blocks(results))
    files = {
        f"{name}.md": render_markdown(results, blocks, head),
        f"{name}.html": render_results_page(results, blocks, head),
        f"{name}.csv": render_csv(results),
        **{f"{name}-{block.name}.svg": block.svg() for block in blocks if isinstance(block, ChartBlock)},
    }
    if results.study.criteria:
        files[f"{name}.verdict.json"] = render_verdict(results, launches)
    for file, content in files.items():
        write_atomically(folder / file, content)
    return [folder / file for file in files]


def write_study_results(study: StudyDocument) -> list[Path]:
    """Write the results of the records so far into the study's workspace directory."""
    results, folder = _recorded_results(study)
    launches = read_launches(folder)
    return write_results(results, folder, _page_head(study, launches), launches)


def markdown_without_charts(study: StudyDocument) -> str:
    """Render the results of the records so far as Markdown for a place that holds no other files."""
    results, folder = _recorded_results(study)
    blocks = [block for block in result_blocks(results) if not isinstance(block, ChartBlock)]
    page = TextBlock(f"The charts are in `{folder / results.study.name}.html`.")
    return render_markdown(results, [*blocks, page], _page_head(study, read_launches(folder)))


def _page_head(study: StudyDocument, launches: Sequence[ProtocolLaunch]) -> list[str]:
    """Return the lines below the title: conditions and, with criteria, the protocol."""
    return [*measurement_conditions(), *(describe_protocol(study, launches) if study.criteria else [])]


def _recorded_results(study: StudyDocument) -> tuple[StudyResults, Path]:
    """Return the results of the records so far, and the directory of their files."""
    grid = TrialGrid(study)
    records = RecordStore(grid.workspace)
    return study_results(grid, records.get), records.study_directory(study.name)


def measurement_conditions() -> list[str]:
    """Return the lines below the title: command, machine, versions and date."""
    versions = [f"Podscale {VERSION}", f"Python {platform.python_version()}"]
    versions += [f"{name} {version}" for name in ("torch", "jax", "numpy") if (version := installed(name))]
    words = shlex.split(os.environ.get(env.COMMAND, "podscale study"))
    return [
        f"Command: `{shlex.join(_strip_paths(word) for word in words)}`",
        f"Machine: {host_info.cpu_count()} cores of {host_info.cpu_name()}",
        f"Versions: {', '.join(versions)}",
        f"Date: {time.strftime('%Y-%m-%d')}",
    ]


def _strip_paths(text: str) -> str:
    """Reduce an absolute path, also after `option=`, to its last component."""
    option, equals, value = text.rpartition("=")
    return f"{option}{equals}{Path(value).name if value.startswith(('/', '~')) else value}"


def render_markdown(results: StudyResults, blocks: Sequence[ResultBlock], head: Sequence[str]) -> str:
    lines = [f"# {results.study.title or results.study.name}", "", *(f"{line}  " for line in head), ""]
    for block in blocks:
        lines += [*block.markdown(results.study.name), ""]
    return "\n".join(lines).rstrip() + "\n"


def render_verdict(results: StudyResults, launches: Sequence[ProtocolLaunch]) -> str:
    """Render the verdict as JSON for other generators (docs/how-to/studies.md has the keys)."""
    study = results.study
    digest = protocol_digest(study)
    launch = first_launch(launches, digest)
    finished = sum(len(group.records) for group in results.groups)
    values = {
        "format": VERDICT_FORMAT,
        "study": study.name,
        "title": study.title or study.name,
        "papers": list(study.papers),
        **asdict(study_verdict(results)),
        "protocol": {"digest": digest, "launch": None if launch is None else asdict(launch)},
        "trials": {"done": len(results.records), "left": results.unfinished_trials},
        "trainings": {"done": finished, "expected": sum(group.expected for group in results.groups)},
        "page": f"{study.name}.md",
    }
    return json.dumps(values, indent=1, ensure_ascii=False) + "\n"


def render_results_page(results: StudyResults, blocks: Sequence[ResultBlock], head: Sequence[str]) -> str:
    """Render the results as a self-contained HTML page."""
    title = results.study.title or results.study.name
    charts = [block.html() for block in blocks if isinstance(block, ChartBlock)]
    before, after = list[Any](), list[Any]()
    for block in blocks:
        if not isinstance(block, ChartBlock):
            (after if after or isinstance(block, TableBlock) else before).append(block.html())
    top = tag("header", tag("p", "Podscale study", class_="kicker"), tag("h1", title))
    grid = tag("div", charts, class_="grid2") if charts else None
    conditions = [tag("p", line, class_="note") for line in head]
    return render_framed_page(
        f"{title}: Podscale study",
        [top, before, grid, after, section_tag("Conditions", conditions)],
        "Generated from the records of its trials.",
    )


def render_csv(results: StudyResults) -> str:
    """Render a CSV row per training; `members` has the top-1 of each member, if a training has an ensemble."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    options = sorted({name for record in results.records for name in record.settings})
    fields = ("ended", "top1", "loss", "training_loss", "updates", "masked", "seconds", "cpu_seconds", "code")
    members = ["members"] if any(record.members for record in results.records) else []
    writer.writerow(["cell", "seed", *options, *fields, "updates_to_target", "epochs_to_target", *members])
    target = results.study.target
    for record in results.records:
        reached = record.steps_to_target(target) if target is not None else None
        settings = [record.settings.get(name, "") for name in options]
        values = [getattr(record, name) for name in fields]
        top1s = [" ".join(map(str, record.members))] if members else []
        writer.writerow([record.cell, record.seed, *settings, *values, *(reached or ("", "")), *top1s])
    return text.getvalue()
