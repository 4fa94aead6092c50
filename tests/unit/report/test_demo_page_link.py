"""Link of the report to the run's demo page: there if the page has the model's weights, and nowhere else."""

import json
from pathlib import Path

import pytest

from podscale.report.demo_page_link import demo_pages, update_demo_link, without_demo_link
from podscale.report.page import build_report
from podscale.runs import RunDirectory
from podscale.util.files import file_sha256

EMPTY = '<div id="demo"></div>'


def write_page(run: RunDirectory, name: str = "demo.html") -> Path:
    run.exports.mkdir(exist_ok=True)
    page = run.exports / name
    page.write_bytes(b"x" * 8_000_000)
    check = {"weights_sha256": file_sha256(run.model / "model.safetensors")}
    page.with_name(f"{name}.json").write_text(json.dumps(check))
    return page


def test_the_export_adds_the_link_and_a_later_report_has_it(run: Path) -> None:
    directory = RunDirectory(run)
    before = build_report(run, None).read_text()
    assert EMPTY in before
    assert "demo.html" not in before
    write_page(directory)
    update_demo_link(directory)
    linked = directory.report.read_text()
    assert '<a href="export/demo.html">demo.html</a> (fp32, 8 MB)' in linked
    assert 'sandbox="allow-scripts"' in linked
    assert build_report(run, None).read_text() == linked
    assert without_demo_link(linked) == before
    detached = without_demo_link(linked, "demo.html")
    assert "demo.html" in detached
    assert "<a href=" not in detached.partition('<div id="demo">')[2].partition("</div>")[0]
    assert len(linked) - len(before) < 1000
    write_page(directory, "demo.int8.html")
    update_demo_link(directory)
    both = directory.report.read_text()
    assert '<a href="export/demo.int8.html">demo.int8.html</a> (int8, 8 MB)' in both
    assert both.count("<iframe") == 1
    assert directory.report.stat().st_size < 2_000_000


def test_a_page_of_other_weights_is_not_linked(run: Path) -> None:
    directory = RunDirectory(run)
    write_page(directory)
    assert demo_pages(directory) == [directory.exports / "demo.html"]
    weights = run / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert demo_pages(directory) == []
    assert EMPTY in build_report(run, None).read_text()


@pytest.mark.parametrize("text", [None, "", "[]", '{"weights_sha256": null}'])
def test_a_page_without_its_check_is_not_linked(run: Path, text: str | None) -> None:
    check = write_page(RunDirectory(run)).with_name("demo.html.json")
    check.unlink() if text is None else check.write_text(text)
    assert demo_pages(RunDirectory(run)) == []


def test_a_report_of_an_earlier_version_stays_as_it_is(run: Path) -> None:
    directory = RunDirectory(run)
    write_page(directory)
    directory.report.write_text("<!doctype html><p>old")
    update_demo_link(directory)
    assert directory.report.read_text() == "<!doctype html><p>old"
    directory.report.unlink()
    update_demo_link(directory)
    assert not directory.report.exists()
