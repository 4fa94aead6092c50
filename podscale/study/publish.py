"""Result files of a study: Markdown with SVG charts, one HTML page and a CSV table."""

import csv
import io
import os
import platform
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from podscale.report.charts.lines import line_chart
from podscale.report.charts.standalone import dots_chart, dots_chart_svg, line_chart_svg
from podscale.report.markup import Markup, section_tag, tag
from podscale.report.page import render_framed_page
from podscale.study.document import StudyDocument
from podscale.study.grid import TrialGrid
from podscale.study.records import RecordStore
from podscale.study.result_blocks import (
    BulletBlock,
    ChartBlock,
    DotBlock,
    ResultBlock,
    TableBlock,
    TextBlock,
    result_blocks,
)
from podscale.study.results import StudyResults, study_results
from podscale.util import env, host_info
from podscale.util.files import write_atomically
from podscale.version import VERSION, installed


def write_results(results: StudyResults, folder: Path, head: Sequence[str]) -> list[Path]:
    """Write <name>.md with <name>-*.svg, <name>.html and <name>.csv into the folder; return their paths.

    Args:
        head: lines below the title that state the measurement conditions.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name, made = results.study.name, list(result_blocks(results))
    files = {
        f"{name}.md": render_markdown(results, made, head),
        f"{name}.html": render_results_page(results, made, head),
        f"{name}.csv": render_csv(results),
        **{f"{name}-{block.name}.svg": _chart_svg(block) for block in made if isinstance(block, ChartBlock | DotBlock)},
    }
    for file, content in files.items():
        write_atomically(folder / file, content)
    return [folder / file for file in files]


def write_study_results(study: StudyDocument) -> list[Path]:
    """Write the results of a study into its workspace directory, from the records available."""
    grid = TrialGrid(study)
    records = RecordStore(grid.workspace)
    return write_results(
        study_results(grid, records.get), records.study_directory(study.name), measurement_conditions()
    )


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
    """Reduce an absolute path in a command-line word to its last component, also after `option=`."""
    option, equals, value = text.rpartition("=")
    return f"{option}{equals}{Path(value).name if value.startswith(('/', '~')) else value}"


def render_markdown(results: StudyResults, made: Sequence[ResultBlock], head: Sequence[str]) -> str:
    """Render the results as Markdown for a repository."""
    lines = [f"# {results.study.title or results.study.name}", "", *(f"{line}  " for line in head), ""]
    for block in made:
        lines += [*_block_markdown(block, results.study.name), ""]
    return "\n".join(lines).rstrip() + "\n"


def render_results_page(results: StudyResults, made: Sequence[ResultBlock], head: Sequence[str]) -> str:
    """Render the results as one self-contained HTML page."""
    title = results.study.title or results.study.name
    charts = [block for block in made if isinstance(block, ChartBlock | DotBlock)]
    drawn = tag("div", [_chart_html(chart) for chart in charts], class_="grid2") if charts else None
    before: list[Any] = []
    after: list[Any] = []
    for block in made:
        if isinstance(block, TextBlock | BulletBlock):
            (after if after else before).append(_block_html(block))
        elif isinstance(block, TableBlock):
            after.append(_block_html(block))
    top = tag("header", tag("p", "Podscale study", class_="kicker"), tag("h1", title))
    conditions = [tag("p", line, class_="note") for line in head]
    return render_framed_page(
        f"{title}: Podscale study",
        [top, before, drawn, after, section_tag("Conditions", conditions)],
        "Made from its records.",
    )


def render_csv(results: StudyResults) -> str:
    """Render one CSV row per training."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = sorted({name for record in results.records for name in record.settings})
    figures = ("ended", "top1", "loss", "training_loss", "updates", "masked", "seconds", "cpu_seconds", "code")
    writer.writerow(["cell", "seed", *names, *figures, "updates_to_target", "epochs_to_target"])
    for record in results.records:
        target = results.study.target
        reached = record.steps_to_target(target) if target is not None else None
        settings = [record.settings.get(name, "") for name in names]
        values = [getattr(record, name) for name in figures]
        writer.writerow([record.cell, record.seed, *settings, *values, *(reached or ("", ""))])
    return text.getvalue()


def _chart_svg(chart: ChartBlock | DotBlock) -> str:
    if isinstance(chart, DotBlock):
        return dots_chart_svg(chart.title, chart.rows, unit=chart.unit, x_range=chart.x_range)
    return line_chart_svg(chart.title, chart.series, x=chart.x, y=chart.y, vlines=chart.vlines)


def _chart_html(chart: ChartBlock | DotBlock) -> Markup:
    if isinstance(chart, DotBlock):
        return dots_chart(chart.title, chart.rows, unit=chart.unit, x_range=chart.x_range)
    return line_chart(chart.title, chart.series, x=chart.x, y=chart.y, vlines=chart.vlines)


def _block_markdown(block: ResultBlock, name: str) -> Iterator[str]:
    if isinstance(block, TextBlock):
        yield block.text
    elif isinstance(block, BulletBlock):
        yield from (f"- {item}" for item in block.items)
    elif isinstance(block, ChartBlock | DotBlock):
        yield f"![{block.title}]({name}-{block.name}.svg)"
    else:
        if block.is_collapsed:
            yield from ("<details>", f"<summary>{block.caption}</summary>", "")
        elif block.caption:
            yield from (f"{block.caption}:", "")
        yield f"| {' | '.join(block.heads)} |"
        yield f"|{'|'.join('---' if i < block.text_columns else '---:' for i in range(len(block.heads)))}|"
        yield from (f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in block.rows)
        if block.is_collapsed:
            yield from ("", "</details>")


def _block_html(block: TextBlock | BulletBlock | TableBlock) -> Any:
    if isinstance(block, TextBlock):
        return [tag("p", paragraph) for paragraph in re.split(r"\n\s*\n", block.text)]
    if isinstance(block, BulletBlock):
        return tag("div", tag("ul", [tag("li", item) for item in block.items]), class_="notice")
    heads = [tag("th", head, class_=None if i < block.text_columns else "n") for i, head in enumerate(block.heads)]
    rows = [
        tag("tr", [tag("td", cell, class_=None if i < block.text_columns else "n") for i, cell in enumerate(row)])
        for row in block.rows
    ]
    drawn = tag("table", tag("thead", tag("tr", heads)), tag("tbody", rows), class_="compact")
    if block.is_collapsed:
        return tag("details", tag("summary", block.caption), drawn)
    return [tag("h3", block.caption) if block.caption else None, drawn]
