"""Dashboards drawn by Grafana's components: no empty panel and no overflow, on a wide screen and on a phone.

Needs the npm packages that `make dashboards` installs (460 MB); skipped without them.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import synthetic_run
from tests.support.browser import Browser, browser, find_browser
from tests.support.drawing import BUNDLE, Span, draw
from tests.support.helm import CHART
from tests.support.prometheus import fill, prometheus
from tests.support.synthetic_run import EVERY, LENGTH

BOARDS = sorted((CHART / "dashboards").glob("*.json"))
OUTSIDE = """
[...document.querySelectorAll('[data-title]')].filter((panel) => {
  const { left, right, width, height } = panel.getBoundingClientRect();
  return left < 0 || right > window.innerWidth + 1 || width < 50 || height < 20;
}).map((panel) => panel.dataset.title)
"""
BLANK = """
[...document.querySelectorAll('[data-title]')].filter((panel) =>
  !panel.className.includes('row') && !panel.querySelector('canvas') && panel.innerText.trim() === panel.dataset.title
).map((panel) => panel.dataset.title)
"""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Browser, Span]]:
    program = find_browser()
    if program is None or not BUNDLE.exists():
        pytest.skip("needs Chromium, and the page that `make dashboards` builds")
    data = tmp_path_factory.mktemp("prometheus") / "data"
    begin = time.time() // EVERY * EVERY - LENGTH
    fill(data, synthetic_run.history().text(begin))
    with prometheus(data) as running, browser(program) as tab:
        yield tab, Span(running.url, begin + EVERY, begin + LENGTH, EVERY)


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_every_panel_is_drawn_and_within_the_screen(
    path: Path, width: int, drawn: tuple[Browser, Span], tmp_path: Path
) -> None:
    tab, span = drawn
    dashboard = json.loads(path.read_text(encoding="utf-8"))
    assert draw(tab, dashboard, span, tmp_path / "page.html", width=width) == []
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert tab.evaluate(OUTSIDE) == []
    assert tab.evaluate(BLANK) == []
    assert tab.evaluate("document.querySelectorAll('[data-title]').length") == len(dashboard["panels"])


def test_labels_are_measured_in_the_font_that_draws_them(drawn: tuple[Browser, Span], tmp_path: Path) -> None:
    """Grafana leaves as much space for an axis as its labels take in Inter; another font is cut at the left."""
    tab, span = drawn
    draw(tab, json.loads(BOARDS[0].read_text(encoding="utf-8")), span, tmp_path / "page.html", width=1440)
    loaded = "[...document.fonts].filter((face) => face.family === 'Inter' && face.status === 'loaded').length"
    assert tab.evaluate(loaded) == 2
    at = "const c = document.createElement('canvas').getContext('2d'); c.textAlign = 'right'; c.fillText('500', {}, 9)"
    for x, cut in ((90, []), (5, ["500"])):
        assert tab.evaluate(f"(() => {{ {at.format(x)}; return window.CUT }})()") == cut
