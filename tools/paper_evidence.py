"""Evidence behind a line of docs/explanation/papers.md: tests by name, numbers quoted from result pages, studies.

Everything is read from the file that it is quoted from, so the page cannot say what that file no longer says: a test, a
table cell, a sentence or a preset that is gone is an error here.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

from tools.markdown_links import heading_slug

ROOT = Path(__file__).resolve().parents[1]
STUDY_DOCUMENTS = ROOT / "pipelines" / "studies"
STUDY_RESULTS = ROOT / "benchmarks" / "results" / "learning"

_IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?)\s*$")


class EvidenceError(Exception):
    """Evidence that does not exist, with the place that names it."""


@cache
def test_functions(path: str) -> frozenset[str]:
    """Return the names of the test functions of a file, whose path is relative to the repository."""
    file = ROOT / path
    if not file.is_file():
        raise EvidenceError(f"no test file {path}")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = (node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(name for name in names if name.startswith("test_"))


def check_test(test: str) -> tuple[str, str]:
    """Return path and function of a test `path::function`. Raises EvidenceError if it does not exist."""
    path, _, name = test.partition("::")
    if name not in test_functions(path):
        raise EvidenceError(f"{path} has no test {name}")
    return path, name


class Quotation(NamedTuple):
    """Text of a result page, with the page's path and anchor."""

    text: str
    link: str


def quote_sentence(link: str, sentence: str) -> Quotation:
    """Return a sentence of a page or of its section. Raises EvidenceError if it is not there word for word."""
    if " ".join(sentence.split()) not in " ".join(_section(link).split()):
        raise EvidenceError(f"{link} does not say: {sentence}")
    return Quotation(sentence, link)


def quote_cells(link: str, cells: Sequence[tuple[str, str]]) -> Quotation:
    """Return cells of the tables of a page's section, each given by its row's first cells and its column's head."""
    values = {(row, column): text for row, column, text in reversed(list(_cells(_section(link))))}
    found = []
    for row, column in cells:
        cell = values.get((row, column))
        if cell is None:
            raise EvidenceError(f"{link} has no cell in row {row!r}, column {column!r}")
        found.append(f"{row}, {column}: {cell}")
    return Quotation("; ".join(found), link)


def _section(link: str) -> str:
    """Return the text below the heading of a link's anchor, up to the next heading of its level; or the page."""
    path, _, anchor = link.partition("#")
    if not (ROOT / path).is_file():
        raise EvidenceError(f"no page {path}")
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    if not anchor:
        return "\n".join(lines)
    for start, line in enumerate(lines):
        heading = _HEADING.match(line)
        if heading and heading_slug(heading[1]) == anchor:
            level = len(line) - len(line.lstrip("#"))
            rest = lines[start + 1 :]
            same = re.compile(rf"#{{1,{level}}} ")
            return "\n".join(rest[: next((n for n, each in enumerate(rest) if same.match(each)), len(rest))])
    raise EvidenceError(f"{path} has no section {anchor}")


def _cells(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield (row, head of the column, text) of all cells of the tables in a text, for each name of their row.

    A row is named by its first cell, by its first two cells with a comma between them, and so on.
    """
    head: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            head = []
            continue
        row = [cell.strip() for cell in line.strip().strip("|").split("|")]
        head = head or row
        for column, (heading, cell) in enumerate(zip(head, row, strict=False)):
            yield from ((", ".join(row[:length]), heading, cell) for length in range(1, column + 1))


def studies_of(paper: str) -> list[str]:
    """Return the names of the study documents whose key `papers` has this paper, in alphabetical order."""
    documents = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in STUDY_DOCUMENTS.glob("*.yaml")}
    return sorted(name for name, document in documents.items() if paper in document.get("papers", ()))


class StudyResult(NamedTuple):
    """Result of a study, from the page that `podscale study` wrote. Empty findings if it has not been run."""

    name: str
    title: str
    findings: tuple[str, ...] = ()
    image: str = ""
    image_title: str = ""


def study_result(name: str) -> StudyResult:
    """Return two findings and a picture of a study. Raises EvidenceError if there is neither document nor page.

    The findings are the first two points of the list at the top of its page: the verdict on its criteria, if it has
    any, and what follows it.
    """
    page, document = STUDY_RESULTS / f"{name}.md", STUDY_DOCUMENTS / f"{name}.yaml"
    if not page.is_file():
        if not document.is_file():
            raise EvidenceError(f"no study {name}")
        return StudyResult(name, yaml.safe_load(document.read_text(encoding="utf-8")).get("title", name))
    text = page.read_text(encoding="utf-8")
    title = _HEADING.match(text.partition("\n")[0])
    findings = tuple(line.removeprefix("- ") for line in text.splitlines() if line.startswith("- "))[:2]
    if not title or not findings:
        raise EvidenceError(f"{page.relative_to(ROOT)} has no title or no findings")
    image = _IMAGE.search(text)
    return StudyResult(name, title[1], findings, *((image[2], image[1]) if image else ()))
