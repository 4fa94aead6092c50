"""Evidence behind a line of docs/explanation/papers.md: tests by name, numbers quoted from result pages, studies.

Everything is read from the file that it is quoted from, so the page cannot say what that file no longer says: a test, a
table cell, a sentence or a preset that is gone is an error here.
"""

import ast
import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pipelines import presets
from podscale.study import StudyDocument, read_study
from podscale.study.document import START_OPTION
from tools.markdown_links import heading_slug

ROOT = Path(__file__).resolve().parents[1]
STUDY_DOCUMENTS = ROOT / "pipelines" / "studies"
STUDY_RESULTS = ROOT / "benchmarks" / "results" / "learning"

NETWORKS = {"resnet18": "ResNet-18"}
DATA = {"digits": "the digits", "imagenette224.tar": "Imagenette"}

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
    return Quotation("; ".join(f"{row}, {column}: {cell(link, row, column)}" for row, column in cells), link)


def quote_criteria(study: str, criteria: Sequence[str]) -> Quotation:
    """Return criteria of a study with their results."""
    text = "; ".join(f"{name}: {criterion_result(study, name)}" for name in criteria)
    return Quotation(text, _result_page(study))


def cell(link: str, row: str, column: str) -> str:
    """Return the first cell of a row and column in the tables of a page's section (see `quote_cells`)."""
    values = {(row, column): text for row, column, text in reversed(list(_cells(_section(link))))}
    if (row, column) not in values:
        raise EvidenceError(f"{link} has no cell in row {row!r}, column {column!r}")
    return values[row, column]


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
    return sorted(name for name, papers in _papers_of_studies(STUDY_DOCUMENTS).items() if paper in papers)


@cache
def _papers_of_studies(folder: Path) -> Mapping[str, Sequence[str]]:
    """Return the papers that each study document of a folder names, by the study's name."""
    documents = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in folder.glob("*.yaml")}
    return {name: document.get("papers", ()) for name, document in documents.items()}


class StudyResult(NamedTuple):
    """Result of a study, from the page and the verdict that `podscale study` wrote.

    Args:
        verdict: In words; "" for a study without criteria.
        scale: Network, image size, data, batch, epochs, steps and seeds, in words.
        conclusions: Each criterion with its result; without criteria, the first line of the page's list. Empty before
            it ran.
    """

    name: str
    title: str
    verdict: str = ""
    scale: str = ""
    conclusions: tuple[str, ...] = ()


@cache
def study_document(name: str) -> StudyDocument:
    """Return the document of a study. Raises EvidenceError if there is none."""
    path = STUDY_DOCUMENTS / f"{name}.yaml"
    if not path.is_file():
        raise EvidenceError(f"no study {name}")
    return read_study(path, {}, presets.resolve_preset)


@cache
def study_result(name: str) -> StudyResult:
    """Return the result of a study. Raises EvidenceError if it has no document."""
    page, study = STUDY_RESULTS / f"{name}.md", study_document(name)
    if not page.is_file():
        return StudyResult(name, study.title or name)
    file = STUDY_RESULTS / f"{name}.verdict.json"
    if not file.is_file():
        conclusions = [
            line.removeprefix("- ") for line in page.read_text(encoding="utf-8").splitlines() if line[:2] == "- "
        ]
        if not conclusions:
            raise EvidenceError(f"{page} has no conclusions")
        return StudyResult(name, study.title, "", study_scale(study), (conclusions[0],))
    verdict = json.loads(file.read_text(encoding="utf-8"))
    return StudyResult(
        name,
        study.title,
        verdict["verdict"].replace("-", " "),
        study_scale(study),
        tuple(filter(None, map(_criterion_text, verdict["criteria"]))),
    )


