"""Drawings as files of their own, in the colours of the report, on light and dark pages."""

from importlib import resources
from typing import Any

from podscale.evaluate.report.svg import Markup, tag

GROUND = "svg{background:var(--bg);font-family:system-ui,sans-serif}text.title{font-weight:600;font-size:13px}"


def standalone(*drawing: Any, width: float, height: float, enlarged: float = 1.0) -> str:
    """The text of an SVG file; width and height in the drawing's units, which it is shown `enlarged` times."""
    style = (resources.files("podscale.evaluate.report") / "style.css").read_text(encoding="utf-8")
    picture = tag(
        "svg",
        tag("style", Markup(style + GROUND)),
        drawing,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=f"{enlarged * width:.0f}",
    )
    return f"{picture}\n"
