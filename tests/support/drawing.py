"""Dashboards drawn without a Grafana server: Grafana's panel components in headless Chromium, with a Prometheus."""

import json
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support.browser import Browser

ROOT = Path(__file__).resolve().parents[2]
RENDERER = ROOT / "tools" / "dashboards_renderer"
BUNDLE = RENDERER / "dist" / "board.js"
WATCH_LABELS = """
window.CUT = [];
const fillText = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...rest) {
  const { a, b, e } = this.getTransform();
  const width = this.measureText(text).width * { right: 1, end: 1, center: 0.5 }[this.textAlign] || 0;
  if (b === 0 && a * (x - width) + e < 0) window.CUT.push(text);
  return fillText.call(this, text, x, y, ...rest);
};
"""
"""Program that collects texts which begin left of their canvas, so that their first letters are cut."""
EVERYTHING = {"namespace": ".*", "run": ".+", "rank": ".+"}
"""Values that Grafana substitutes for `All`."""


@dataclass(frozen=True)
class Span:
    """Drawn time span, unix seconds, and Prometheus' scrape interval."""

    prometheus: str
    begin: float
    end: float
    scrape: float


def bundle() -> Path:
    """Build the page's program; the first call installs its packages. Raises RuntimeError without npm."""
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError("npm: not on the PATH. Install Node.js 20 or later.")
    if not (RENDERER / "node_modules").exists():
        subprocess.run([npm, "ci", "--no-audit", "--no-fund", "--loglevel=error"], cwd=RENDERER, check=True)
    subprocess.run([npm, "run", "--silent", "build", "--", "--log-level=error"], cwd=RENDERER, check=True)
    return BUNDLE


def draw(
    browser: Browser,
    dashboard: dict[str, Any],
    span: Span,
    page: Path,
    *,
    width: int,
    subtitle: str = "",
    variables: Mapping[str, str] = EVERYTHING,
) -> list[str]:
    """Draw a dashboard at `width` CSS pixels in the browser's tab; return the titles of panels without data."""
    job = {"dashboard": dashboard, "variables": variables, "width": width, "subtitle": subtitle, **asdict(span)}
    page.write_text(
        '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        '<style>body{margin:0}</style><div id="board"></div>'
        f'<link rel="stylesheet" href="{BUNDLE.with_suffix(".css").as_uri()}">'
        f"<script>{WATCH_LABELS}window.JOB = {json.dumps(job)}</script>"
        f'<script src="{BUNDLE.as_uri()}"></script>',
        encoding="utf-8",
    )
    browser.open(page, width=width)
    deadline = time.monotonic() + 120
    while not browser.evaluate("window.DRAWN === true"):
        failed = browser.evaluate("window.FAILED")
        thrown = [event["params"] for event in browser.events if event.get("method") == "Runtime.exceptionThrown"]
        if failed or thrown:
            raise RuntimeError(f"{dashboard['title']} could not be drawn: {failed} {thrown[:1]}")
        assert time.monotonic() < deadline, f"{dashboard['title']} is not drawn after two minutes"
        time.sleep(0.1)
    if cut := browser.evaluate("window.CUT"):
        raise RuntimeError(f"{dashboard['title']}: labels are cut at the left: {', '.join(cut[:5])}")
    empty: list[str] = browser.evaluate("window.EMPTY")
    return empty
