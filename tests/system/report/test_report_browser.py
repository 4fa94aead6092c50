"""The report in a real browser: in the pipeline UI's sandboxed frame, on a phone, in dark mode, without scripts."""

import json
import shutil
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path

import pytest

from podscale.report.demo_page_link import update_demo_link, without_demo_link
from podscale.report.page import build_report
from podscale.runs import RunDirectory
from podscale.util.files import file_sha256
from tests.support.browser import Browser, browser, browser_or_skip
from tests.support.digits_run import DIGITS, make_digits_run
from tests.support.polling import until

HOSTILE = "<script>document.title='owned'</script>"

PROBE = """<script>
addEventListener("load", () => parent.postMessage({
  text: document.body.innerText,
  width: document.documentElement.scrollWidth,
  charts: [...document.querySelectorAll("svg")].map(s => {
    const b = s.getBBox(); return [s.getAttribute("aria-label"), b.width, b.height] }),
  clipped: [...document.querySelectorAll("svg.chart text:not(.readout)")].filter(t => {
    const a = t.getBoundingClientRect(), b = t.closest("figure").getBoundingClientRect();
    return a.width && (a.left < b.left - 1 || a.right > b.right + 1) }).map(t => t.textContent),
  images: [...document.images].map(i => i.complete && i.naturalWidth),
  background: getComputedStyle(document.body).backgroundColor,
}, "*"))
</script>"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_digits_run(tmp_path_factory.mktemp("browser"), [*DIGITS[:9], HOSTILE])
    return build_report(run.path, run.shard_set)


@pytest.fixture(scope="module")
def page() -> Iterator[Browser]:
    program = browser_or_skip()
    with browser(program) as browser_page:
        yield browser_page


def framed(report: Path, probe: str = PROBE) -> Path:
    """Page that shows the report as the pipeline UI does; a probe script reports the layout of the frame.

    Only the probe may run: it comes after the report, and the report's policy is lifted for it alone.
    """
    policy = escape("default-src 'none'")
    text = report.read_text()
    assert policy in text
    inner = text.replace(policy, policy + escape("; script-src 'unsafe-inline'"), 1) + probe
    outer = report.with_name("framed.html")
    outer.write_text(
        "<!doctype html><meta name=viewport content='width=device-width'>"
        "<style>body{margin:0}iframe{border:0;width:100%;height:900px}</style>"
        "<script>addEventListener('message', e => { window.seen = e.data })</script>"
        f'<iframe sandbox="allow-scripts" srcdoc="{escape(inner)}"></iframe>'
    )
    return outer


def seen(page: Browser, path: Path, width: int, dark: bool = False) -> dict[str, object]:
    page.open(path, width=width, dark=dark)
    observed: dict[str, object] | None = None
    deadline = time.monotonic() + 30
    while observed is None and time.monotonic() < deadline:
        observed = page.evaluate("window.seen")
        time.sleep(0.05)
    assert observed is not None, f"the frame never reported: {complaints(page)}"
    return observed


def complaints(page: Browser) -> list[str]:
    kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
    return [json.dumps(event) for event in page.events if event["method"] in kinds]


@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_sandboxed_frame(page: Browser, report: Path, width: int) -> None:
    path = framed(report)
    observed = seen(page, path, width)
    text = str(observed["text"])
    for heading in ("digits-softmax", "Claim and result", "Confusion matrix", "Most confident mistakes", HOSTILE):
        assert heading in text
    assert observed["width"] == width, "the page is wider than its window"
    charts = observed["charts"]
    assert isinstance(charts, list)
    assert len(charts) >= 8
    assert all(w > 10 and h > 10 for _, w, h in charts), charts
    assert observed["clipped"] == []
    images = observed["images"]
    assert isinstance(images, list)
    assert len(images) >= 30
    assert all(images)
    assert complaints(page) == []
    assert page.requests() == [path.as_uri()]
    assert page.evaluate("document.title") == ""


def test_the_check_notices_a_script_and_a_request(page: Browser, report: Path) -> None:
    """The same checks fail on a page with a script and a request, so that they are known to notice both."""
    bad = (
        "<script>console.error('boo')</script><img src='http://127.0.0.1:9/x.png'><p style='width:3000px'>wide</p>"
        + PROBE
    )
    observed = seen(page, framed(report, bad), 390)
    assert isinstance(observed["width"], int)
    assert observed["width"] > 390
    assert any("boo" in entry for entry in complaints(page))
    assert any("img-src" in entry or "x.png" in entry for entry in complaints(page) + page.requests())


def test_light_and_dark_differ(page: Browser, report: Path) -> None:
    path = framed(report)
    assert seen(page, path, 1280)["background"] != seen(page, path, 1280, dark=True)["background"]


def test_alone_and_without_scripts(page: Browser, report: Path, tmp_path: Path) -> None:
    copy = tmp_path / "report.html"
    shutil.copy(report, copy)
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        page.open(copy, width=390)
        assert complaints(page) == []
        assert page.requests() == [copy.as_uri()]
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.evaluate("document.title") == "digits-softmax: Podscale report"
    finally:
        page.call("Emulation.setScriptExecutionDisabled", value=False)


def with_demo_page(report: Path, folder: Path) -> RunDirectory:
    """Return a copy of the run with a small page that stands for an exported one, linked in the report."""
    run = RunDirectory(folder / "run")
    shutil.copytree(report.parent, run.path)
    run.exports.mkdir()
    demo = run.exports / "demo.html"
    demo.write_text("<!doctype html><script>console.log('the demo ran')</script>")
    check = {"weights_sha256": file_sha256(run.model / "model.safetensors")}
    demo.with_name("demo.html.json").write_text(json.dumps(check))
    update_demo_link(run)
    return run


def test_the_demo_page_is_loaded_when_the_user_asks_for_it(page: Browser, report: Path, tmp_path: Path) -> None:
    run = with_demo_page(report, tmp_path)
    demo = (run.exports / "demo.html").as_uri()
    page.open(run.report)
    assert complaints(page) == []
    assert page.requests() == [run.report.as_uri()]
    assert page.evaluate("document.querySelector('#demo a').href") == demo
    page.evaluate("document.querySelector('#demo details').open = true")
    assert page.requests() == [run.report.as_uri()]
    page.evaluate("document.querySelector('#demo details a').click()")
    until(lambda: page.evaluate("true") and complaints(page), 20)
    (message,) = complaints(page)
    assert "the demo ran" in message
    assert page.requests() == [run.report.as_uri(), demo]
    assert page.evaluate("document.querySelector('#demo iframe').getBoundingClientRect().height") > 400
    assert page.evaluate("document.documentElement.scrollWidth") == 1280
    page.evaluate("void setTimeout(() => document.querySelector('#demo a').click())")  # answers before it navigates
    until(lambda: page.call("Page.getFrameTree")["frameTree"]["frame"]["url"] == demo, 20)


def test_a_link_to_the_demo_page_leads_nowhere_in_a_sandboxed_frame(
    page: Browser, report: Path, tmp_path: Path
) -> None:
    """The reason why the artifact of Kubeflow Pipelines has no link."""
    run = with_demo_page(report, tmp_path)
    seen(
        page,
        framed(run.report, f"<script>for (const a of document.querySelectorAll('#demo a')) a.click()</script>{PROBE}"),
        1280,
    )
    until(lambda: page.evaluate("true") and complaints(page), 20)
    assert all("Not allowed to load local resource" in message for message in complaints(page))
    assert not any("demo.html" in url for url in page.requests())
    run.report.write_text(without_demo_link(run.report.read_text()))
    assert "demo.html" not in run.report.read_text()
    seen(page, framed(run.report), 1280)
    assert complaints(page) == []
