"""Links of the repository's Markdown pages lead somewhere (tools/markdown_links.py)."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.markdown_links import ROOT, broken_links, find_links, heading_anchors, markdown_pages


@pytest.mark.parametrize("page", markdown_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ('[a](b.md), ![c](d.png "title") and [e](<f.md>)', ["b.md", "d.png", "f.md"]),
        ("[`code`](b.md#x)", ["b.md#x"]),
        ("[a][ref]\n\n[ref]: b.md", ["b.md"]),
        ('<img src="a.png"> <a class="x" href="b.md">', ["a.png", "b.md"]),
        ("`[a](b.md)` and ``[a](`b.md`)``", []),
        ("```\n[a](b.md)\n```\n[c](d.md)", ["d.md"]),
        ("- item\n\n    ```yaml\n    [a](b.md)\n    ```\n", []),
        ("<!-- [a](b.md) -->", []),
        ("[a](x_(y).md)", ["x_(y).md"]),
    ],
)
def test_links_are_found(text: str, targets: list[str]) -> None:
    links = find_links(text)
    assert [link.target for link in links] == targets
    assert all(text[link.start :].startswith(link.target) for link in links)


def test_anchors_follow_the_rule_of_github() -> None:
    text = '# `podscale run`\n## A / b, c-d_e\n## Twice\n## Twice ##\n## [Link](x.md) *x*\n<a id="own"></a>\n'
    code = "```\n# no heading\n```\n"
    assert heading_anchors(text + code) == {
        "podscale-run",
        "a--b-c-d_e",
        "twice",
        "twice-1",
        "link-x",
        "own",
    }


def test_broken_links_are_named(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "other.md").write_text("# Here\n")
    page = tmp_path / "docs" / "page.md"
    page.write_text(
        "# Page\n\n[ok](../other.md#here) [ok](#page) [ok](https://example.com/gone.md) [ok](..)\n"
        "[gone](gone.md)\n[gone](../other.md#gone) [gone](#gone)\n[gone](/etc)\n"
    )
    assert broken_links(page, tmp_path) == [
        "docs/page.md:4: gone.md: there is no such file",
        "docs/page.md:5: ../other.md#gone: the page has no such heading",
        "docs/page.md:5: #gone: the page has no such heading",
        "docs/page.md:6: /etc: outside the repository",
    ]


def test_the_command_succeeds() -> None:
    done = subprocess.run([sys.executable, "-m", "tools.markdown_links"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
