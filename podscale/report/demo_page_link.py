"""Link from report.html to the demo pages of a run, each an exported file that classifies pictures in the browser.

The report is written before the export. So the report has a place for the link, which the export fills, and a report
that is written later fills it itself. A page of other weights than the model's is not linked.
"""

import json
import re
from pathlib import Path

from podscale.config.export import FILE_NAMES
from podscale.report.markup import Markup, format_size, join_markup, section_tag, tag
from podscale.runs import RunDirectory
from podscale.runs.model_files import WEIGHTS_FILE
from podscale.util.files import file_sha256, write_atomically

PAGES = {FILE_NAMES["html"]: "fp32", FILE_NAMES["html-int8"]: "int8"}
"""Precision of each page by its file name."""
PLACE_ID = "demo"
TITLE = "The model in your browser"
FRAME = "demo-frame"
"""Name of the frame that shows a page."""
_PLACE = re.compile(rf'<div id="{PLACE_ID}">.*?</div>', re.DOTALL)
"""Place of the link, which has no other `div` inside."""


def demo_section(run: RunDirectory) -> Markup:
    """Return the place of the link: with links to the pages of the run and a frame for the first, or empty."""
    pages = demo_pages(run)
    if not pages:
        return tag("div", id=PLACE_ID)
    links = [
        join_markup(", " if i else "", tag("a", page.name, href=_address(page)), f" ({_describe(page)})")
        for i, page in enumerate(pages)
    ]
    # A page has many megabytes, so the frame is empty until the user follows the link that targets it.
    load = tag("a", f"Load {pages[0].name} here", href=_address(pages[0]), target=FRAME)
    frame = tag("iframe", name=FRAME, title="Demo page of the model", sandbox="allow-scripts", class_="demo")
    section = section_tag(
        TITLE,
        tag("p", "Classify your own pictures: ", links, ". They stay in the page."),
        tag("details", tag("summary", "Show it here"), tag("p", load), frame),
    )
    return tag("div", section, id=PLACE_ID)


def demo_pages(run: RunDirectory) -> list[Path]:
    """Return the demo pages of the run that have the weights of its model."""
    weights = run.model / WEIGHTS_FILE
    try:
        written = {run.exports / name: _weights_hash(run.exports / name) for name in PAGES}
        current = file_sha256(weights) if any(written.values()) else ""
    except OSError:
        return []
    return [page for page, exported in written.items() if exported and exported == current]


def update_demo_link(run: RunDirectory) -> None:
    """Fill the place in an existing report; a report of an earlier version has none and stays as it is."""
    if run.report.exists():
        report = run.report.read_text(encoding="utf-8")
        section = demo_section(run)
        changed = _PLACE.sub(lambda _: section, report, count=1)
        if changed != report:
            write_atomically(run.report, changed)


def without_demo_link(report: str, page: str | None = None) -> str:
    """Return a report without links to pages, for viewers that show it away from its folder.

    Args:
        page: name of the page that the pipeline's task `export` shows, which the report then mentions.
    """
    place = tag("div", id=PLACE_ID)
    if page is not None:
        task = tag("code", "export")
        text = tag("p", f"Classify your own pictures on {page}: the task ", task, " of this pipeline shows it.")
        place = tag("div", section_tag(TITLE, text), id=PLACE_ID)
    return _PLACE.sub(lambda _: place, report, count=1)


def _weights_hash(page: Path) -> str:
    """Return the hash of the weights in a page, from the report of its check; empty if there is no page."""
    if not page.exists():
        return ""
    try:
        return str(json.loads(page.with_name(f"{page.name}.json").read_text(encoding="utf-8"))["weights_sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _address(page: Path) -> str:
    return f"{page.parent.name}/{page.name}"


def _describe(page: Path) -> str:
    return f"{PAGES[page.name]}, {format_size(page.stat().st_size)}"