def _criterion_text(criterion: Mapping[str, Any]) -> str:
    """Return a criterion's name and result; "" if it has not run."""
    if criterion["verdict"] == "not-run":
        return ""
    if criterion["value"] is None:
        return f"{criterion['name']}: the accuracy is not reached"
    if criterion["measure"] != "top1":
        return f"{criterion['name']}: {criterion['value']:.2f} of the steps"
    half_width = "" if criterion["half_width"] is None else f" \u00b1 {100 * criterion['half_width']:.2f}"
    return f"{criterion['name']}: {100 * criterion['value']:+.2f}{half_width} points"


def criterion_result(study: str, criterion: str) -> str:
    """Return the result of a study's criterion as its verdict has it, with the sign of the difference."""
    for conclusion in study_result(study).conclusions:
        if conclusion.startswith(f"{criterion}: "):
            return conclusion.removeprefix(f"{criterion}: ")
    raise EvidenceError(f"{study} has no result of a criterion {criterion!r}")


_PLACEHOLDER = re.compile(r"\{([-a-z0-9]+)(?:: ([^{}|]+?)(?: \| ([^{}|]+))?)?\}")


def fill_placeholders(text: str) -> str:
    """Return a text with its placeholders filled.

    {study} is a study's verdict, {study: criterion} the result of its criterion, and {page: row | column} a cell of a
    result page. Raises EvidenceError if one of them does not exist.
    """

    def value(match: re.Match[str]) -> str:
        name, row, column = match.groups()
        if row is None:
            return study_result(name).verdict
        return criterion_result(name, row) if column is None else cell(_result_page(name), row, column)

    filled = _PLACEHOLDER.sub(value, text)
    if "{" in filled:
        raise EvidenceError(f"not a placeholder in {text!r}")
    return filled


def _result_page(name: str) -> str:
    """Return the path of a result page, of a study or of a benchmark, from the repository."""
    found = STUDY_RESULTS / f"{name}.md"
    page = found if found.is_file() else STUDY_RESULTS.parent / f"{name}.md"
    return page.relative_to(ROOT).as_posix()


def study_scale(study: StudyDocument) -> str:
    """Return network, image size, data, batch, epochs, steps and seeds of a study's trainings, in words.

    Steps are left out for a study with a pretraining, whose file of trainings has those of the pretraining too.
    """
    points = [dict(zip(study.grid, values, strict=True)) for values in product(*study.grid.values())]
    starts = {one.name: {START_OPTION: one.start_from} if one.start_from else {} for one in study.variants}
    runs = [study.config({**one.set, **point, **starts[one.name]}) for one in study.variants for point in points]

    def several(values: Iterable[float]) -> str:
        return " and ".join(", ".join(f"{value:,g}" for value in sorted(set(values))).rsplit(", ", 1))

    with (STUDY_RESULTS / f"{study.name}.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["seed"]) in study.seeds and row["ended"] == "done"]
    steps = [] if study.pretraining else sorted({int(row["updates"]) for row in rows})
    networks = dict.fromkeys(f"{NETWORKS[run.model.name]} of width {run.model.width}" for run in runs)
    parts = [
        f"{', '.join(networks)} at {several(run.input.image_size for run in runs)} px on {DATA[runs[0].data.source]}",
        f"batch {several(run.train.global_batch for run in runs)}",
        f"{several(run.train.epochs for run in runs)} epochs",
        *([f"{steps[0]:,} to {steps[-1]:,} steps" if len(steps) > 1 else f"{steps[0]:,} steps"] if steps else []),
        f"{len(study.seeds)} seeds",
    ]
    return ", ".join(parts)


_NUMBER = re.compile(r"(?<![\w.,])[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\w)")


def numbers(text: str) -> set[str]:
    """Return the numbers of a text as they are written, with their signs if they have one."""
    return set(_NUMBER.findall(text))


def check_numbers(text: str, sources: Iterable[str], where: str) -> None:
    """Raise EvidenceError if a number of a text is in none of its sources, with its sign if it is written with one."""
    found = numbers("\n".join(sources))
    found |= {number.lstrip("+-") for number in found}
    if missing := numbers(text) - found:
        raise EvidenceError(f"{where}: {sorted(missing)} is in none of its sources")
