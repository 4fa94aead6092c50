"""report.html: all sections on one self-contained page, without scripts or remote assets."""

from importlib import resources
from pathlib import Path
from typing import Any

from podscale.data.shard_set import ShardSet
from podscale.report import sections
from podscale.report.markup import Markup, join_markup, tag, void_tag
from podscale.report.report_data import ReportData, read_report_data
from podscale.util.files import write_atomically
from podscale.version import VERSION

CONTENT_SECURITY_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Blocks scripts and remote content, so that a missing escape cannot fetch or run anything."""
FRAME_POLICY = "; frame-src 'self'"
"""Also lets a report show the demo page beside it."""


def build_report(run_directory: Path, shard_set: ShardSet | Path | str | None) -> Path:
    """Write <run>/report.html, which lists missing parts with the reason, and return its path."""
    data = read_report_data(Path(run_directory), shard_set)
    write_atomically(data.run.report, render_page(data))
    return data.run.report


def render_page(data: ReportData) -> str:
    body = [section(data) for section in sections.SECTIONS]
    return render_framed_page(
        f"{data.name}: Podscale report",
        body,
        "Everything on this page was read from the run directory.",
        CONTENT_SECURITY_POLICY + FRAME_POLICY,
    )


def render_framed_page(title: str, body: Any, origin: str, policy: str = CONTENT_SECURITY_POLICY) -> str:
    """Render an HTML document in the style of reports; `origin` is a sentence for the footer."""
    style = Markup((resources.files(__package__) / "style.css").read_text(encoding="utf-8"))
    head = tag(
        "head",
        void_tag("meta", charset="utf-8"),
        void_tag("meta", http_equiv="Content-Security-Policy", content=policy),
        void_tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        void_tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", style),
    )
    main = tag("body", tag("main", body, tag("footer", f"Podscale {VERSION}. {origin}")))
    return join_markup(Markup("<!doctype html>\n"), tag("html", head, main, lang="en")) + "\n"
