"""report.html: all sections on one self-contained page, without a script and without a remote asset."""

from importlib import resources

from podscale.evaluate.report import sections
from podscale.evaluate.report.gather import ReportData
from podscale.evaluate.report.svg import Markup, tag, text, void
from podscale.version import VERSION

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""The page may show what it holds and nothing else: even a forgotten escape could not fetch or run anything."""


def page(data: ReportData) -> str:
    """The whole document."""
    style = Markup((resources.files(__package__) / "style.css").read_text(encoding="utf-8"))
    head = tag(
        "head",
        void("meta", charset="utf-8"),
        void("meta", http_equiv="Content-Security-Policy", content=POLICY),
        void("meta", name="viewport", content="width=device-width, initial-scale=1"),
        void("meta", name="color-scheme", content="light dark"),
        tag("title", f"{data.name}: Podscale report"),
        tag("style", style),
    )
    footer = tag("footer", f"Podscale {VERSION}. Everything on this page was read from the run directory.")
    body = tag("body", tag("main", [section(data) for section in sections.ALL], footer))
    return text(Markup("<!doctype html>\n"), tag("html", head, body, lang="en")) + "\n"
